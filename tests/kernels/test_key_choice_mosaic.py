"""The Mosaic GPU kernel of key_choice, interpreted on the CPU with race detection, and lowered for cuda."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, UnsupportedError, use
from pallas_kernels.key_choice import mosaic, reference
from pallas_kernels.key_choice.api import choose_keys
from pallas_kernels.key_choice.largest import largest
from pallas_kernels.key_choice.shapes import COUNT, HEAD_DIM, HEADS
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import paged_pool

LENGTHS = (70, 500, 1, 333)


@interpreted
@pytest.mark.parametrize(("heads", "sms"), [(64, 2), (32, 4)])
def test_interpreted_without_races(heads, sms):
    """Contexts in one item and in several, more pages than stages, a token that sees nothing; NaN in what nobody owns."""
    rng = np.random.default_rng(0)
    pool, tables = paged_pool(rng, LENGTHS, HEAD_DIM)
    keys = jnp.asarray(pool, jnp.bfloat16)
    rows, bounds = np.array([0, 1, 1, 2, 3, 3], np.int32), np.array([70, 500, 499, 1, 333, 0], np.int32)
    q = jnp.asarray(rng.standard_normal((len(rows), heads, HEAD_DIM)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((len(rows), heads)), jnp.float32)
    got = mosaic.scores(q, weights, keys, tables[rows], bounds, sms=sms, interpret=detect_races())
    assert_no_races(got)
    for t, (row, bound) in enumerate(zip(rows, bounds, strict=True)):
        mine = np.asarray(keys, np.float64)[tables[row]].reshape(-1, HEAD_DIM)[:bound]
        want = (np.maximum(np.asarray(q[t], np.float64) @ mine.T, 0) * np.asarray(weights)[t][:, None]).sum(axis=0)
        np.testing.assert_allclose(got[t, :bound], want, atol=2e-3)
    places = largest(got, bounds, 64)
    want = reference.choose_keys(*(a.astype(jnp.float32) for a in (q, weights, keys)), tables, rows, bounds, count=64)
    same = [len(set(a.tolist()) ^ set(b.tolist())) for a, b in zip(places, want, strict=True)]
    assert max(same) <= 2  # rounding moves what is next to the border


def hopper(monkeypatch):
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H200", core_count=132)
    monkeypatch.setattr(jax, "devices", lambda: [device])


def arguments(tokens, heads, width=HEAD_DIM, page=64):
    struct = jax.ShapeDtypeStruct
    each = struct((tokens,), jnp.int32)
    q, keys = struct((tokens, heads, width), jnp.bfloat16), struct((99, page, width), jnp.bfloat16)
    return q, struct((tokens, heads), jnp.float32), keys, struct((4, 512), jnp.int32), each, each


@pytest.mark.parametrize(("tokens", "heads", "loops"), [(32, 64, 0), (1, 32, 0), (200, 64, 1)])
def test_lowers_for_cuda(monkeypatch, tokens, heads, loops):
    """A decode step has neither a loop nor a sort, and no call but the kernel: it can be a part of a CUDA graph."""
    hopper(monkeypatch)
    assert heads in HEADS.values()
    mosaic.scores.clear_cache()
    with use(Backends()) as ran:
        traced = jax.jit(functools.partial(choose_keys, count=COUNT)).trace(*arguments(tokens, heads))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ran == {"key_choice": {"mosaic"}}
    assert text.count("custom_call") == text.count("@mosaic_gpu_v2(") == 1
    assert (text.count("stablehlo.while"), text.count("stablehlo.sort")) == (loops, 0)


def test_what_it_does_not_support(monkeypatch):
    with use(Backends(attention="mosaic")), pytest.raises(UnsupportedError, match=r"needs an NVIDIA GPU.*'reference'"):
        jax.eval_shape(functools.partial(choose_keys, count=8), *arguments(1, 64))
    hopper(monkeypatch)

    def reason(*sizes):
        q, _, keys, *_ = arguments(1, *sizes)
        return mosaic.unsupported_reason(q, keys)

    assert reason(64) is None
    assert reason(16) == "it supports 32 or 64 heads of 128, not 16 of 128"
    assert reason(64, 64) == "it supports 32 or 64 heads of 128, not 64 of 64"
    assert reason(64, 128, 16) == "it supports pages of 64 tokens, not 16"
