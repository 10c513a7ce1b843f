"""A Triton kernel with a fault; see faulty_kernels.py."""

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

from pallas_kernels import triton_call
from pallas_kernels.backend import compute_capability

pytestmark = pytest.mark.gpu
COLUMNS = 128


@triton.jit
def faulty_triton_row(x, index, out, COLUMNS: tl.constexpr):
    """x [N, COLUMNS], index int32 [1] -> x[index], in bounds or not."""
    column = tl.arange(0, COLUMNS)
    tl.store(out + column, tl.load(x + tl.load(index) * COLUMNS + column))


def test_row():
    """Reads the row past the last."""
    x = jnp.ones((8, COLUMNS))

    @jax.jit
    def row(x, index):
        return triton_call.call(
            faulty_triton_row,
            (x, index),
            (jax.ShapeDtypeStruct((COLUMNS,), x.dtype),),
            grid=(1, 1),
            warps=4,
            stages=1,
            compute_capability=compute_capability(jax.devices()[0]),
            constants={"COLUMNS": COLUMNS},
        )

    jax.block_until_ready(row(x, jnp.array([len(x)], jnp.int32)))
