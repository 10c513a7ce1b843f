"""The real step on a tiny model: whatever shares the batch, a request's tokens are those of its solo run."""

import contextlib

import jax
import numpy as np
import pytest

from jaxspec.compat import compiles
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.sampling.params import SamplingParams
from tests.engine.tiny import EOS, VOCAB, fill_cache, make_engine, run

LENGTHS = (3, 70, 64, 100, 10, 33, 129, 1, 65, 7)


def requests(**options):
    """Ten requests of many kinds: greedy and random, top-k and top-p, one chunk and several."""
    rng = np.random.default_rng(0)
    out = []
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(
            max_tokens=80,
            temperature=(0.0, 0.8, 1.2)[i % 3],
            top_k=(0, 20)[i % 2],
            top_p=(1.0, 0.9)[i // 2 % 2],
            seed=i,
            **options,
        )
        out.append(Request(f"r{i}", rng.integers(6, VOCAB - 10, length).tolist(), params))
    return out


@pytest.fixture(scope="module")
def solo():
    """Each request alone in a clean pool."""
    ids, logprobs = {}, {}
    for request in requests():
        one_ids, one_logprobs, _ = run(make_engine(), [request])
        ids |= one_ids
        logprobs |= one_logprobs
    return ids, logprobs


def assert_equal_runs(got, want):
    assert got[0] == want[0]
    for key, values in want[1].items():
        np.testing.assert_allclose(got[1][key], values, atol=1e-4)


@pytest.mark.slow
def test_batched_equals_solo(solo):
    assert_equal_runs(run(make_engine(), requests()), solo)


def test_preemption_changes_nothing(solo):
    engine = make_engine(usable_pages=9)
    assert_equal_runs(run(engine, requests()), solo)
    assert engine.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_what_free_and_padding_pages_hold_does_not_matter(solo, poison):
    engine = make_engine()
    fill_cache(engine.runner, poison)
    assert_equal_runs(run(engine, requests()), solo)


def test_stop_ids_and_eos(solo):
    """The output ends with the first stop; ignore_eos goes on as if it were any token."""
    reference, _ = solo
    key = max(reference, key=lambda k: len(set(reference[k])))
    stop = reference[key][7]
    first = reference[key].index(stop)
    (request,) = [r for r in requests(stop_token_ids=(stop,)) if r.id == key]
    ids, _, ends = run(make_engine(), [request])
    assert ids[key] == reference[key][: first + 1]
    assert ends[key][0] == "stop"
    # A stop id alone also ends the run on the device: the slot's row is done.
    assert bool(make_engine().runner.state.done[1:].any())
    ended_by_eos = [k for k, v in reference.items() if v[-1] == EOS and len(v) < 80]
    for k in ended_by_eos:
        (request,) = [r for r in requests(ignore_eos=True) if r.id == k]
        longer, _, ends = run(make_engine(), [request])
        assert longer[k][: len(reference[k])] == reference[k]
        assert ends[k][0] == "length"


def test_max_tokens_and_context_limit():
    prompt = list(range(6, 16))
    for max_tokens, count in ((1, 1), (None, 502)):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        ids, logprobs, ends = run(make_engine(), [Request("r", prompt, params)])
        assert len(ids["r"]) == len(logprobs["r"]) == count
        assert ends["r"] == ("length", None)


@contextlib.contextmanager
def poisoned(runner: Runner, token: int):
    """The embedding of one token is NaN."""
    embed = runner.params[0]["embed"]["weight"]
    clean = embed.get_value()
    embed.set_value(clean.at[token].set(np.nan))
    runner.use_params(runner.params)
    try:
        yield
    finally:
        embed.set_value(clean)
        runner.use_params(runner.params)


def test_a_nan_row_ends_its_own_request_only(solo):
    """A token whose embedding is NaN poisons its request; its neighbours and later users of its pages see nothing."""
    engine = make_engine()
    used = {t for r in requests() for t in r.prompt_ids} | {t for ids in solo[0].values() for t in ids}
    unused = next(t for t in range(VOCAB) if t not in used)
    with poisoned(engine.runner, unused):
        bad = Request("bad", [9, unused, 9], SamplingParams(max_tokens=8))
        ids, logprobs, ends = run(engine, [bad, *requests()])
        assert ends["bad"][0] == "error"
        assert "NaN" in ends["bad"][1]
        assert ids.pop("bad") == []
        logprobs.pop("bad")
        assert_equal_runs((ids, logprobs), solo)


def test_pages_that_hold_nan_are_not_shared():
    def request() -> Request:
        return Request("again", [9, 8, *range(10, 150)], SamplingParams(max_tokens=5, temperature=0))

    want = run(make_engine(), [request()])
    engine = make_engine()
    with poisoned(engine.runner, 8):
        assert run(engine, [request()])[2]["again"][0] == "error"
    assert_equal_runs(run(engine, [request()]), want)
    assert engine.stats().prefix_cache_queries > 0
    assert engine.stats().prefix_cache_hits == 0
    run(engine, [request()])  # those of the good one are
    assert engine.stats().prefix_cache_hits > 0


def test_nothing_compiles_after_warm_up(solo):  # noqa: ARG001 - the fixture warms helpers up
    engine = make_engine()
    before = compiles.total
    run(engine, requests())
    run(engine, requests()[:1])
    assert compiles.total == before


def test_state_is_donated():
    """A second live copy of the cache would halve the pool."""
    engine = make_engine()
    before = engine.runner.state
    engine.add(Request("r", [7, 8], SamplingParams(max_tokens=2)))
    engine.step()
    assert all(array.is_deleted() for array in jax.tree.leaves(before.kv))


def test_unseeded_requests_repeat_with_the_engines_seed():
    def one(seed):
        engine = make_engine(seed=seed)
        ids, _, _ = run(engine, [Request(f"r{i}", [7, 8], SamplingParams(max_tokens=20)) for i in range(2)])
        return ids

    first = one(1)
    assert first == one(1)
    assert first != one(2)
    assert first["r0"] != first["r1"]
