"""The Mosaic GPU kernel of mla_query on the GPU, against the reference in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, use
from pallas_kernels.kv_write import reference as kv_write
from pallas_kernels.mla_decode.shapes import CACHED, LATENT, NOPE, ROPE, WIDE_NOPE
from pallas_kernels.mla_query import reference
from pallas_kernels.mla_query.api import mla_query, write_and_query
from tests.kernels.paged_cases import arranged, relative_error

pytestmark = pytest.mark.gpu


def inputs(T: int, H: int, D: int = NOPE) -> list[jax.Array]:
    rng = np.random.default_rng(T * H)
    angles = rng.uniform(0, 6, (T, 32))
    return [
        jnp.asarray(rng.standard_normal((T, H, D + ROPE), np.float32), jnp.bfloat16),
        jnp.asarray(rng.standard_normal((H, D, LATENT), np.float32) / D**0.5, jnp.bfloat16),
        *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)),
    ]


def check(T: int, H: int, D: int = NOPE) -> None:
    args = inputs(T, H, D)
    with jax.default_matmul_precision("highest"):
        want = np.asarray(jax.jit(reference.mla_query)(*(a.astype(jnp.float32) for a in args)))

    @jax.jit
    def run(*arrays):
        with use(Backends(attention="mosaic")):
            return mla_query(*arrays)

    for _ in range(3):  # the third run is a recorded graph's
        got = np.asarray(run(*args), np.float32)
    assert got.shape == want.shape
    # Row by row, so that a wrong one cannot hide among many.
    for part in (slice(LATENT), slice(LATENT, None)):
        errors = np.linalg.norm((got - want)[..., part], axis=-1) / np.linalg.norm(want[..., part], axis=-1)
        assert errors.max() < 1e-2, f"relative error {errors.max():.2e} at {np.argwhere(~(errors < 1e-2))[:5]}"
    assert relative_error(got, want) < 4e-3


@pytest.mark.parametrize("H", [4, 16, 128])
@pytest.mark.parametrize("T", [1, 8, 32, 128, 512])
def test_sizes(T, H):
    check(T, H)


@pytest.mark.parametrize("H", [20, 64])
@pytest.mark.parametrize("T", [1, 5, 32, 136, 512])
def test_wide_heads(T, H):
    check(T, H, WIDE_NOPE)


@pytest.mark.parametrize("T", [2, 3, 4, 5, 7, 12, 20, 40, 136, 200, 1024, 2048])
def test_parts_of_tiles(T):
    """Fewer tokens than a tile has rows, padding to whole tiles, and blocks of tokens whose last is not full."""
    check(T, 16)


@pytest.mark.parametrize("T", [1, 5])
def test_writes_no_row_past_the_last_token(T):
    """A copy's rows past the last token would overwrite what comes next in memory."""
    q, w_uk, cos, sin = inputs(8 * T, 16)

    @jax.jit
    def run(q):
        with use(Backends(attention="mosaic")):
            # Results next to each other in memory, each of which must survive the next.
            return [mla_query(q[i * T : (i + 1) * T], w_uk, cos[:T], sin[:T]) for i in range(8)]

    want = [
        jax.jit(reference.mla_query)(
            q[i * T : (i + 1) * T].astype(jnp.float32), w_uk.astype(jnp.float32), cos[:T], sin[:T]
        )
        for i in range(8)
    ]
    for got, wanted in zip(run(q), want, strict=True):
        assert relative_error(got, wanted) < 1e-2  # TF32, if XLA chooses it


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("H", [4, 16, 128])
@pytest.mark.parametrize("T", [1, 4, 12, 32, 128, 1024])
def test_with_the_latents_in_one_launch(T, H, merged):
    """The cache is donated, and only the rows of tokens change."""
    q, w_uk, cos, sin = inputs(T, H)
    rng = np.random.default_rng(T)
    kv_a = jnp.asarray(3 * rng.standard_normal((T, CACHED)), jnp.bfloat16)
    norm = jnp.asarray(rng.uniform(0.5, 1.5, LATENT), jnp.bfloat16)
    places = jnp.asarray(rng.permutation(40 * 64)[:T], jnp.int32)
    pages, offsets = places // 64, places % 64
    cache = jnp.full((40, 64, CACHED), jnp.nan, jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache):
        with use(Backends(attention="mosaic")):
            projected = arranged(q, kv_a, norm, merged=merged)
            return write_and_query(cache, *projected, w_uk, cos, sin, pages, offsets, eps=1e-5)

    compiled = run.lower(cache).compile()
    assert compiled.as_text().count("mosaic_gpu_v2") == 1
    for _ in range(3):
        cache, got = run(cache)
    with jax.default_matmul_precision("highest"):
        exact = [a.astype(jnp.float32) for a in (q, w_uk, cos, sin)]
        want = np.asarray(jax.jit(reference.mla_query)(*exact))
        empty = jnp.full(cache.shape, jnp.nan, jnp.float32)
        floats = kv_a.astype(jnp.float32), norm.astype(jnp.float32)
        want_cache = kv_write.write_latent(empty, *floats, cos, sin, pages, offsets, eps=1e-5)
    assert relative_error(got, want) < 4e-3
    got_cache, want_cache = np.asarray(cache, np.float32), np.asarray(want_cache)
    np.testing.assert_array_equal(np.isnan(got_cache), np.isnan(want_cache))
    at = np.asarray(pages), np.asarray(offsets)
    assert relative_error(got_cache[at], want_cache[at]) < 4e-3
