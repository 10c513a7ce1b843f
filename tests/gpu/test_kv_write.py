"""The Mosaic GPU kernel of kv_write on the GPU, against the reference in float32. All that no token owns is NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, use
from pallas_kernels.kv_write import reference
from pallas_kernels.kv_write.api import write_latent
from pallas_kernels.mla_decode.shapes import CACHED, LATENT
from tests.kernels.paged_cases import relative_error

pytestmark = pytest.mark.gpu

PAGES = 100
EPS = 1e-5


def tokens(T: int) -> list[jax.Array]:
    """kv_a, the norm's weight, cos, sin, pages and offsets."""
    rng = np.random.default_rng(T)
    angles = rng.uniform(0, 6, (T, 32))
    places = 64 + rng.permutation((PAGES - 1) * 64)[:T]
    return [
        jnp.asarray(3 * rng.standard_normal((T, CACHED)), jnp.bfloat16),
        jnp.asarray(rng.uniform(0.5, 1.5, LATENT), jnp.bfloat16),
        *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)),
        *(jnp.asarray(a, jnp.int32) for a in (places // 64, places % 64)),
    ]


def donating():
    """A new function each time, so that tests share no compiled code."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, *args):
        with use(Backends(attention="mosaic")):
            return write_latent(cache, *args, eps=EPS)

    return run


@pytest.mark.parametrize("T", [1, 8, 32, 128, 512, 2048])
def test_rows(T):
    """The rows written are right and no other is touched, except page 0 with its padding tokens."""
    kv_a, weight, cos, sin, pages, offsets = tokens(T)
    padding = jnp.arange(T) % 5 == 4
    pages, offsets = (jnp.where(padding, 0, a) for a in (pages, offsets))
    run = donating()
    cache = jnp.full((PAGES, 64, CACHED), jnp.nan, jnp.bfloat16)
    for _ in range(3):  # the third run is a recorded graph's
        cache = run(cache, kv_a, weight, cos, sin, pages, offsets)
    exact = jnp.full(cache.shape, jnp.nan, jnp.float32)
    floats = (kv_a.astype(jnp.float32), weight.astype(jnp.float32))
    want = np.asarray(
        jax.jit(functools.partial(reference.write_latent, eps=EPS))(exact, *floats, cos, sin, pages, offsets)
    )
    got = np.asarray(cache, np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    live = np.asarray(~padding)
    at = np.asarray(pages)[live], np.asarray(offsets)[live]
    assert relative_error(got[at], want[at]) < 4e-3


def test_rounds_as_the_reference():
    args, cache = tokens(128), jnp.zeros((PAGES, 64, CACHED), jnp.bfloat16)
    want = np.asarray(
        reference.write_latent(cache, *args, eps=EPS), np.float32
    )  # op by op, so that no roundings are fused away
    got = np.asarray(donating()(cache, *args), np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)
    assert (got != want)[want != 0].mean() < 0.01


def test_the_cache_is_not_copied():
    cache = jnp.zeros((20_000, 64, CACHED), jnp.bfloat16)  # 1.5 GB
    compiled = donating().lower(cache, *tokens(8)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1e6
    copies = [line for line in compiled.as_text().splitlines() if "copy" in line and "bf16[20000,64,CACHED]" in line]
    assert not copies
