"""The Mosaic GPU kernel of kv_write, interpreted on the CPU with race detection, and lowered for cuda."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, UnsupportedError, use
from pallas_kernels.kv_write import mosaic, reference
from pallas_kernels.kv_write.api import write_latent
from pallas_kernels.kv_write.shapes import TOKENS
from pallas_kernels.mla_decode.shapes import CACHED, LATENT
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

EPS = 1e-5


def tokens(T: int, width: int = CACHED, latent: int = LATENT) -> list[jax.Array]:
    """kv_a, the norm's weight, cos and sin of T tokens."""
    rng = np.random.default_rng(T)
    angles = rng.uniform(0, 6, (T, (width - latent) // 2))
    return [
        jnp.asarray(3 * rng.standard_normal((T, width)), jnp.bfloat16),
        jnp.asarray(rng.uniform(0.5, 1.5, latent), jnp.bfloat16),
        *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)),
    ]


@interpreted
@pytest.mark.parametrize("T", [1, 5])
def test_interpreted_without_races(T):
    """The rows written are the reference's, and no other is touched."""
    places = np.random.default_rng(0).permutation(3 * 64)[:T]
    pages, offsets = (jnp.asarray(a, jnp.int32) for a in (places // 64, places % 64))
    cache = jnp.full((3, 64, CACHED), jnp.nan, jnp.bfloat16)
    args = (*tokens(T), pages, offsets)
    got = np.asarray(mosaic.write_latent(cache, *args, eps=EPS, interpret=detect_races()), np.float32)
    want = np.asarray(reference.write_latent(cache, *args, eps=EPS), np.float32)
    # The order of the sum of squares may change a rounding.
    np.testing.assert_allclose(got, want, rtol=2**-7)
    assert (got != want)[~np.isnan(want)].mean() < 0.01
    assert_no_races(got)


@pytest.mark.parametrize("T", TOKENS)
def test_lowers_for_cuda(T):
    f = jax.jit(functools.partial(mosaic.write_latent, eps=EPS), donate_argnums=0)
    places = [jax.ShapeDtypeStruct((T,), jnp.int32)] * 2
    shapes = (jax.ShapeDtypeStruct((1000, 64, CACHED), jnp.bfloat16), *tokens(T), *places)
    text = f.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    assert "output_operand_alias" in text  # in place


def test_unsupported_sizes_run_on_the_reference():
    cache, pages = jnp.zeros((2, 4, 24), jnp.bfloat16), jnp.ones(3, jnp.int32)
    args = (*tokens(3, 24, 16), pages, jnp.arange(3, dtype=jnp.int32))
    assert mosaic.unsupported_reason(cache, *args[:2]) == "it supports latents of 512 + 64, not 16 + 8"
    want = reference.write_latent(cache, *args, eps=EPS)
    for backend in ("auto", "triton", "reference"):
        with use(Backends(attention=backend)):
            np.testing.assert_array_equal(write_latent(cache, *args, eps=EPS), want)
    with use(Backends(attention="mosaic")), pytest.raises(UnsupportedError, match="latents of 512"):
        write_latent(cache, *args, eps=EPS)
