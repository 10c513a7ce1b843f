"""Sums through the memory of several GPUs, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding

from pallas_kernels.norm_linear.add_norm import add_norm
from pallas_kernels.norm_linear.reference import whole
from pallas_kernels.peer_sum import mosaic, reference
from pallas_kernels.peer_sum.mailbox import open_mailboxes
from tests.kernels.test_peer_sum import ON_EACH

pytestmark = pytest.mark.gpu

H = 2048


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    return Mesh(np.array(jax.devices()), ("tensor",))


@pytest.fixture(scope="module")
def mailboxes(mesh):
    """Of all tests, so that each meets what those before have left."""
    return open_mailboxes(mesh, "tensor")


@pytest.fixture
def both(mesh, mailboxes):
    """Of [devices * T, H] parts, what a function makes of them with the reference and with the kernels; it gets these as
    functions of a part alone."""

    def run(part: jax.Array, function) -> tuple[np.ndarray, np.ndarray]:
        def with_reference(part: jax.Array, _: jax.Array) -> jax.Array:
            calls = {name: functools.partial(getattr(reference, name), axis="tensor") for name in NAMES}
            return function(part, **calls)

        def with_kernels(part: jax.Array, boxes: jax.Array) -> jax.Array:
            return function(part, **{name: functools.partial(_call, getattr(mosaic, name), boxes) for name in NAMES})

        want, got = (
            np.asarray(
                jax.jit(
                    jax.shard_map(each, mesh=mesh, in_specs=(ON_EACH, ON_EACH), out_specs=ON_EACH, check_vma=False)
                )(part, mailboxes.addresses)
            )
            for each in (with_reference, with_kernels)
        )
        return want, got

    return run


NAMES = ("total", "scatter_sum", "gather")


def _call(kernel, boxes, part):
    return kernel([part], boxes)[0] if kernel is mosaic.gather else kernel(part, boxes)


def parts(mesh: Mesh, T: int, seed: int, width: int = H) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal((mesh.size * T, width)).astype(jnp.bfloat16)
    return jax.device_put(values, NamedSharding(mesh, ON_EACH))


@pytest.mark.parametrize(
    ("T", "width"), [(1, H), (32, H), (128, H), (512, H), (2048, H), (32, 7168), (5, 128), (2, 8192)]
)
def test_to_the_bit(mesh, both, T, width):
    """Twice in a row, so that a second call meets what the first has left; NaN stays in its column."""
    part = parts(mesh, T, T, width).at[T - 1, 7].set(jnp.nan)
    want, got = both(part, lambda part, total, **_: total(total(part)))
    assert np.isnan(want.astype(np.float32)).sum() == mesh.size
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("T", [1, 8, 128])
def test_scattered_and_gathered(mesh, both, T):
    """The sum in two phases, and each by itself."""
    part = parts(mesh, mesh.size * T, T)
    for function in (
        lambda part, scatter_sum, **_: scatter_sum(part),
        lambda part, gather, **_: gather(part),
        lambda part, scatter_sum, gather, **_: gather(scatter_sum(part)),
    ):
        want, got = both(part, function)
        np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize(("T", "width"), [(1, H), (32, H), (7, 7168)])
def test_added_and_normed(mesh, mailboxes, T, width, pieces):
    """To the bit what the sum and the kernel for sums and norms make of it; parts of a part are rounded before it is told."""
    n = mesh.size
    part = parts(mesh, pieces * T, T, width).reshape(n * pieces, T, width)
    x, weight = (
        jnp.asarray(np.random.default_rng(i).standard_normal(s), jnp.bfloat16)
        for i, s in enumerate([(T, width), width])
    )

    def separate(part, _):
        summed = reference.total(whole(part), "tensor")
        return add_norm(x, summed, weight, eps=1e-6)

    def joined(part, boxes):
        return mosaic.add_total(x, part if pieces > 1 else part[0], weight, boxes, eps=1e-6)

    want, got = (
        jax.jit(
            jax.shard_map(each, mesh=mesh, in_specs=(ON_EACH, ON_EACH), out_specs=(ON_EACH, ON_EACH), check_vma=False)
        )(part, mailboxes.addresses)
        for each in (separate, joined)
    )
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.parametrize("with_beside", [False, True])
@pytest.mark.parametrize("T", [1, 32])
def test_what_ranks_tell_each_other(mesh, mailboxes, T, with_beside):
    """Rows and numbers in one kernel, and the scattered sum with what is added to it and the norm in another."""
    n, rng = mesh.size, np.random.default_rng(T)
    numbers = jax.device_put(rng.integers(-(2**31), 2**31, (n * T, 128)).astype(np.int32), NamedSharding(mesh, ON_EACH))
    x, beside, part = (parts(mesh, rows, seed) for seed, rows in enumerate((T, T, n * T)))
    weight = jnp.asarray(rng.standard_normal(H), jnp.bfloat16)

    def with_reference(x, numbers, beside, part, _):
        told = reference.scatter_sum(part, "tensor")
        summed = add_norm(x, told + beside if with_beside else told, weight, eps=1e-6)
        return reference.gather(x, "tensor"), reference.gather(numbers, "tensor"), *summed

    def with_kernels(x, numbers, beside, part, boxes):
        gathered = mosaic.gather([x, numbers], boxes)
        return *gathered, *mosaic.scatter_add(x, part, beside if with_beside else None, weight, boxes, eps=1e-6)

    want, got = (
        jax.jit(jax.shard_map(each, mesh=mesh, in_specs=ON_EACH, out_specs=ON_EACH, check_vma=False))(
            x, numbers, beside, part, mailboxes.addresses
        )
        for each in (with_reference, with_kernels)
    )
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.parametrize(("T", "width"), [(1, 128), (3, 384), (2, 4096)])
def test_numbers_are_gathered_to_the_bit(mesh, both, T, width):
    bits = np.random.default_rng(T).integers(-(2**31), 2**31, (mesh.size * T, width)).astype(np.int32)
    want, got = both(jax.device_put(bits, NamedSharding(mesh, ON_EACH)), lambda part, gather, **_: gather(part))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("T", [4, 300])
def test_sum_survives_10000_skewed_steps(mesh, both, T):
    """Devices come late by turns, calls of other sizes come between, and the memory of a part is used again at once."""
    devices = mesh.size

    def steps(part: jax.Array, total, gather, **_) -> jax.Array:
        def late(x: jax.Array) -> jax.Array:
            return lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y), x.astype(jnp.float32)).astype(x.dtype) * 0 + x

        def step(i: jax.Array, x: jax.Array) -> jax.Array:
            x = lax.cond(i % devices == lax.axis_index("tensor"), late, lambda x: x, x)
            # Each device adds something of its own, so that a part read too late or too early shows.
            own = jnp.cos(i.astype(jnp.float32) + lax.axis_index("tensor")).astype(x.dtype)
            x = total(x * jnp.bfloat16(1 / devices) + own)
            return x + gather(x[:1, :128] * own)[-1, :1] * jnp.bfloat16(0.01)

        return lax.fori_loop(0, 10_000, step, part)

    want, got = both(parts(mesh, T, 0), steps)
    assert np.isfinite(want.astype(np.float32)).all()
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
