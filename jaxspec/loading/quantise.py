"""Quantising weights that a checkpoint has unquantised, for `jaxspec convert --quantization fp8` and `int4`.

FP8: blocks of 128 x 128, scales that are powers of two, as DeepSeek-V3.1's (DeepGEMM, `ceil_to_ue8m0`). INT4: symmetric
groups of 32 inputs, scale bf16(largest / 7.5), as compressed-tensors' quantiser.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from jaxspec.loading.stored import ReadTensor, StoredWeight
from pallas_kernels.quant.schemes import FP8_BLOCK, INT4_G32, Scheme

# Of `jaxspec convert`: "auto" keeps what a checkpoint has.
Quantization = Literal["auto", "bf16", "fp8", "int4"]

_LARGEST = 448.0  # of e4m3; casts beyond it give NaN


def scheme_for(quantization: Quantization, axes: Collection[str | None]) -> Scheme | None:
    """What a weight that a model takes quantised is put into; None: it stays as it is.

    Args:
        axes: its logical axes. "int4" is for routed experts only, which is what Kimi-K2-Thinking and K2.5 have in it.
    """
    if quantization == "fp8":
        return FP8_BLOCK
    return INT4_G32 if quantization == "int4" and "experts" in axes else None


@dataclass(frozen=True)
class Unquantised(StoredWeight):
    """A weight that is quantised as it is read."""

    def read_codes(self, read: ReadTensor, into: np.ndarray | None = None) -> np.ndarray:  # noqa: ARG002
        return quantise(self._matrix(read), self.scheme)[0]

    def read_scale(self, read: ReadTensor) -> np.ndarray:
        return quantise(self._matrix(read), self.scheme)[1]

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.codes,)

    def _matrix(self, read: ReadTensor) -> np.ndarray:
        return read(self.codes, None).astype(np.float32)


def quantise(weight: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """The codes of a weight float32 [out, in], and a scale of each block, [blocks of out, blocks of in]."""
    return {FP8_BLOCK: _fp8, INT4_G32: _int4}[scheme](weight)


def _fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    inputs = weight.shape[1]
    rows, columns = FP8_BLOCK.blocks(weight.shape)
    codes, scales = np.empty(weight.shape, FP8_BLOCK.codes), np.empty((rows, columns), np.float32)
    for row in range(rows):
        band = slice(128 * row, 128 * (row + 1))
        largest = np.maximum.reduceat(np.abs(weight[band]).max(axis=0), np.arange(0, inputs, 128))
        scales[row] = np.exp2(np.ceil(np.log2(np.maximum(largest, 1e-4) / _LARGEST)))
        each = np.repeat(scales[row], 128)[:inputs]
        codes[band] = np.clip(weight[band] / each, -_LARGEST, _LARGEST).astype(FP8_BLOCK.codes)
    return codes, scales


def _int4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = weight.reshape(len(weight), -1, 32)
    scale = (np.abs(groups).max(axis=2) / 7.5).astype(ml_dtypes.bfloat16)
    scale[scale == 0] = 1
    codes = np.clip(np.rint(groups / scale.astype(np.float32)[:, :, None]), -8, 7).astype(np.int8)
    bits = codes.view(np.uint8).reshape(weight.shape)
    return bits[:, 0::2] & 15 | bits[:, 1::2] << 4, scale
