"""The Mosaic GPU kernel of norm_linear, interpreted on the CPU with race detection, and lowered for cuda."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, use
from pallas_kernels.norm_linear import add_norm, mosaic, reference
from pallas_kernels.norm_linear.api import norm_linear
from pallas_kernels.norm_linear.shapes import READERS
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import relative_error


def inputs(T, H, outs, experts=0):
    """x, the norm's weight, weights (with experts, also a float32 router of them), and delta."""
    rng = np.random.default_rng(T)
    shapes = [(T, H), (H,), (T, H), *((*out, H) for out in outs)]
    x, gain, delta, *weights = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    weights = [w / np.sqrt(H).astype(w.dtype) for w in weights]
    if experts:
        weights.append(jnp.asarray(rng.standard_normal((experts, H)) / H**0.5, jnp.float32))
    return x, gain, tuple(weights), delta


def check(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_array_equal(np.isnan(g), np.isnan(w))
        assert relative_error(jnp.nan_to_num(g), jnp.nan_to_num(w)) < 8e-3


@interpreted
@pytest.mark.parametrize(
    ("T", "H", "outs", "experts", "adds"),
    [(1, 256, [(2, 8), (16,)], 0, False), (1, 512, [], 0, False), (3, 512, [], 12, True), (8, 768, [(8,)], 4, True)],
)
def test_interpreted_without_races(T, H, outs, experts, adds):
    x, gain, weights, delta = inputs(T, H, outs, experts)
    # NaN in a token stays in it.
    x = x.at[T // 2, 0].set(jnp.nan if T > 1 else 1)
    delta = delta if adds else None
    *got, zero = mosaic.norm_linear(x, gain, weights, eps=1e-5, delta=delta, interpret=detect_races())
    assert_no_races(got)
    assert zero.tolist() == [0]
    check(tuple(got), reference.norm_linear(x, gain, weights, eps=1e-5, delta=delta))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "H", "outs", "experts", "adds"),
    [
        (1, *READERS["moonlight, attention"], False),
        (1, 2048, [], 0, False),
        (4, *READERS["moonlight, router"], True),
        (1, *READERS["deepseek-v3, both"], True),
        pytest.param(8, *READERS["deepseek-v3, both"], True, marks=pytest.mark.full),
    ],
)
def test_lowers_for_cuda(T, H, outs, experts, adds):
    x, gain, weights, delta = jax.eval_shape(lambda: inputs(T, H, outs, experts))
    f = jax.jit(functools.partial(mosaic.norm_linear, eps=1e-5))
    traced = f.trace(x, gain, weights, delta=delta if adds else None)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2(") == 1


@pytest.mark.parametrize("backend", ["auto", "mosaic", "reference"])
def test_unsupported_sizes_run_on_the_reference(backend):
    x, gain, weights, delta = inputs(3, 48, [(8,)], 4)
    assert "hidden size" in str(mosaic.unsupported_reason(x, gain, weights))
    assert "outputs" in str(mosaic.unsupported_reason(*inputs(3, 256, [(9,)])[:3]))
    with use(Backends(attention=backend)):
        check(
            norm_linear(x, gain, weights, eps=1e-5, delta=delta),
            reference.norm_linear(x, gain, weights, eps=1e-5, delta=delta),
        )


@pytest.mark.parametrize("H", [64, 2048])
def test_float32_product_of_bfloat16_parts(H):
    """Of a router: as exact as a float32 matmul, compiled or not."""
    rng = np.random.default_rng(H)
    x = jnp.asarray(rng.normal(size=(7, H)), jnp.bfloat16)
    weight = rng.normal(size=(3, 5, H)).astype(np.float32)
    first, *others = jax.jit(reference.bf16_terms)(weight)
    total = np.asarray(first, np.float64) + sum(np.asarray(each, np.float64) for each in others)
    np.testing.assert_array_equal(total, weight)
    got = jax.jit(reference.float32_product)(x, weight)
    want = np.einsum("th,abh->tab", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    assert got.shape == (7, 3, 5)
    assert np.abs(got - want).max() <= 2**-20 * np.abs(want).max()


@interpreted
def test_centred_norm():
    """As of Qwen3.5: 1 + the weight in float32, and one rounding after it."""
    x, _, weights, delta = inputs(2, 512, [(8,)], 4)
    gain = jnp.asarray(np.random.default_rng(0).standard_normal(512), jnp.bfloat16)
    run = {"eps": 1e-5, "centred": True}
    want = reference.norm_linear(x, gain, weights, delta=delta, **run)
    np.testing.assert_array_equal(want[1], reference.rms_norm(want[0], 1 + gain.astype(jnp.float32), 1e-5))
    *got, _ = mosaic.norm_linear(x, gain, weights, delta=delta, interpret=detect_races(), **run)
    assert_no_races(got)
    check(tuple(got), want)
    summed, normed = add_norm.add_norm(x, delta, gain, interpret=detect_races(), **run)
    assert_no_races((summed, normed))
    np.testing.assert_array_equal(summed, want[0])
    check(normed, want[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_factors_in_float32_lower_for_cuda(dtype):
    x, _, weights, delta = jax.eval_shape(lambda: inputs(1, *READERS["moonlight, router"]))
    gain = jax.ShapeDtypeStruct(x.shape[1:], dtype)
    for run in (
        jax.jit(functools.partial(mosaic.norm_linear, eps=1e-5, centred=True)).trace(x, gain, weights, delta=delta),
        jax.jit(functools.partial(add_norm.add_norm, eps=1e-5, centred=True)).trace(x, delta, gain),
    ):
        assert run.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2(") == 1
