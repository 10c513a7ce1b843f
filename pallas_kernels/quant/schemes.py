"""The schemes of quantised weights: what codes and scales are, and which elements share a scale.

A weight is a stack of matrices [*stack, out, in], as checkpoints store them. A scale belongs to a block of `rows` outputs
and `columns` inputs of one matrix; the last block of either axis may be partial.

| scheme | a weight is | published by |
|---|---|---|
| `fp8_block` | e4m3 code * float32 scale of 128 x 128 | DeepSeek-V3 (README_WEIGHTS.md), Qwen, MiniMax |
| `fp8_channel` | e4m3 code * float32 scale of an output | compressed-tensors; one scale for a whole tensor is this too |
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Scheme:
    """How weights are quantised.

    Attributes:
        name: in manifests and messages.
        codes, scale: dtypes of the two arrays.
        rows: outputs of a block.
        columns: inputs of a block; None: all of a matrix, and the scale has no axis for them.
    """

    name: str
    codes: Any
    scale: Any
    rows: int
    columns: int | None

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scale of a weight of `shape`."""
        *stack, out, inputs = shape
        groups = () if self.columns is None else (-(-inputs // self.columns),)
        return (*stack, -(-out // self.rows), *groups)

    def scale_axes(self, axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
        """The logical axes of the scale of a weight with logical `axes`."""
        return axes[:-1] if self.columns is None else axes

    def block(self, rank: int) -> tuple[int, ...]:
        """The size of a block along each axis of a weight; 1 where any cut is as good as another."""
        return (1,) * (rank - 2) + (self.rows, self.columns or 1)

    def __str__(self) -> str:
        return self.name


_e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_BLOCK = Scheme("fp8_block", _e4m3, np.dtype(np.float32), 128, 128)
FP8_CHANNEL = Scheme("fp8_channel", _e4m3, np.dtype(np.float32), 1, None)
SCHEMES = {scheme.name: scheme for scheme in (FP8_BLOCK, FP8_CHANNEL)}
