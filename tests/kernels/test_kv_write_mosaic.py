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
from pallas_kernels.latents import GROUP, LEAST_EXPONENT, quantise
from pallas_kernels.mla_decode.shapes import CACHED, LATENT
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import fp8_shapes

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


@interpreted
def test_fp8_is_the_quantised_row_without_races():
    """Codes and scales are those of the row that the kernel for bfloat16 writes, to the bit; no other token is touched."""
    T = 3
    places = np.random.default_rng(0).permutation(2 * 64)[:T]
    pages, offsets = (jnp.asarray(a, jnp.int32) for a in (places // 64, places % 64))
    kv_a, *rest = tokens(T)
    kv_a = kv_a.at[0, :GROUP].set(0).at[1, GROUP : 2 * GROUP].mul(1e-6).at[2, 400].set(3e4)
    write = functools.partial(mosaic.write_latent, eps=EPS, interpret=detect_races())
    plain = write(jnp.full((2, 64, CACHED), jnp.nan, jnp.bfloat16), kv_a, *rest, pages, offsets)
    want = quantise(plain[..., :LATENT], plain[..., LATENT:])
    nothing = jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), fp8_shapes(2))
    got = write(nothing, kv_a, *rest, pages, offsets)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert float(got.scale[pages[0], offsets[0], 0]) == 2.0**LEAST_EXPONENT
    assert_no_races(got, kernels=2)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("fp8", [False, True])
def test_lowers_for_cuda(T, fp8):
    f = jax.jit(functools.partial(mosaic.write_latent, eps=EPS), donate_argnums=0)
    places = [jax.ShapeDtypeStruct((T,), jnp.int32)] * 2
    cache = fp8_shapes(1000) if fp8 else jax.ShapeDtypeStruct((1000, 64, CACHED), jnp.bfloat16)
    shapes = (cache, *tokens(T), *places)
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
