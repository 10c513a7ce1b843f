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
from pallas_kernels.key_choice.places import TOGETHER, places
from pallas_kernels.key_choice.shapes import COUNT, HEAD_DIM, HEADS
from pallas_kernels.sampling.keys import float_of
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import paged_pool
from tests.kernels.score_cases import check_places
from tests.matrices import full

LENGTHS = (70, 500, 1, 333)


@interpreted
def test_interpreted_without_races():
    """Contexts in one item and in several, more pages than stages, a token that sees nothing; NaN in what nobody owns."""
    rng = np.random.default_rng(0)
    pool, tables = paged_pool(rng, LENGTHS, HEAD_DIM)
    keys = jnp.asarray(pool, jnp.bfloat16)
    rows, bounds = np.array([0, 1, 1, 2, 3, 3], np.int32), np.array([70, 500, 499, 1, 333, 0], np.int32)
    q = jnp.asarray(rng.standard_normal((len(rows), 64, HEAD_DIM)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((len(rows), 64)), jnp.float32)
    keys_of = mosaic.scores(q, weights, keys, tables[rows], bounds, sms=2, interpret=detect_races())
    assert_no_races(keys_of)
    got = float_of(keys_of)
    for t, (row, bound) in enumerate(zip(rows, bounds, strict=True)):
        mine = np.asarray(keys, np.float64)[tables[row]].reshape(-1, HEAD_DIM)[:bound]
        want = (np.maximum(np.asarray(q[t], np.float64) @ mine.T, 0) * np.asarray(weights)[t][:, None]).sum(axis=0)
        np.testing.assert_allclose(got[t, :bound], want, atol=2e-3)


@interpreted
def test_choices_of_the_kernels():
    """Those of plain XLA, over scores with ties, of which the border is one; rows with fewer keys than are chosen."""
    rng = np.random.default_rng(1)
    pool, tables = paged_pool(rng, LENGTHS, HEAD_DIM)
    keys = jnp.asarray(np.where(np.isnan(pool), np.nan, np.round(2 * pool)), jnp.bfloat16)
    rows, bounds = np.array([0, 1, 2, 3], np.int32), np.array([70, 500, 1, 0], np.int32)
    q = jnp.zeros((4, 32, HEAD_DIM), jnp.bfloat16).at[:, :2, 0].set(jnp.asarray([1, -1], jnp.bfloat16))
    weights = jnp.zeros((4, 32)).at[:, :2].set(jnp.asarray([1.0, -1.0]))
    arguments = q, weights, keys, tables, rows, bounds
    got = mosaic.choose_keys(*arguments, count=64, sms=2, interpret=detect_races())
    assert_no_races(got, kernels=2)
    np.testing.assert_array_equal(got, reference.choose_keys(*arguments, count=64))


@interpreted
@pytest.mark.parametrize("kind", ["normal", "few values", "one value", "wide"])
def test_places_of_the_largest(kind):
    """Rows that own more than what is looked at together, and as many as are chosen, more or less by one, none or all."""
    assert_no_races(check_places(8, 3 * TOGETHER, 100, kind, detect_races()))


def hopper(monkeypatch):
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H200", core_count=132)
    monkeypatch.setattr(jax, "devices", lambda: [device])


def arguments(tokens, heads, width=HEAD_DIM, page=64):
    struct = jax.ShapeDtypeStruct
    each = struct((tokens,), jnp.int32)
    q, keys = struct((tokens, heads, width), jnp.bfloat16), struct((99, page, width), jnp.bfloat16)
    return q, struct((tokens, heads), jnp.float32), keys, struct((4, 512), jnp.int32), each, each


SLOW = [pytest.param(*case, marks=pytest.mark.long) for case in ((256, 64, 0), (1100, 64, 1))]


@pytest.mark.parametrize(("tokens", "heads", "loops"), [*full((32, 64, 0)), (1, 32, 0), *SLOW])
def test_lowers_for_cuda(monkeypatch, tokens, heads, loops):
    """A decode step has neither a loop nor a sort, and no call but the kernels: it can be a part of a CUDA graph. Prompts
    loop."""
    hopper(monkeypatch)
    assert heads in HEADS.values()
    for jitted in (mosaic.choose_keys, mosaic.scores, places):
        jitted.clear_cache()
    with use(Backends()) as ran:
        traced = jax.jit(functools.partial(choose_keys, count=COUNT)).trace(*arguments(tokens, heads))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ran == {"key_choice": {"mosaic"}}
    assert text.count("custom_call") == text.count("@mosaic_gpu_v2(") == 2
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
