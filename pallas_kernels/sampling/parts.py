"""How kernels of sampling cut rows of logits into vectors and blocks."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load

WARPGROUP = 128
# Bytes that a thread loads at once, at most.
LOAD_BYTES = 16
# Blocks of each multiprocessor, if there are columns enough.
BLOCKS_PER_SM = 8

i32, f32 = jnp.int32, jnp.float32


def multiprocessors() -> int:
    """Of the GPU; of an H200 where there is none to ask (lowering on a CPU)."""
    return getattr(jax.devices()[0], "core_count", None) or 132


class Parts:
    """How rows of V columns are cut: each block has `vectors` vectors of `width` columns.

    The last vector of a row ends where the row ends, and overlaps the vector before it; further vectors repeat it.

    Args:
        at_once: a block has a multiple of so many vectors.
        vectors: of each block (default: as few as keep the GPU busy).
        vec_size: columns that a thread loads at once (default: of LOAD_BYTES).
    """

    def __init__(
        self, R: int, V: int, itemsize: int, at_once: int, vectors: int | None = None, vec_size: int | None = None
    ):
        self.V, self.vec_size = V, vec_size or LOAD_BYTES // itemsize
        self.width = WARPGROUP * self.vec_size
        self.layout = plgpu.Layout.WG_STRIDED((self.width,), vec_size=self.vec_size)
        total = -(-V // self.width)
        wanted = min(-(-BLOCKS_PER_SM * multiprocessors() // R), total)
        self.vectors = vectors or -(-total // (wanted * at_once)) * at_once
        self.count = -(-total // self.vectors)

    def column(self, j: Any) -> jax.Array:
        """The first column of the j-th vector."""
        return lax.min(j * self.width, i32(self.V - self.width))

    def columns(self, j: Any) -> jax.Array:
        return plgpu.broadcasted_iota(i32, (self.width,), 0, layout=self.layout) + self.column(j)

    def load(self, ref: Any, row: Any, j: Any) -> jax.Array:
        return load(ref, (row, pl.ds(self.column(j), self.width)), layout=self.layout).astype(f32)

    def fill(self, value: float, dtype: Any = f32) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.width,), value, dtype), self.layout)
