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
from pallas_kernels.norm_linear import add_norm, joined_linear, reference, split_linear
from pallas_kernels.norm_linear.api import joins_linears, linear_to_add, norm_linear, norms_apart
from pallas_kernels.norm_linear.ring_linear import ring_stages
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
@pytest.mark.parametrize(("T", "columns"), [(4, 256), (16, 256), (16, 1280), (72, 512), (136, 256)])
def test_split_linear(T, columns):
    """The sum of the parts is the linear map, to 16 bits of each; `add_norm` adds it as it adds the whole."""
    rng = np.random.default_rng(T)
    x, weight = bf16(rng, T, 4, columns), bf16(rng, 128, 4, columns)
    x = x.at[1, 0, 0].set(jnp.nan)
    parts = split_linear.split_linear(x, weight, interpret=detect_races())
    assert_no_races(parts)
    assert parts.shape == (8, T, 128)
    exact = (np.asarray(a, np.float64).reshape(a.shape[0], -1) for a in (x, weight))
    want = np.matmul(next(exact), next(exact).T)
    got = np.asarray(parts, np.float64).sum(axis=0)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(np.nan_to_num(got), np.nan_to_num(want), atol=2**-16 * np.nanmax(np.abs(want)))
    stream, gain = bf16(rng, T, 128), bf16(rng, 128)
    added = [
        add_norm.add_norm(stream, delta, gain, eps=EPS, interpret=detect_races())
        for delta in (parts, reference.whole(parts))
    ]
    for of_parts, of_whole in zip(*added, strict=True):
        np.testing.assert_array_equal(of_parts.astype(jnp.float32), of_whole.astype(jnp.float32))


@interpreted
@pytest.mark.parametrize("T", [4, 16, 72, 128, 136])
def test_joined_linear(T):
    """More stages than the ring has, more tokens than a block, and a NaN that stays in its token."""
    rng = np.random.default_rng(T)
    weights = bf16(rng, 2, 64, 2048), bf16(rng, 64, 2048)
    x = bf16(rng, T, 2048).at[1, 0].set(jnp.nan)
    got = joined_linear.joined_linear(x, weights, interpret=detect_races())
    assert_no_races(got)
    want = np.asarray(x, np.float64) @ np.concatenate([np.asarray(w, np.float64).reshape(-1, 2048) for w in weights]).T
    assert np.isnan(got[1]).all()
    sound = np.arange(T) != 1
    np.testing.assert_allclose(np.asarray(got, np.float64)[sound], want[sound], rtol=4e-3, atol=1e-3)


def test_few_blocks_with_many_columns_are_left_to_xla():
    """Of DeepSeek-V3's queries and latents from 32 tokens on; never of the shorter columns of other models."""
    assert [T for T in (4, 16, 32, 64, 128) if joined_linear.worthwhile(T, 7168, 2112)] == [4, 16]
    others = (2048, 3648), (2048, 1344), (768, 5120), (2048, 5120), (3072, 8192)
    assert all(joined_linear.worthwhile(T, *size) for T in (4, 32, 128) for size in others)
    # Of more tokens than a block has, those whose blocks run at once.
    assert [size for size in others if joined_linear.worthwhile(256, *size)] == [
        (2048, 3648),
        (2048, 1344),
        (768, 5120),
    ]
    assert not joined_linear.worthwhile(512, 2048, 3648)


def test_more_blocks_than_multiprocessors_share_their_memory():
    """GLM-4.5's 224 blocks have half a ring each: too few stages for more than 64 tokens."""

    def reason(T, outputs):
        shapes = [jax.ShapeDtypeStruct((n, 4096), jnp.bfloat16) for n in (T, outputs)]
        return joined_linear.unsupported_reason(shapes[0], (shapes[1],))

    assert [ring_stages(224, T) for T in (8, 32, 64, 128)] == [5, 4, 3, 2]
    # What is left to say of sizes that it supports is that here is no GPU.
    assert all("NVIDIA GPU" in reason(T, outputs) for T, outputs in ((8, 14336), (64, 14336), (128, 8448)))
    assert "fewer than 128 tokens" in reason(128, 14336)
    assert "up to 16896 in all" in reason(8, 16960)
    assert "up to 8448 in all for 256 tokens" in reason(256, 14336)


@interpreted
@pytest.mark.parametrize(("parts", "beside"), [((), 0), ((2, 1), 0), ((1,), 2)])
def test_combine_and_norm(parts, beside):
    """As XLA's sum, residual and norm; rows of tokens that are not live are never read, and may be NaN."""
    T, k, H, rows = 5, 3, 256, 8
    rng = np.random.default_rng(1)
    live = jnp.arange(T) % 3 != 1
    y = bf16(rng, 2 + beside, rows, H).at[0, 0].set(jnp.nan)
    y = y.at[2:, 1].set(jnp.nan)  # of a token that is not live
    place = np.where(live[:, None], rng.integers(1, 2 * rows, size=(T, k)), 0).astype(np.int32)
    padded = jnp.asarray(np.pad(place, ((0, 3), (0, 5)), constant_values=10**6))
    weights = jnp.asarray(rng.uniform(0.1, 1, size=(8, 64)), jnp.float32)
    addends = tuple(bf16(rng, n, 8, H) for n in parts)
    residual, gain = bf16(rng, T, H), bf16(rng, H)
    got, normed = combine.combine_and_norm(
        y, addends, weights, padded, live, residual, gain, k=k, eps=EPS, beside=beside, interpret=detect_races()
    )
    assert_no_races(got)
    rows_of = mosaic.ExpertRows(y, addends, weights, padded, beside)
    summed = mosaic.combine(rows_of, live, k).astype(jnp.bfloat16)
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

    def project_and_add(x, values, weight, gain):
        return add_norm.add_norm(x, split_linear.split_linear(values, weight), gain, eps=EPS)

    projections = abstract("b", 16, 192, H), abstract("b", 576, H)
    assert text(joined_linear.joined_linear, abstract("b", 128, H), projections).count("custom_call @mosaic_gpu") == 1
    for tokens in (4, 128):
        stream, values, weight = abstract("b", tokens, H), abstract("b", tokens, 16, 128), abstract("b", H, 16, 128)
        assert text(project_and_add, stream, values, weight, gain).count("custom_call @mosaic_gpu") == 2
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


@pytest.mark.slow
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
    with tuning.use(dataclasses.replace(ON, split_linear_tokens=128)):
        np.testing.assert_array_equal(linear_to_add(x, delta), x @ delta.T)
    with tuning.use(dataclasses.replace(ON, joined_linear_tokens=128)):
        assert not joins_linears(x, (delta,))
    assert "of 128 columns" in str(joined_linear.unsupported_reason(x, (delta,)))
    assert "multiples of 8" in str(split_linear.unsupported_reason(bf16(rng, 12, 512), bf16(rng, 64, 512)))
    assert "multiples of 64 outputs" in str(split_linear.unsupported_reason(x, x))
    assert "multiple of 128" in str(add_norm.unsupported_reason(x, gain))
