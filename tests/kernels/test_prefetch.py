"""Kernels that prefetch the weights of the next one give the same results; interpreted and lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import prefetch, tuning
from pallas_kernels.moe import api
from pallas_kernels.moe.combine import combine_and_norm
from pallas_kernels.moe.dispatch_fused import route_and_dispatch
from pallas_kernels.moe.routing import route_padded
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.tuning import Tuning
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

ROUTING = Routing(2, 2, 1, True, 1.0)


def equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (a, b))), got, want)


@interpreted
def test_results_are_the_same():
    """Of three kernels that wait. The weights are NaN: nothing reads them."""
    keys, T = jax.random.split(jax.random.key(0), 4), 8
    logits, bias, live = jax.random.normal(keys[0], (T, 8)), jnp.zeros(8), jnp.arange(T) != 2
    y, stream = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in ((keys[1], (4, 8, 256)), (keys[2], (T, 256)))
    )
    place = jax.random.randint(keys[3], (T, 2), 0, 32)
    weights, gain = jnp.ones((T, 2)), jnp.ones(256, jnp.bfloat16)
    calls = [
        functools.partial(route_padded, logits, bias, live, routing=ROUTING),
        functools.partial(route_and_dispatch, logits, bias, live, 8, 8, routing=ROUTING),
        functools.partial(combine_and_norm, y, (), weights, place, live, stream, gain, k=2, eps=1e-6),
    ]
    for call in calls:
        results = []
        for ahead in (None, jnp.full((2, 128, 256), jnp.nan, jnp.bfloat16)):
            results.append(call(ahead=ahead, interpret=detect_races()))
            assert_no_races(results[-1])
        equal(*results)


def test_what_can_be_prefetched():
    with tuning.use(Tuning(prefetches=True)):
        rows, halves = jnp.zeros((2, 6, 64, 512)), jnp.zeros((3, 2, 64, 256))
        assert prefetch.rows_ahead(rows).shape == (1, 768, 512)
        assert prefetch.halves_ahead(halves).shape == (6, 64, 256)
        assert prefetch.rows_ahead(jnp.zeros((64, 320))) is prefetch.rows_ahead(None) is None
        assert prefetch.halves_ahead(jnp.zeros((2, 96, 256))) is None
    with tuning.use(Tuning()):
        assert prefetch.rows_ahead(rows) is None


@pytest.mark.parametrize("T", [4, pytest.param(32, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_shared", [0, 1])
def test_lowers_for_the_gpu(num_shared: int, T: int, monkeypatch):
    """In a layer of Moonlight's: as many kernels as without, and no copy of a weight."""
    monkeypatch.setattr("pallas_kernels.backend.hopper_unsupported_reason", lambda *_: None)
    for name in ("mosaic", "routing", "combine"):
        monkeypatch.setattr(f"pallas_kernels.moe.{name}.hopper_unsupported_reason", lambda *_: None)
    monkeypatch.setattr("pallas_kernels.row.row_unsupported_reason", lambda *_: None)
    H, E, k, inner, _ = LAYERS["moonlight"]
    S = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    shared = (S((2, num_shared * inner, H)), S((H, num_shared * inner))) if num_shared else None
    parameters = ExpertWeights(S((E, 2, inner, H)), S((E, H, inner)), shared)
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    arguments = S((T, H)), S((T, H)), parameters, f32((T, E)), f32((E,)), jax.ShapeDtypeStruct((T,), jnp.bool_)

    def layer(first, gain, *rest):
        options = {"top_k": k, "num_groups": 1, "top_groups": 1, "normalize": True, "scale": 1.0}
        return api.add_routed_experts(*rest, api.NormAfter(gain, 1e-6, first), **options)

    texts = []
    for prefetches in (False, True):
        jax.clear_caches()
        with tuning.use(Tuning(row_kernel_tokens=512, copying_tokens=128, prefetches=prefetches)):
            traced = jax.jit(layer).trace(S((3072, H)), S((H,)), *arguments)
            texts.append(traced.lower(lowering_platforms=("cuda",)).as_text())
    plain, ahead = (text.count("custom_call @mosaic_gpu") for text in texts)
    assert plain == ahead >= 4
    assert texts[0] != texts[1]
