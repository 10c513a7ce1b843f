"""The kernels of mla_decode on the GPU, against the reference in float32. All that no context owns is NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.mla_decode import reference
from pallas_kernels.mla_decode.api import head_rows, mla_decode
from pallas_kernels.mla_decode.shapes import CACHED, LATENT, SCALE, VALUE
from pallas_kernels.tuning import Tuning
from tests.kernels.paged_cases import paged_pool, relative_error, window_bounds

pytestmark = pytest.mark.gpu

RAGGED = (1, 63, 64, 65, 128, 130, 700, 1024, 4096, 5000)


@pytest.fixture(params=["mosaic", "triton"])
def backend(request) -> str:
    return request.param


def check(backend: str, lengths, n: int, heads: int, dtype=jnp.bfloat16) -> None:
    rng = np.random.default_rng(n * heads + len(lengths))
    pool, tables = paged_pool(rng, lengths, CACHED)
    # Large scores, so that a wrong mask shows.
    q = jnp.asarray(3 * rng.standard_normal((len(lengths), n, heads, CACHED), np.float32), dtype)
    latent, bounds = jnp.asarray(pool, dtype), window_bounds(lengths, n)

    @jax.jit
    def run(*arrays):
        with use(Backends(attention=backend)):
            return mla_decode(*arrays, scale=SCALE, value_dim=LATENT)

    exact = jax.jit(functools.partial(reference.mla_decode, scale=SCALE, value_dim=LATENT))
    with jax.default_matmul_precision("highest"):
        want = exact(q.astype(jnp.float32), latent.astype(jnp.float32), tables, bounds)
    for _ in range(3):  # the third run is a recorded graph's
        got = run(q, latent, tables, bounds)
    error = relative_error(got, want)
    assert error < 1e-2, f"relative error {error:.2e}"


@pytest.mark.parametrize("heads", [4, 16, 32, 64, 128])
@pytest.mark.parametrize("n", [1, 4])
def test_ragged_lengths(backend, heads, n):
    check(backend, RAGGED, n, heads)


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 8])
def test_windows(backend, n):
    check(backend, RAGGED[:7], n, 16)


@pytest.mark.parametrize("lengths", [(1,), (64,), (65,), (131072,), (64,) * 128, (1,) * 200, tuple(range(1, 1300, 10))])
def test_adversarial_lengths(backend, lengths):
    check(backend, lengths, 4, 16)


@pytest.mark.parametrize(
    ("lengths", "n", "heads", "V"),
    [
        ((64, 1, 3000, 130, 7, 1024, 300, 65), 1, 20, 256),
        (tuple(range(1, 1281, 10)), 1, 20, 256),
        ((1, 700) * 64, 4, 16, 128),
    ],
)
def test_values_of_each_head(lengths, n, heads, V):
    """Merged apart from the values; queries past the heads are NaN, and a request's NaN stays in it."""
    rng = np.random.default_rng(n)
    pool, tables = paged_pool(rng, lengths, CACHED)
    q = rng.standard_normal((len(lengths), n, head_rows(n, heads), CACHED), np.float32)
    q[2, 0, 1, 3] = q[:, :, heads:] = np.nan
    w_uv = jnp.asarray(rng.standard_normal((heads, V, LATENT)) / LATENT**0.5, jnp.bfloat16)
    q, latent, bounds = jnp.asarray(q, jnp.bfloat16), jnp.asarray(pool, jnp.bfloat16), window_bounds(lengths, n)

    @jax.jit
    def run(*arrays):
        with tuning.use(Tuning(wide_values_tokens=64)):
            return mla_decode(*arrays, scale=SCALE, value_dim=LATENT)

    exact = jax.jit(functools.partial(reference.mla_decode, scale=SCALE, value_dim=LATENT))
    with jax.default_matmul_precision("highest"):
        want = exact(q[:, :, :heads].astype(jnp.float32), latent.astype(jnp.float32), tables, bounds)
        want = jax.jit(reference.values)(want, w_uv.astype(jnp.float32))
    for _ in range(3):  # the third run is a recorded graph's
        got = run(q, latent, tables, bounds, w_uv)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(want).sum() == V
    assert relative_error(jnp.nan_to_num(got), jnp.nan_to_num(want)) < 1e-2


def test_float16():
    check("triton", RAGGED, 2, 16, jnp.float16)


@pytest.mark.parametrize(
    ("lengths", "n"),
    [
        ((1,), 1), ((700,), 1), ((4096,), 4), ((65, 5000), 2), ((64, 1, 1024, 130), 1),
        ((64, 1, 3000, 130, 7, 1024, 300, 65), 1), ((65, 5000), 4), ((1024,) * 32, 1), (tuple(range(1, 1281, 10)), 1),
    ],
)  # fmt: skip
def test_values_in_the_merging_kernel(backend, lengths, n):
    """With the up-projection of values, which is part of the merging kernel: of a few tokens, and of up to 128."""
    rng = np.random.default_rng(n)
    pool, tables = paged_pool(rng, lengths, CACHED)
    q = jnp.asarray(3 * rng.standard_normal((len(lengths), n, 16, CACHED), np.float32), jnp.bfloat16)
    w_uv = jnp.asarray(rng.standard_normal((16, VALUE, LATENT)) / LATENT**0.5, jnp.bfloat16)
    latent, bounds = jnp.asarray(pool, jnp.bfloat16), window_bounds(lengths, n)

    @jax.jit
    def run(*arrays):
        with use(Backends(attention=backend)), tuning.use(Tuning(wide_values_tokens=128)):
            return mla_decode(*arrays, scale=SCALE, value_dim=LATENT)

    exact = jax.jit(functools.partial(reference.mla_decode, scale=SCALE, value_dim=LATENT))
    with jax.default_matmul_precision("highest"):
        want = exact(q.astype(jnp.float32), latent.astype(jnp.float32), tables, bounds)
        want = jax.jit(reference.values)(want, w_uv.astype(jnp.float32))
    for _ in range(3):  # the third run is a recorded graph's
        got = run(q, latent, tables, bounds, w_uv)
    assert relative_error(got, want) < 1e-2
