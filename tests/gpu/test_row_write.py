"""The kernel that copies rows to slots on the GPU, at models' vocabularies and parts of them. All that has no row is NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, use
from pallas_kernels.row_write.api import write_rows
from pallas_kernels.sampling.shapes import VOCABULARIES
from tests.kernels.test_row_write import bits, case, wanted

pytestmark = pytest.mark.gpu

SLOTS, K = 129, 3


def donating(i: int):
    """A new function each time, so that tests share no compiled code."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(array, rows, slots):
        with use(Backends()) as chosen:
            out = write_rows(array, i, rows, slots)
        assert chosen == {"row_write": {"mosaic"}}
        return out

    return run


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("V", [1024, 1400, 129280 // 8, *VOCABULARIES.values()])
@pytest.mark.parametrize("R", [1, 5, 128])
def test_rows(R, V, dtype):
    """Each bit of the rows that have a slot is there, and no other row, draft or slot is touched."""
    array, rows, slots = case(R, V, dtype, slots=SLOTS)
    want = wanted(array, 1, rows, slots)
    run = donating(1)
    for _ in range(3):  # the third run is a recorded graph's
        array = run(array, rows, slots)
    np.testing.assert_array_equal(bits(array), want)


def test_rows_of_a_larger_array():
    """A slice whose rows are no multiple of 256 bytes, and slots that begin anywhere."""
    array, rows, slots = case(24, 129280 // 8 + 8, jnp.bfloat16, slots=SLOTS)
    want = wanted(array, 0, rows[3:], slots[3:])

    @functools.partial(jax.jit, donate_argnums=0)
    def run(array, rows, slots):
        return write_rows(array, 0, rows[3:], slots[3:])

    np.testing.assert_array_equal(bits(run(array, rows, slots)), want)


def test_the_array_is_not_copied():
    array, rows, slots = case(128, V := VOCABULARIES["moonlight"], jnp.bfloat16, slots=SLOTS)
    compiled = donating(2).lower(array, rows, slots).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1e6
    assert not [line for line in compiled.as_text().splitlines() if "copy" in line and f"[{SLOTS},{K},{V}]" in line]
