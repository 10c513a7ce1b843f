"""What the families of grouped-query attention and their mixtures must not get wrong, one by one."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.config import RopeConfig
from jaxspec.models.gpt_oss import StackedMoESpec
from jaxspec.models.gqa import GQASpec
from jaxspec.models.keymap import fill
from jaxspec.models.layers import rope_frequencies, rope_tables
from jaxspec.models.params import Declare
from jaxspec.models.registry import read_config
from pallas_kernels.moe.api import route_sigmoid
from pallas_kernels.rope import apply_rope
from tests.caches import empty_cache, single_request
from tests.engine.scripted import numpy_params
from tests.models.test_mtp import bound
from tests.tiny_models import CONFIGS

T, H, K, G, D = 3, 12, 2, 2, 8


def rotated(x, positions, dim, theta):
    """[T, K, D] of which the first `dim` columns are turned, column j with j + dim / 2."""
    z = x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]
    z = z * np.exp(1j * positions[:, None] * theta ** (-np.arange(0, dim, 2) / dim))[:, None]
    return np.concatenate([z.real, z.imag, x[..., dim:]], axis=-1)


def test_partial_rotary_leaves_tail():
    """The first columns are rotated, not the last ones."""
    x = np.random.default_rng(0).normal(size=(T, K, D)).astype(np.float32)
    positions = np.arange(5, 5 + T)
    got = np.asarray(apply_rope(jnp.asarray(x), *rope_tables(RopeConfig(4, 100.0), jnp.asarray(positions))))
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    np.testing.assert_allclose(got, rotated(x, positions, 4, 100.0), atol=1e-5)


@pytest.mark.parametrize("kind", ["head", "whole"])
def test_qk_norm_order(kind):
    """Keys are normed before they are rotated: over each head, or over all of them at once."""
    spec = GQASpec(K * G, K, D, 1.0, RopeConfig(4, 100.0), qk_norm=kind, bias=True)
    params = numpy_params(spec.build(H, Declare(jnp.float32)), 0)
    attention = bound(spec.build(H, Declare(jnp.float32)), params)
    x = np.random.default_rng(1).normal(size=(T, H)).astype(np.float32)
    meta = single_request(0, T, pages=1, page_size=4, prefill=True)
    cache = empty_cache(attention.cache_spec, 2, 4)
    keys, _ = attention.write_keys(jnp.asarray(x), cache, meta, rope_tables(spec.rope, meta.positions))
    k = np.einsum("th,kdh->tkd", x, params["qkv"][:, -2]) + params["qkv_bias"][:, -2]
    axes = -1 if kind == "head" else (-2, -1)
    weight = np.asarray(params["k_norm"]["weight"]).reshape((D,) if kind == "head" else (K, D))
    k = weight * k / np.sqrt((k**2).mean(axis=axes, keepdims=True) + spec.norm_eps)
    np.testing.assert_allclose(keys[meta.pages, meta.offsets], rotated(k, np.arange(T), 4, 100.0), atol=1e-4)


def test_bias_selects_only():
    """An expert that its bias alone has chosen weighs no more than its score."""
    logits, bias = np.zeros((1, 6), np.float32), np.zeros(6, np.float32)
    logits[0, 2], bias[4] = 1.0, 50.0
    options = {"top_k": 2, "num_groups": 1, "top_groups": 1, "scale": 1.0}
    weights, ids = route_sigmoid(logits, bias, normalize=False, **options)
    assert ids.tolist() == [[4, 2]]
    np.testing.assert_allclose(weights, [[0.5, 1 / (1 + np.exp(-1))]], rtol=1e-6)


@pytest.mark.parametrize("columns", [2, 256])
def test_gpt_oss_gate_up_order(columns, monkeypatch):
    """Gate and up alternate in the last axis of a tensor that is stored [in, out]."""
    monkeypatch.setattr("jaxspec.models.keymap.COLUMNS", columns)
    E, hidden, inner = 2, 3, 4
    moe = StackedMoESpec(E, 1, inner, 0, "softmax", biases=True)
    tensors = {
        "experts.gate_up_proj": np.arange(E * hidden * 2 * inner).reshape(E, hidden, 2 * inner),
        "experts.gate_up_proj_bias": np.arange(E * 2 * inner).reshape(E, 2 * inner),
        "experts.down_proj": np.arange(E * inner * hidden).reshape(E, inner, hidden),
    }
    shapes = {"gate_up": (E, 2, inner, hidden), "gate_up_bias": (E, 2, inner), "down": (E, hidden, inner)}
    pieces = {name: moe.key_map("", hidden)[(name,)][0] for name in shapes}
    got = {name: np.empty(shape, np.int64) for name, shape in shapes.items()}
    for name, piece in pieces.items():
        fill(piece, got[name], lambda source, _place: tensors[source])
    for half in range(2):
        for e in range(E):
            np.testing.assert_array_equal(got["gate_up"][e, half], tensors["experts.gate_up_proj"][e, :, half::2].T)
        np.testing.assert_array_equal(got["gate_up_bias"][:, half], tensors["experts.gate_up_proj_bias"][:, half::2])
    np.testing.assert_array_equal(got["down"], tensors["experts.down_proj"].swapaxes(1, 2))


def test_yarn_that_is_not_truncated():
    """gpt-oss's band ends between two dimensions; rounded to whole ones it gives other frequencies."""
    config = read_config(CONFIGS["gpt-oss"]).layers[0].attention.rope
    assert config is not None
    assert not config.truncate
    inverse, factor = rope_frequencies(config)
    d, turns = config.dim, lambda n: config.dim * np.log(64 / (n * 2 * np.pi)) / (2 * np.log(config.theta))
    low, high = max(turns(32), 0), min(turns(1), d - 1)
    ramp = ((np.arange(d // 2) - low) / (high - low)).clip(0, 1)
    plain = config.theta ** (-np.arange(0, d, 2) / d)
    np.testing.assert_allclose(inverse, plain * (1 - ramp) + plain / 8 * ramp, rtol=1e-5)
    assert factor == pytest.approx(0.1 * np.log(8) + 1)
