"""The schemes of quantised weights: what codes and scales are, and which elements share a scale.

A weight is a stack of matrices [*stack, out, in], as checkpoints store them. A scale belongs to a block of `rows` outputs
and `columns` inputs of one matrix; the last block of either axis may be partial.

| scheme | a weight is | published by |
|---|---|---|
| `fp8_block` | e4m3 code * float32 scale of 128 x 128 | DeepSeek-V3 (README_WEIGHTS.md), Qwen, MiniMax |
| `fp8_channel` | e4m3 code * float32 scale of an output | compressed-tensors; one scale for a whole tensor is this too |
| `int4_g32` | int4 code * bfloat16 scale of 32 inputs | compressed-tensors ("pack-quantized"), Kimi-K2-Thinking and K2.5 |
| `nvfp4` | e2m1 code * e4m3 scale of 16 inputs * float32 factor of the matrix | ModelOpt, compressed-tensors |
| `mxfp4` | e2m1 code * 2^(scale - 127) of 32 inputs | gpt-oss; OCP Microscaling Formats 1.0 |
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

# What a code stands for, by its bits. Codes of four bits are the last four of theirs.
VALUES: dict[str, np.ndarray] = {
    "e4m3": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "int4": np.array([*range(8), *range(-8, 0)], np.float32),
    "e2m1": np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32),
}
_E4M3, _UINT8, _FLOAT32 = (np.dtype(dtype) for dtype in (ml_dtypes.float8_e4m3fn, np.uint8, np.float32))

ArrayName = Literal["codes", "scale", "factor"]


@dataclass(frozen=True)
class Scheme:
    """How weights are quantised.

    Attributes:
        name: in manifests and messages.
        values: what codes stand for, a key of VALUES.
        codes, scale: dtypes of the two arrays. Codes of four bits are pairs in uint8, scales that Hopper has no type for
            (exponents) too.
        rows: outputs of a block.
        columns: inputs of a block; None: all of a matrix, and the scale has no axis for them.
        across: the scale is [*stack, blocks of in, out], so that the scales of a kernel's tile are row vectors; else it is
            [*stack, blocks of out, blocks of in].
        factor: each matrix has a float32 factor too, [*stack].
        packed: codes in one element of their array, along the inputs, the first one low.
    """

    name: str
    values: Literal["e4m3", "int4", "e2m1"]
    codes: Any
    scale: Any
    rows: int
    columns: int | None
    across: bool = False
    factor: bool = False
    packed: int = 1

    def codes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the codes of a weight of `shape`."""
        return (*shape[:-1], shape[-1] // self.packed)

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How many blocks a weight has along its last two axes, with its other axes: [*stack, of out, of in]."""
        *stack, out, inputs = shape
        return (*stack, -(-out // self.rows), -(-inputs // (self.columns or inputs)))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scale of a weight of `shape`."""
        *stack, out, inputs = self.blocks(shape)
        return (*stack, *self._laid_out(out, inputs))

    def scale_axes(self, axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
        """The logical axes of the scale of a weight with logical `axes`."""
        *stack, out, inputs = axes
        return (*stack, *self._laid_out(out, inputs))

    def _laid_out(self, out: Any, inputs: Any) -> tuple[Any, ...]:
        return (inputs, out) if self.across else (out,) if self.columns is None else (out, inputs)

    def as_blocks(self, scale: Any) -> Any:
        """A scale as [*stack, blocks of out, blocks of in]: a view of a NumPy array."""
        return scale.swapaxes(-1, -2) if self.across else scale[..., None] if self.columns is None else scale

    def arrays(self, shape: tuple[int, ...]) -> dict[ArrayName, jax.ShapeDtypeStruct]:
        """What a weight of `shape` is stored as, by the names of `values.Quantised`."""
        out: dict[ArrayName, jax.ShapeDtypeStruct] = {
            "codes": jax.ShapeDtypeStruct(self.codes_shape(shape), self.codes),
            "scale": jax.ShapeDtypeStruct(self.scale_shape(shape), self.scale),
        }
        return out | ({"factor": jax.ShapeDtypeStruct(shape[:-2], _FLOAT32)} if self.factor else {})

    def block(self, rank: int) -> tuple[int, ...]:
        """The size of a block along each axis of the codes; 1 where any cut is as good as another."""
        return (1,) * (rank - 2) + (self.rows, (self.columns or 1) // self.packed)

    def __str__(self) -> str:
        return self.name


FP8_BLOCK = Scheme("fp8_block", "e4m3", _E4M3, _FLOAT32, 128, 128)
FP8_CHANNEL = Scheme("fp8_channel", "e4m3", _E4M3, _FLOAT32, 1, None)
INT4_G32 = Scheme("int4_g32", "int4", _UINT8, np.dtype(ml_dtypes.bfloat16), 1, 32, across=True, packed=2)
NVFP4 = Scheme("nvfp4", "e2m1", _UINT8, _E4M3, 1, 16, across=True, factor=True, packed=2)
MXFP4 = Scheme("mxfp4", "e2m1", _UINT8, _UINT8, 1, 32, across=True, packed=2)
SCHEMES = {scheme.name: scheme for scheme in (FP8_BLOCK, FP8_CHANNEL, INT4_G32, NVFP4, MXFP4)}
