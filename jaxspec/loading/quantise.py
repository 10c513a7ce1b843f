"""Quantising weights that a checkpoint has unquantised, for `jaxspec convert --quantization fp8` and `int4`.

FP8: blocks of 128 x 128, scales that are powers of two, as DeepSeek-V3.1's (DeepGEMM, `ceil_to_ue8m0`). INT4: symmetric
groups of 32 inputs, scale bf16(largest / 7.5), as compressed-tensors' quantiser.
"""

import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.loading.dequantise import dequantise
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


class Rounding(NamedTuple):
    """What quantising changed in a weight: sums of squares, of the differences and of the weight itself."""

    wrong: float
    all: float


def relative_error(roundings: Iterable[Rounding]) -> float:
    """Root mean square of what was changed in several weights, relative to theirs."""
    wrong, everything = (sum(column) for column in zip(*roundings, strict=True))
    return math.sqrt(wrong / everything) if everything else 0.0


@dataclass(frozen=True)
class Unquantised(StoredWeight):
    """A weight that is quantised as it is read: once, for its codes and its scale, if the codes are read first.

    Attributes:
        scales: made and not read yet, by the name of a weight; `rounding`: of all that were made. Shared with other weights.
    """

    scales: dict[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)
    rounding: dict[str, Rounding] = field(default_factory=dict, compare=False, repr=False)

    def read_codes(self, read: ReadTensor, into: np.ndarray | None = None) -> np.ndarray:  # noqa: ARG002
        matrix = read(self.codes, None).astype(np.float32)
        codes, scale = quantise(matrix, self.scheme)
        self.scales[self.codes] = scale
        difference = dequantise(codes, scale, self.scheme, dtype=np.float32) - matrix
        self.rounding[self.codes] = Rounding(
            *(float(np.square(each).sum(dtype=np.float64)) for each in (difference, matrix))
        )
        return codes

    def read_scale(self, read: ReadTensor) -> np.ndarray:
        if self.codes not in self.scales:
            self.read_codes(read)
        return self.scales.pop(self.codes)

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.codes,)


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
        codes[band] = as_e4m3(np.clip(weight[band] / each, -_LARGEST, _LARGEST))
    return codes, scales


def as_e4m3(x: np.ndarray) -> np.ndarray:
    """A float32 array cast to e4m3, bit for bit as ml_dtypes does, whose cast holds Python's lock.

    By a table of the upper 16 bits: these alone decide the nearest code, but for whether a value lies exactly between two,
    and so the lowest of them says of the bits below whether any is set (rounding to odd).
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    upper = (bits >> 16).astype(np.uint16)
    upper |= bits & 0xFFFF != 0
    return _codes_of_upper_bits().take(upper).view(FP8_BLOCK.codes)


@functools.cache
def _codes_of_upper_bits() -> np.ndarray:
    """uint8, by the upper 16 bits of a float32."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32).astype(FP8_BLOCK.codes).view(np.uint8)


def _int4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = weight.reshape(len(weight), -1, 32)
    scale = (np.abs(groups).max(axis=2) / 7.5).astype(ml_dtypes.bfloat16)
    scale[scale == 0] = 1
    codes = np.clip(np.rint(groups / scale.astype(np.float32)[:, :, None]), -8, 7).astype(np.int8)
    bits = codes.view(np.uint8).reshape(weight.shape)
    return bits[:, 0::2] & 15 | bits[:, 1::2] << 4, scale
