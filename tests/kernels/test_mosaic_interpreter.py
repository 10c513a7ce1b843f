"""Races that the interpreter finds are reported, in whichever kernel of a call they are."""

import jax.numpy as jnp
import pytest

from tests.gpu.faulty_kernels import add_one
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted


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
