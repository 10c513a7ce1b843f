"""That the interpreter's races are seen, in whichever kernel of a call they are."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax import lax

from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted


def add_one(x: jax.Array, interpret, *, wait: bool) -> jax.Array:
    """x + 1, by a warpgroup that hands it to another through shared memory, and tells it or not."""

    def body(x, out, shared, written):
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
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types={"shared": plgpu.SMEM(x.shape, x.dtype), "written": plgpu.Barrier()},
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
    )(x)


@interpreted
def test_a_race_of_any_kernel_is_seen():
    x = jnp.arange(128, dtype=jnp.float32)
    params = detect_races()
    got = add_one(add_one(x, params, wait=True), params, wait=True)
    assert_no_races(got, kernels=2)
    assert (got == x + 2).all()
    params = detect_races()
    got = add_one(add_one(x, params, wait=False), params, wait=True)
    with pytest.raises(AssertionError):
        assert_no_races(got)
