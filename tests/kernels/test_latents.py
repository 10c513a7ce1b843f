"""Latents in FP8: what is written, and attention over them against attention over what they stand for, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.kv_write.api import write_latent
from pallas_kernels.latents import GROUP, LEAST_EXPONENT, dequantise, quantise
from pallas_kernels.mla_decode import api as mla_decode_api
from pallas_kernels.mla_prefill import api as mla_prefill_api
from pallas_kernels.mla_query.api import write_and_query
from tests.kernels.paged_cases import flat_chunks, paged_pool, window_bounds

R, H, D, V, PAGE = 8, 4, 12, 20, 8
mla_decode = jax.jit(mla_decode_api.mla_decode, static_argnames=("scale", "value_dim"))
mla_prefill = jax.jit(mla_prefill_api.mla_prefill, static_argnames="scale")
E4M3 = ml_dtypes.float8_e4m3fn


@given(
    largest=st.floats(0, 2.0**100, width=32, allow_subnormal=False), exponent=st.integers(-30, 30),
    largest_code=st.booleans(),
)  # fmt: skip
def test_scale_is_the_least_power_of_two_that_fits(largest, exponent, largest_code):
    """Also for largest values that are 448 times a power of two, and their neighbours: a logarithm rounds those."""
    exact = np.float32(448 * 2.0**exponent)
    for value in (np.float32(largest), exact if largest_code else np.nextafter(exact, np.float32(np.inf))):
        latents = quantise(jnp.array([[value, -value / 3]]), jnp.zeros((1, 2)))
        scale = float(latents.scale[0, 0])
        mantissa, _ = np.frexp(scale)
        assert mantissa == 0.5
        assert value <= 448 * scale
        assert scale == 2.0**LEAST_EXPONENT or value > 224 * scale
        want = np.array([value, -value / np.float32(3)], np.float32) / np.float32(scale)
        np.testing.assert_array_equal(np.asarray(latents.codes)[0].view(np.uint8), want.astype(E4M3).view(np.uint8))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_kept_in_its_scale(bad):
    """A kernel that converts codes by their bits turns a code of NaN into a number."""
    latent = np.ones((1, 2 * GROUP), np.float32)
    latent[0, 3] = bad
    latents = quantise(jnp.asarray(latent), jnp.zeros((1, 2)))
    np.testing.assert_array_equal(np.isnan(latents.scale), [[True, False]])


@pytest.mark.long
@given(
    lengths=st.lists(st.integers(4, 70), min_size=1, max_size=4), seed=st.integers(0, 9),
    kind=st.sampled_from([(1, 16, jnp.float32), (3, 200, jnp.float32), (4, 128, jnp.bfloat16)]),
)  # fmt: skip
def test_attention_is_that_over_what_the_codes_stand_for(lengths, kind, seed):
    """Decoding and prompts, with NaN in all that no context owns."""
    n, rank, dtype = kind
    rng = np.random.default_rng(seed)
    pool, tables = paged_pool(rng, lengths, rank + R, page_size=PAGE)
    columns = -tables.shape[1] % 10  # one shape for all lengths
    tables = np.pad(tables, ((0, 4 - len(lengths)), (0, columns)))
    pool = np.pad(pool, ((0, 64 - len(pool)), (0, 0), (0, 0)), constant_values=np.nan)
    pages = quantise(jnp.asarray(pool[..., :rank]), jnp.asarray(pool[..., rank:]))
    plain = dequantise(pages, dtype)
    assert plain.dtype == dtype
    bounds = window_bounds(lengths + [n] * (4 - len(lengths)), n)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    q = normal(4, n, H, rank + R)
    options = {"scale": 0.3, "value_dim": rank}
    got, want = (np.asarray(mla_decode(q, p, tables, bounds, **options), np.float32) for p in (pages, plain))
    assert np.isfinite(got[: len(lengths)]).all()
    np.testing.assert_array_equal(got[: len(lengths)], want[: len(lengths)])

    chunks = [min(length, 8) for length in lengths] + [0] * (4 - len(lengths))
    starts = [length - chunk for length, chunk in zip(lengths + [0] * (4 - len(lengths)), chunks, strict=True)]
    rows, positions, ends = flat_chunks(starts, chunks, 32 - sum(chunks))
    args = normal(32, H, D), normal(32, H, R), normal(H, D, rank), normal(H, V, rank)
    got, want = (
        np.asarray(mla_prefill(*args, p, tables, rows, positions, ends, scale=0.2), np.float32) for p in (pages, plain)
    )
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_fp8_latents_are_what_was_written():
    """Both writers write the same codes: those of the latents that a plain cache holds. Keys are written as they are."""
    rng, T, rank = np.random.default_rng(0), 11, 200
    places = jnp.asarray(rng.permutation(4 * PAGE)[:T], jnp.int32)
    pages, offsets = places // PAGE, places % PAGE
    kv_a = rng.standard_normal((T, rank + R)).astype(np.float32)
    kv_a[:, rank:] *= 20  # a scale of the latent would cut them off
    weight = jnp.asarray(rng.uniform(0.01, 3, rank), jnp.float32)
    cos, sin = jnp.cos(jnp.arange(T * R / 2)).reshape(T, -1), jnp.sin(jnp.arange(T * R / 2)).reshape(T, -1)
    before = quantise(jnp.full((4, PAGE, rank), jnp.nan), jnp.full((4, PAGE, R), jnp.nan))
    write = functools.partial(write_latent, cos=cos, sin=sin, pages=pages, offsets=offsets, eps=1e-6)
    written = write(before, kv_a, weight)
    q, w_uk = jnp.ones((T, H * (D + R))), jnp.ones((H, D, rank))
    joined, _ = write_and_query(before, jnp.asarray(kv_a), weight, q, w_uk, cos, sin, pages, offsets, eps=1e-6)
    for a, b in zip(jax.tree.leaves(written), jax.tree.leaves(joined), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))

    plain = np.asarray(write(jnp.zeros((4, PAGE, rank + R)), kv_a, weight)[pages, offsets])
    got = np.asarray(dequantise(written, jnp.float32)[pages, offsets])
    np.testing.assert_array_equal(got[:, rank:], plain[:, rank:].astype(ml_dtypes.bfloat16).astype(np.float32))
    for group in (slice(0, GROUP), slice(GROUP, rank)):
        scale = np.asarray(written.scale[pages, offsets])[:, [group.start // GROUP]]
        want = (plain[:, group] / scale).astype(E4M3).astype(np.float32) * scale
        np.testing.assert_array_equal(got[:, group], want)
        assert (np.abs(plain[:, group]).max(axis=1) > 224 * scale[:, 0]).all()
    untouched = np.ones((4, PAGE), bool)
    untouched[pages, offsets] = False
    assert np.isnan(np.asarray(dequantise(written, jnp.float32))[untouched]).all()
