"""The Mosaic GPU kernel of mla_query, interpreted on the CPU with race detection, and lowered for cuda."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, UnsupportedError, use
from pallas_kernels.kv_write import mosaic as kv_write_mosaic
from pallas_kernels.kv_write import reference as kv_write
from pallas_kernels.mla_decode.shapes import CACHED, LATENT, NOPE, ROPE, WIDE_NOPE
from pallas_kernels.mla_query import mosaic, reference
from pallas_kernels.mla_query.api import mla_query
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import arranged, fp8_shapes, relative_error


def inputs(T: int, H: int, D: int = NOPE, R: int = ROPE, L: int = LATENT) -> list[jax.Array]:
    rng = np.random.default_rng(T)
    angles = rng.uniform(0, 6, (T, R // 2))
    return [
        jnp.asarray(rng.standard_normal((T, H, D + R)), jnp.bfloat16),
        jnp.asarray(rng.standard_normal((H, D, L)) / D**0.5, jnp.bfloat16),
        *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)),
    ]


@interpreted
@pytest.mark.parametrize(("T", "D"), [(1, NOPE), (5, NOPE), (12, NOPE), (40, NOPE), (12, WIDE_NOPE)])
def test_interpreted_without_races(T, D, monkeypatch):
    """Part of a tile, padding to whole tiles, and two blocks of tokens with wide tiles."""
    if T == 40:
        monkeypatch.setattr(mosaic, "MOST_COLUMNS", 24)
        monkeypatch.setattr(mosaic, "WIDE_FROM", 1)
    args = inputs(T, 2, D)
    # NaN in a token stays in it.
    args[0] = args[0].at[T // 2, 0, 0].set(jnp.nan if T > 1 else 1)
    got = mosaic.mla_query(*args, interpret=detect_races())
    want = reference.mla_query(*(a.astype(jnp.float32) for a in args))
    assert got.shape == (T, 2, CACHED)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert relative_error(jnp.nan_to_num(got), jnp.nan_to_num(want)) < 4e-3
    assert_no_races(got)


@interpreted
@pytest.mark.parametrize(
    ("T", "H", "merged", "D"),
    [(1, 2, False, NOPE), (5, 2, True, NOPE), (12, 2, False, NOPE), (12, 2, True, NOPE), (5, 2, True, WIDE_NOPE)],
)
def test_with_the_latents_in_one_launch(T, H, merged, D):
    """As two kernels; with more tokens than heads and fewer; inputs in one array, with columns between, and in two.

    The result has rows past the heads, or none.
    """
    q, w_uk, cos, sin = inputs(T, H, D)
    rng = np.random.default_rng(T)
    kv_a = jnp.asarray(rng.standard_normal((T, CACHED)), jnp.bfloat16)
    norm = jnp.asarray(rng.uniform(0.5, 1.5, LATENT), jnp.bfloat16)
    places = jnp.asarray(rng.permutation(3 * 64)[:T], jnp.int32)
    pages, offsets = places // 64, places % 64
    cache = jnp.full((3, 64, CACHED), jnp.nan, jnp.bfloat16)
    parts = arranged(q, kv_a, norm, merged=merged)
    head_rows = 8 if merged else None
    run = functools.partial(mosaic.write_and_query, eps=1e-5, head_rows=head_rows, interpret=detect_races())
    got_cache, got = run(cache, *parts, w_uk, cos, sin, pages, offsets)
    assert_no_races((got_cache, got))
    assert got.shape[1] == (head_rows or H)
    got = got[:, :H]
    assert relative_error(got, reference.mla_query(*(a.astype(jnp.float32) for a in (q, w_uk, cos, sin)))) < 4e-3
    want_cache = kv_write.write_latent(cache, kv_a, norm, cos, sin, pages, offsets, eps=1e-5)
    np.testing.assert_allclose(np.asarray(got_cache, np.float32), np.asarray(want_cache, np.float32), rtol=2**-7)


@interpreted
def test_with_fp8_latents_in_one_launch():
    """The codes are those that the kernel for writing alone gives, to the bit."""
    T = 5
    q, w_uk, cos, sin = inputs(T, 2, NOPE)
    rng = np.random.default_rng(T)
    kv_a = jnp.asarray(rng.standard_normal((T, CACHED)), jnp.bfloat16)
    norm = jnp.asarray(rng.uniform(0.5, 1.5, LATENT), jnp.bfloat16)
    places = jnp.asarray(rng.permutation(64)[:T], jnp.int32)
    nothing = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), fp8_shapes(1))
    options = {"eps": 1e-5, "interpret": detect_races()}
    where = jnp.zeros_like(places), places
    got, queries = mosaic.write_and_query(
        nothing, *arranged(q, kv_a, norm, merged=True), w_uk, cos, sin, *where, **options
    )
    want = kv_write_mosaic.write_latent(nothing, kv_a, norm, cos, sin, *where, **options)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert relative_error(queries, reference.mla_query(*(a.astype(jnp.float32) for a in (q, w_uk, cos, sin)))) < 4e-3
    assert_no_races((got, queries), kernels=2)


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("T", "H", "D"), [(1, 16, NOPE), (12, 16, NOPE), (32, 16, NOPE), (128, 128, NOPE), (4, 20, WIDE_NOPE)]
)
def test_lowers_for_cuda_with_the_latents(T, H, D, merged):
    q, w_uk, cos, sin = jax.eval_shape(lambda: inputs(T, H, D))
    shapes = [((1000, 64, CACHED), jnp.bfloat16), ((T, CACHED), jnp.bfloat16), ((LATENT,), jnp.bfloat16)]
    cache, kv_a, norm = (jax.ShapeDtypeStruct(*each) for each in shapes)
    places = [jax.ShapeDtypeStruct((T,), jnp.int32)] * 2
    f = jax.jit(functools.partial(mosaic.write_and_query, eps=1e-5), donate_argnums=0)
    kv_a, norm, q = jax.eval_shape(functools.partial(arranged, merged=merged), q, kv_a, norm)
    lowered = f.trace(cache, kv_a, norm, q, w_uk, cos, sin, *places).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    assert "output_operand_alias" in text  # in place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "H", "D"),
    [(T, H, NOPE) for T, H in [(1, 16), (4, 16), (12, 16), (32, 16), (136, 16), (128, 128), (2048, 4)]]
    + [(4, 20, WIDE_NOPE), (128, 64, WIDE_NOPE)],
)
def test_lowers_for_cuda(T, H, D):
    args = jax.eval_shape(lambda: inputs(T, H, D))
    lowered = jax.jit(mosaic.mla_query).trace(*args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    # Only the kernel, unless rows must be padded to whole tiles.
    assert ("stablehlo.pad" in text) == (T == 12)


def test_unsupported_sizes_run_on_the_reference():
    args = inputs(3, 2, 16, 8, 32)
    assert "heads of 128 + 64 or 192 + 64" in str(mosaic.unsupported_reason(*args[:2]))
    for backend in ("auto", "triton", "reference"):
        with use(Backends(attention=backend)):
            np.testing.assert_array_equal(mla_query(*args), reference.mla_query(*args))
    with use(Backends(attention="mosaic")), pytest.raises(UnsupportedError, match="heads of 128"):
        mla_query(*args)
