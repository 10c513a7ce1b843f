"""What is found in interpreted kernels: races, in whichever kernel of a call they are, and torn copies."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax import lax

from tests.gpu.faulty_kernels import add_one
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@interpreted
def test_a_race_of_any_kernel_is_seen():
    x = jnp.arange(128, dtype=jnp.float32)
    params = detect_races()
    got = add_one(add_one(x, wait=True, interpret=params), wait=True, interpret=params)
    assert_no_races(got, kernels=2)
    assert (got == x + 2).all()
    params = detect_races()
    got = add_one(add_one(x, wait=False, interpret=params), wait=True, interpret=params)
    with pytest.raises(AssertionError):
        assert_no_races(got)


def copied(x, apart, interpret):
    """Rows 0 to 7 and `apart` to `apart` + 7, through tiled memory."""

    def body(x, out, rows_s, arrived):
        block = lax.axis_index("block")
        plgpu.copy_gmem_to_smem(x.at[pl.ds(block * apart, 8)], rows_s, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(rows_s, out.at[block])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16),
        scratch_types={"rows_s": plgpu.SMEM((8, 64), jnp.bfloat16, transforms=TILED), "arrived": plgpu.Barrier()},
        grid=(2,),
        grid_names=("block",),
        interpret=interpret,
    )(x)


@interpreted
@pytest.mark.parametrize(("apart", "torn"), [(8, False), (6, True)])
def test_copies_that_begin_inside_a_tile_are_found(apart, torn):
    x = jax.random.normal(jax.random.key(0), (16, 64), jnp.bfloat16)
    out = copied(x, apart, detect_races())
    assert (out == jnp.stack([x[:8], x[apart : apart + 8]])).all()
    if torn:
        with pytest.raises(AssertionError, match=r"begin inside a tile.*\(6, 0\), \(8, 64\)"):
            assert_no_races(out)
    else:
        assert_no_races(out)
