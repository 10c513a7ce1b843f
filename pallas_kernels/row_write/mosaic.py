"""Copies rows to the slots of requests: a Mosaic GPU kernel for Hopper (`row_write` in traces).

A thread block has a part of a row, of which a thread has several wide loads in flight; blocks of rows that go nowhere end at
once. XLA's scatter takes time for them too: 75 us of an H200 for three times 128 rows of a vocabulary that all go nowhere.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load, run_in_place
from pallas_kernels.inline_code import store
from pallas_kernels.own_buffer import own_buffer, own_rows
from pallas_kernels.sampling.parts import LOAD_BYTES, WARPGROUP, Parts

# Vectors of a thread whose loads are in flight together: 64 bytes. With 8 blocks of a multiprocessor these are 64 KB of it,
# where the memory's bandwidth needs about 30.
AT_ONCE = 4

i32 = jnp.int32


def unsupported_reason(array_SkV: jax.Array, rows_RV: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    V, dtype = rows_RV.shape[1], rows_RV.dtype
    if dtype != array_SkV.dtype:
        return f"it copies rows as they are, not {dtype} to {array_SkV.dtype}"
    width = WARPGROUP * LOAD_BYTES // dtype.itemsize
    if width > V or V * dtype.itemsize % LOAD_BYTES:
        return f"it needs rows of at least {width} columns and of multiples of {LOAD_BYTES} bytes, not {V} columns"
    return hopper_unsupported_reason(*[dtype] * (dtype != jnp.float32))


@functools.partial(jax.jit, static_argnames=("i", "interpret"))
def write_rows(
    array_SkV: jax.Array, i: int, rows_RV: jax.Array, slots_R: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """See api.py. `interpret` is passed to Pallas."""
    R, V = rows_RV.shape
    S = array_SkV.shape[0]
    width = WARPGROUP * LOAD_BYTES // rows_RV.dtype.itemsize
    vectors, rest = divmod(V, width)
    parts = Parts(R, vectors * width, rows_RV.dtype.itemsize, AT_ONCE)

    def row_write(rows, slots, array):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        slot = slots[row]

        def copy(start: Any, count: int) -> None:
            """Of so many vectors. All loads come first: the compiler moves none across a store."""
            places = [pl.ds(start + n * width, width) for n in range(count)]
            values = [load(rows, (row, at), layout=parts.layout) for at in places]
            for at, value in zip(places, values, strict=True):
                store(array.at[slot, i, at], value, parts.layout, emulated=bool(interpret))

        def work() -> None:
            first = part * parts.vectors
            groups = lax.div(lax.min(i32(parts.vectors), vectors - first), i32(AT_ONCE))
            last = lax.min(first + parts.vectors, i32(vectors))

            @pl.loop(0, groups)
            def _(group):
                copy((first + group * AT_ONCE) * width, AT_ONCE)

            @pl.loop(first + groups * AT_ONCE, last)
            def _(vector):
                copy(vector * width, 1)

            if rest:  # The same block has all of what this vector overlaps.
                pl.when(part == parts.count - 1)(lambda: copy(V - width, 1))

        pl.when(slot < S)(work)

    (written,) = run_in_place(
        row_write,
        (own_rows(rows_RV), own_buffer(slots_R)),
        (array_SkV,),
        scratch_types={},
        grid=(R, parts.count),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )
    return written
