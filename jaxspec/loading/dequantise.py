"""Dequantising weights on the host, where a model does not take them as they are stored.

The formula is that of `pallas_kernels.quant.reference.dequantise`.
"""

import ml_dtypes
import numpy as np

from pallas_kernels.quant.schemes import Scheme

# float32 of every code: a lookup is several times faster than converting element by element.
_VALUES = {np.dtype(dtype): np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32) for dtype in (
    ml_dtypes.float8_e4m3fn,
)}  # fmt: skip


def dequantise(codes: np.ndarray, scale: np.ndarray, scheme: Scheme, into: np.ndarray | None = None) -> np.ndarray:
    """Codes [out, in] and a scale of each block, [blocks of out, blocks of in] -> bfloat16 [out, in].

    Goes by rows of blocks, so that no float32 copy of the whole weight exists.

    Args:
        into: C-contiguous, of the weight's size in any shape: it is filled and returned if it is bfloat16.
    """
    values, bits = _VALUES[codes.dtype], codes.view(np.uint8)
    result = into
    if result is None or result.dtype != ml_dtypes.bfloat16:
        result = np.empty(codes.shape, ml_dtypes.bfloat16)
    out, inputs = result.reshape(codes.shape), codes.shape[-1]
    # As many rows as give NumPy enough to do at a time.
    step = max(scheme.rows, 128)
    for first in range(0, len(codes), step):
        rows = slice(first, first + step)
        of_rows = scale[first // scheme.rows : -(-(first + step) // scheme.rows)].astype(np.float32)
        each = np.repeat(of_rows, scheme.columns or inputs, axis=1)[:, :inputs]
        out[rows] = values[bits[rows]] * np.repeat(each, scheme.rows, axis=0)[: len(bits[rows])]
    return result
