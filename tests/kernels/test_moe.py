"""Routing and routed experts against loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.layers import MLP
from jaxspec.models.params import Declare
from pallas_kernels.moe.activation import Clamp
from pallas_kernels.moe.api import experts, route_sigmoid, route_softmax
from pallas_kernels.moe.reference import TOKEN_BLOCK, ranks
from pallas_kernels.moe.weights import ExpertWeights


def numpy_route(logits, bias, *, top_k, num_groups, top_groups, normalize, scale, sigmoid):
    """Step by step as DeepSeek's model files describe it, one token at a time."""
    weights, chosen = [], []
    for row in logits.astype(np.float64):
        if sigmoid:
            scores = 1 / (1 + np.exp(-row))
        else:
            scores = np.exp(row - row.max())
            scores /= scores.sum()
        choice = scores + bias
        groups = choice.reshape(num_groups, -1)
        group_score = np.sort(groups, axis=1)[:, -2:].sum(axis=1) if sigmoid else groups.max(axis=1)
        kept = np.argsort(-group_score)[:top_groups]
        masked = np.full_like(choice, -np.inf).reshape(num_groups, -1)
        masked[kept] = groups[kept]
        ids = np.argsort(-masked.reshape(-1))[:top_k]
        w = scores[ids]
        weights.append((w / w.sum() if normalize else w) * scale)
        chosen.append(ids)
    return np.array(weights), np.array(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize("normalize", [True, False])
def test_routing(sigmoid, groups, top_groups, normalize):
    rng = np.random.default_rng(groups)
    logits = rng.normal(size=(64, 16)).astype(np.float32)
    # Negative biases: a mask of 0 instead of -inf would change the choice.
    bias = rng.normal(size=16).astype(np.float32) - 1.0 if sigmoid else np.zeros(16, np.float32)
    options = {"top_k": 3, "num_groups": groups, "top_groups": top_groups, "normalize": normalize, "scale": 2.5}
    weights, ids = route_sigmoid(logits, bias, **options) if sigmoid else route_softmax(logits, **options)
    want_weights, want_ids = numpy_route(logits, bias, sigmoid=sigmoid, **options)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "E"), [(24, 8), (24, 64), (24, 384), (300, 256)])
def test_ranks_are_those_of_top_k(T, E):
    """Ties, infinities and NaN too: every row is a permutation, the lower index first among equals. 300 tokens of 256
    experts are compared in two blocks."""
    rng = np.random.default_rng(E)
    scores = rng.integers(-E, E, size=(T, E)).astype(np.float32) / 4
    scores[:8, ::3] = -np.inf
    scores[4:12, rng.integers(0, E, size=5)] = np.nan
    scores[12] = np.nan
    scores[13] = 0.5
    order = np.argsort(np.asarray(ranks(scores)), axis=1)
    np.testing.assert_array_equal(order, jax.lax.top_k(scores, E)[1])


@pytest.mark.parametrize(("T", "loops"), [(256, False), (300, True)])
def test_only_many_pairs_are_ranked_in_a_loop(T, loops):
    """In one piece XLA compiles thousands of tokens for minutes; a loop would break the CUDA graph of a decode step."""
    assert ("while" in jax.jit(ranks).lower(np.zeros((T, 256), np.float32)).as_text()) == loops


@pytest.mark.parametrize("sigmoid", [True, False])
def test_routing_sorts_nothing(sigmoid):
    """A sort would break the CUDA graph of a decode step."""
    options = {"top_k": 3, "num_groups": 4, "top_groups": 2, "normalize": True, "scale": 1.0}
    logits, bias = np.zeros((2, 16), np.float32), np.zeros(16, np.float32)
    route = (lambda a: route_sigmoid(a, bias, **options)) if sigmoid else (lambda a: route_softmax(a, **options))
    text = jax.jit(route).lower(logits).as_text()
    assert not any(name in text for name in ("sort", "top_k", "scatter", "while"))


@pytest.mark.parametrize("sigmoid", [True, False])
def test_ids_of_a_nan_row_are_experts(sigmoid):
    logits = np.full((1, 16), np.nan, np.float32)
    options = {"top_k": 3, "num_groups": 4, "top_groups": 2, "normalize": True, "scale": 1.0}
    _, ids = route_sigmoid(logits, np.zeros(16, np.float32), **options) if sigmoid else route_softmax(logits, **options)
    assert sorted(set(np.asarray(ids[0]).tolist())) == np.asarray(ids[0]).tolist()
    assert 0 <= ids.min() <= ids.max() < 16


@pytest.mark.slow
@pytest.mark.parametrize(("T", "clamp"), [(1, None), (13, None), (13, Clamp(1.702, 0.5)), (TOKEN_BLOCK + 5, None)])
def test_experts(T, clamp):
    """With a clamp with biases too, as in gpt-oss."""
    rng = np.random.default_rng(T)
    E, H, inner, k = 8, 16, 12, 3
    x = rng.normal(size=(T, H)).astype(np.float32)
    gate_up, down = rng.normal(size=(E, 2, inner, H)) / 4, rng.normal(size=(E, H, inner)) / 4
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=(T, k)).astype(np.float32)
    live = rng.uniform(size=T) < 0.8
    x_with_nan = np.where(live[:, None], x, np.nan).astype(np.float32)
    zero = np.zeros((E, 2, inner), np.float32), np.zeros((E, H), np.float32)
    up_bias, down_bias = (rng.normal(size=z.shape).astype(np.float32) for z in zero) if clamp else zero
    biases = (up_bias, down_bias) if clamp else None
    both = gate_up.astype(np.float32), down.astype(np.float32)
    parameters = ExpertWeights(*both, biases=biases, clamp=clamp)
    out = np.asarray(experts(x_with_nan, parameters, weights, ids, live))
    for t in np.flatnonzero(live):
        want = 0
        for e, w in zip(ids[t], weights[t], strict=True):
            gate, up = (gate_up[e, i] @ x[t] + up_bias[e, i] for i in range(2))
            if clamp:
                gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5) + 1
            joined = gate / (1 + np.exp(-gate * (1.702 if clamp else 1))) * up
            want = want + w * (down[e] @ joined + down_bias[e])
        np.testing.assert_allclose(out[t], want, atol=1e-4)
    dead = np.asarray(experts(x, parameters, weights, ids, live))[~live]
    np.testing.assert_array_equal(dead, 0)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, TOKEN_BLOCK + 5])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_shared_experts_are_an_mlp(dtype, T):
    """Live tokens get the output of a module of their joint size, bit for bit; dead ones get 0, even if their x is NaN."""
    rng = np.random.default_rng(T)
    E, H, inner, k = 4, 16, 12, 2

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / 4, dtype)

    routed, shared = (normal(E, 2, inner, H), normal(E, H, inner)), (normal(2, 2 * inner, H), normal(H, 2 * inner))
    mlp = MLP(H, 2 * inner, Declare(dtype))
    mlp.gate_up, mlp.down = map(nnx.Param, shared)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    weights, live = rng.uniform(0.1, 1, size=(T, k)).astype(np.float32), np.arange(T) % 5 != 4
    x = jnp.where(live[:, None], normal(T, H), jnp.nan)
    got = experts(x, ExpertWeights(*routed, shared), weights, ids, live)
    want = experts(x, ExpertWeights(*routed), weights, ids, live) + mlp(x)
    np.testing.assert_array_equal(got[live], want[live])
    np.testing.assert_array_equal(got[~live], 0)
