"""Sums through the memory of several GPUs, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding

from pallas_kernels.peer_sum import mosaic, reference
from tests.kernels.test_peer_sum import ON_EACH, over

pytestmark = pytest.mark.gpu

H = 2048


@pytest.fixture
def devices() -> int:
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    return len(jax.devices())


def parts(devices: int, T: int, seed: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal((devices * T, H)).astype(jnp.bfloat16)
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    return jax.device_put(values, NamedSharding(mesh, ON_EACH))


@pytest.mark.parametrize("T", [1, 32, 128, 512])
def test_to_the_bit(devices, T):
    """Twice in a row, so that a second call meets what the first has left; NaN stays in its column."""
    part = parts(devices, T, seed=T).at[T - 1, 7].set(jnp.nan)

    def twice(call, part, axis):
        return call(call(part, axis), axis)

    want, got = (
        np.asarray(over(devices, functools.partial(twice, way.total))(part), np.float32) for way in (reference, mosaic)
    )
    assert np.isnan(want).sum() == devices
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("T", [1, 8, 128])
def test_scattered_and_gathered(devices, T):
    """The sum in two phases, and each by itself."""
    part = parts(devices, devices * T, seed=T)
    for name in ("scatter_sum", "gather"):
        want, got = (np.asarray(over(devices, getattr(way, name))(part), np.float32) for way in (reference, mosaic))
        np.testing.assert_array_equal(got, want)
    want, got = (
        np.asarray(over(devices, lambda x, axis, way=way: way.gather(way.scatter_sum(x, axis), axis))(part), np.float32)
        for way in (reference, mosaic)
    )
    np.testing.assert_array_equal(got, want)


def test_sum_survives_10000_skewed_steps(devices):
    """Devices come late by turns, and the memory of a part is used again at once."""

    def steps(total, part, axis):
        def late(x: jax.Array) -> jax.Array:
            return lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y), x.astype(jnp.float32)).astype(x.dtype) * 0 + x

        def step(i: jax.Array, x: jax.Array) -> jax.Array:
            x = lax.cond(i % devices == lax.axis_index(axis), late, lambda x: x, x)
            # Each device adds something of its own, so that a part read too late or too early shows.
            own = jnp.cos(i.astype(jnp.float32) + lax.axis_index(axis)).astype(x.dtype)
            return total(x * jnp.bfloat16(1 / devices) + own, axis)

        return lax.fori_loop(0, 10_000, step, part)

    part = parts(devices, 4, seed=0)
    want, got = (np.asarray(over(devices, functools.partial(steps, way.total))(part)) for way in (reference, mosaic))
    assert np.isfinite(want.astype(np.float32)).all()
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
