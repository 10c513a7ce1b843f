"""Kernels with a token a warpgroup: sums into the residual stream with the norm that follows; interpreted and lowered."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.moe import api, combine, mosaic
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.norm_linear import add_norm, reference
from pallas_kernels.norm_linear.api import norm_linear, norms_apart
from pallas_kernels.tuning import Tuning
from tests.kernels.moe_cases import ROUTINGS
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

ON = Tuning(row_kernel_tokens=512)
EPS = 1e-5


def bf16(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def same(got, want):
    """Up to a rounding in the middle, which XLA may leave out, as it does for the interpreter."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=1.6e-2)


@interpreted
def test_add_norm():
    rng = np.random.default_rng(0)
    x, delta, gain = bf16(rng, 3, 256), bf16(rng, 3, 256), bf16(rng, 256)
    x = x.at[1, 7].set(jnp.nan)
    got = add_norm.add_norm(x, delta, gain, eps=EPS, interpret=detect_races())
    assert_no_races(got)
    want_sum, want_norm, _ = reference.norm_linear(x, gain, (), eps=EPS, delta=delta)
    np.testing.assert_array_equal(got[0].astype(jnp.float32), want_sum.astype(jnp.float32))
    assert jnp.isnan(got[1][1]).all()
    same(jnp.delete(got[1], 1, axis=0), jnp.delete(want_norm, 1, axis=0))


@interpreted
@pytest.mark.parametrize("parts", [(), (2, 1)])
def test_combine_and_norm(parts):
    """As XLA's sum, residual and norm; rows of tokens that are not live are never read, and may be NaN."""
    T, k, H, rows = 5, 3, 256, 8
    rng = np.random.default_rng(1)
    live = jnp.arange(T) % 3 != 1
    y = bf16(rng, 2, rows, H).at[0, 0].set(jnp.nan)
    place = np.where(live[:, None], rng.integers(1, 2 * rows, size=(T, k)), 0).astype(np.int32)
    padded = jnp.asarray(np.pad(place, ((0, 3), (0, 5)), constant_values=10**6))
    weights = jnp.asarray(rng.uniform(0.1, 1, size=(8, 64)), jnp.float32)
    addends = tuple(bf16(rng, n, 8, H) for n in parts)
    residual, gain = bf16(rng, T, H), bf16(rng, H)
    got, normed = combine.combine_and_norm(
        y, addends, weights, padded, live, residual, gain, k=k, eps=EPS, interpret=detect_races()
    )
    assert_no_races(got)
    summed = mosaic.combine(mosaic.ExpertRows(y, addends, weights, padded), live, k).astype(jnp.bfloat16)
    same(got, residual + summed)
    np.testing.assert_array_equal(got[~live], residual[~live])
    same(normed, reference.rms_norm(got, gain, EPS))


def test_lowers_for_cuda():
    """A sum with its norm is one kernel, and one less follows the experts."""
    T, (H, E, _, inner, S) = 32, LAYERS["moonlight"]
    kinds = {"b": jnp.bfloat16, "f": jnp.float32, "i": jnp.bool_}

    def abstract(kind, *shape):
        return jax.ShapeDtypeStruct(shape, kinds[kind])

    def text(f, *args):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    x, gain = abstract("b", T, H), abstract("b", H)
    assert text(lambda *a: add_norm.add_norm(*a, eps=EPS), x, x, gain).count("custom_call @mosaic_gpu") == 1
    shared = abstract("b", 2, S, H), abstract("b", H, S)
    parameters = ExpertWeights(abstract("b", E, 2, inner, H), abstract("b", E, H, inner), shared)
    layer = x, parameters, abstract("f", T, E), abstract("f", E), abstract("i", T), x, gain
    lowered = text(lambda *a: mosaic.add_and_norm(*a, routing=ROUTINGS["moonlight"][1], eps=EPS), *layer)
    assert lowered.count("custom_call @mosaic_gpu") == 6
    assert "stablehlo.gather" not in lowered


def test_norms_are_apart_where_tuning_says_so():
    with tuning.use(ON):
        assert [T for T in (1, 2, 512, 513) if norms_apart(T)] == [2, 512]
    assert not any(map(norms_apart, (1, 2, 512)))


def test_without_a_gpu_the_results_are_the_reference():
    T, H, E = 3, 64, 8
    rng = np.random.default_rng(2)
    x, delta, gain, router = bf16(rng, T, H), bf16(rng, T, H), bf16(rng, H), jnp.asarray(rng.normal(size=(E, H)), "f4")
    parameters = ExpertWeights(bf16(rng, E, 2, 32, H), bf16(rng, E, H, 32))
    with tuning.use(ON):
        summed, normed, (logits,) = norm_linear(x, gain, (router,), eps=EPS, delta=delta)
        options = dataclasses.asdict(ROUTINGS["odd"][1])
        args = normed, parameters, logits, jnp.zeros(E), jnp.ones(T, bool)
        out, following = api.add_routed_experts(summed, *args, following=(gain, EPS), **options)
    for got, want in zip(
        (summed, normed, logits),
        jax.tree.leaves(reference.norm_linear(x, gain, (router,), eps=EPS, delta=delta)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
    assert following is None
    np.testing.assert_array_equal(out, api.routed_experts(*args, residual=summed, **options))
    assert "multiple of 128" in str(add_norm.unsupported_reason(x, gain))
