"""Mosaic GPU kernels with one fault each, which a checker must find before its clean results count.

pytest runs these tests only where this file is named, as `bench sanitize` does.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax import lax

pytestmark = pytest.mark.gpu
WARPGROUP = 128


def add_one(x: jax.Array, *, wait: bool, interpret: Any = False) -> jax.Array:
    """x [128] + 1: one warpgroup hands it through shared memory to another, which waits for it only if `wait`."""

    def faulty_handover(x, out, shared, written):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _write():
            shared[...] = x[...] + 1
            plgpu.barrier_arrive(written)
            if not wait:
                plgpu.barrier_wait(written)

        @pl.when(warpgroup == 1)
        def _read():
            if wait:
                plgpu.barrier_wait(written)
            out[...] = shared[...]

    return plgpu.kernel(
        faulty_handover,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types={"shared": plgpu.SMEM(x.shape, x.dtype), "written": plgpu.Barrier()},
        num_threads=2,
        thread_name="warpgroup",
        # Pallas' own barriers are within one warpgroup: they leave the race, but often hide it from racecheck.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x)


def row(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [N, 128], index int32 [1] -> x[index], in bounds or not."""

    def faulty_row(x, index, out):
        out[...] = x[index[0]]

    return plgpu.kernel(faulty_row, out_type=jax.ShapeDtypeStruct(x.shape[1:], x.dtype))(x, index)


def test_handover():
    jax.block_until_ready(jax.jit(add_one, static_argnames="wait")(jnp.ones(WARPGROUP), wait=False))


def test_row():
    """Reads the row past the last."""
    x = jnp.ones((8, WARPGROUP))
    jax.block_until_ready(jax.jit(row)(x, jnp.array([len(x)], jnp.int32)))
