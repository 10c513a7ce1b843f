"""Dequantising weights on the host, where a model does not take them as they are stored.

The formula is that of `pallas_kernels.quant.reference.dequantise`.
"""

from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.quant.schemes import VALUES, Scheme


def dequantise(
    codes: np.ndarray,
    scale: np.ndarray,
    scheme: Scheme,
    into: np.ndarray | None = None,
    *,
    factor: np.ndarray | None = None,
    dtype: Any = ml_dtypes.bfloat16,
) -> np.ndarray:
    """Codes of a weight and a scale of each block, [*stack, blocks of out, of in] -> [*stack, out, in].

    Goes by rows of blocks, so that no float32 copy of the whole weight exists.

    Args:
        into: C-contiguous, of the weight's size in any shape: it is filled and returned if it has the dtype.
        factor: float32, a number, where the scheme has one.
        dtype: bfloat16, or float32 for the products as they are.
    """
    shape = (*codes.shape[:-1], codes.shape[-1] * scheme.packed)
    result = into
    if result is None or result.dtype != dtype:
        result = np.empty(shape, dtype)
    out = result.reshape(shape)
    for matrix in np.ndindex(codes.shape[:-2]):
        _fill(out[matrix], codes[matrix], scale[matrix], scheme, factor)
    return result


def _fill(out: np.ndarray, codes: np.ndarray, scale: np.ndarray, scheme: Scheme, factor: np.ndarray | None) -> None:
    """One matrix. A lookup is several times faster than converting element by element."""
    values, inputs = VALUES[scheme.values], out.shape[1]
    # As many rows as give NumPy enough to do at a time.
    step = max(scheme.rows, 128)
    for first in range(0, len(codes), step):
        rows = slice(first, first + step)
        of_rows = _numbers(scale[first // scheme.rows : -(-(first + step) // scheme.rows)])
        each = np.repeat(of_rows, scheme.columns or inputs, axis=1)[:, :inputs]
        bits = codes[rows].view(np.uint8)
        if scheme.packed == 2:
            bits = np.stack([bits & 15, bits >> 4], axis=-1).reshape(len(bits), inputs)
        value = values[bits] * np.repeat(each, scheme.rows, axis=0)[: len(bits)]
        out[rows] = value if factor is None else value * factor


def _numbers(scale: np.ndarray) -> np.ndarray:
    if scale.dtype != np.uint8:
        return scale.astype(np.float32)
    return (scale.astype(np.uint32) << 23).view(np.float32)
