"""How kernels of sampling cut rows of logits into vectors and blocks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.sampling.keys import LEAST_KEY

WARPGROUP, WARP = 128, 32
# Bytes that a thread loads at once, at most.
LOAD_BYTES = 16
# Blocks of each multiprocessor, if there are columns enough.
BLOCKS_PER_SM = 8
# Of blocks that must all be on the device: all of up to 528 rows start at once on an H200.
RESIDENT_PER_SM = 4

i32, f32 = jnp.int32, jnp.float32


def multiprocessors() -> int:
    """Of the GPU; of an H200 where there is none to ask (lowering on a CPU)."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def widened(parts: jax.Array, value: jax.Array) -> jax.Array:
    """Numbers [R, parts] padded with a value to a width that XLA reduces across threads.

    It does so with rows of a warp's width or more and such as divide it; of others a thread reads one number after another,
    25 of MiniMax-M2's vocabulary in 6.3 us on an H200.
    """
    count = parts.shape[1]
    width = count if count >= WARP else pl.next_power_of_2(count)
    return lax.pad(parts, value, ((0, 0, 0), (0, width - count, 0)))


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

    def new_only(self, keys: jax.Array, j: Any) -> jax.Array:
        """Keys of the j-th vector, with LEAST_KEY for those that a vector before it has too."""
        return jnp.where(self.columns(j) >= j * self.width, keys, self.fill(LEAST_KEY, i32))

    def fold(self, part: Any, at_once: int, step: Callable[..., Any], carry: Any) -> Any:
        """step(i, carry, masked) for all groups of `at_once` vectors of a part; `masked` where one may overlap another."""
        groups = self.vectors // at_once
        whole = lax.div(i32(self.V // self.width) - part * self.vectors, i32(at_once))
        whole = lax.max(lax.min(whole, i32(groups)), i32(0))
        carry = lax.fori_loop(i32(0), whole, functools.partial(step, masked=False), carry)
        return lax.fori_loop(whole, i32(groups), functools.partial(step, masked=True), carry)


def resident_parts(R: int, V: int, itemsize: int, at_once: int, vec_size: int, per_sm: int = RESIDENT_PER_SM) -> Parts:
    """Rows cut so that all blocks fit onto the device at once, if rows are few enough.

    That takes at most 128 registers a thread and a quarter of a multiprocessor's shared memory, if `per_sm`, blocks of each
    multiprocessor, is RESIDENT_PER_SM.
    """
    groups = -(-V // (WARPGROUP * vec_size * at_once))
    blocks = min(max(1, per_sm * multiprocessors() // R), groups, WARPGROUP)
    return Parts(R, V, itemsize, at_once, vectors=-(-groups // blocks) * at_once, vec_size=vec_size)
