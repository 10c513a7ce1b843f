"""Speculation with the NextN layer inside the step: it never changes a greedy text, nor what a request's batch may do."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec.compat import compiles
from jaxspec.engine.request import Request
from jaxspec.sampling.params import SamplingParams
from tests.engine.test_engine import assert_equal_runs, requests
from tests.engine.tiny import VOCAB, fill_cache, make_engine, run, tiny_runner

K = 3


def greedy_requests(**options):
    rng = np.random.default_rng(0)
    lengths = (3, 70, 64, 100, 10, 33, 129, 1, 65, 7)
    options = {"max_tokens": 60, "temperature": 0, "ignore_eos": True} | options
    return [
        Request(f"g{i}", rng.integers(6, VOCAB, n).tolist(), SamplingParams(**options)) for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def plain():
    return run(make_engine(), greedy_requests())


def both_kinds():
    """Greedy and random requests, every other one without a seed: its drafts are verified by rejection sampling."""
    made = requests()
    for request in made[::2]:
        request.params = dataclasses.replace(request.params, seed=None)
    return made


@pytest.fixture(scope="module")
def solo():
    """`both_kinds`, each alone, with speculation. One engine, which draws the same seeds for them as for all at once."""
    ids, logprobs = {}, {}
    engine = make_engine(k=K)
    for request in both_kinds():
        engine.reset_prefix_cache()
        one_ids, one_logprobs, _ = run(engine, [request])
        ids |= one_ids
        logprobs |= one_logprobs
    return ids, logprobs


@pytest.mark.slow
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.full), K, pytest.param(7, marks=pytest.mark.full)])
def test_greedy_text_is_that_of_plain_decoding(plain, k):
    engine = make_engine(k=k)
    assert_equal_runs(run(engine, greedy_requests()), plain)
    assert engine.stats().acceptance.num_steps > 0


@pytest.mark.slow
def test_alone_and_over_poisoned_pages(plain):
    for request in greedy_requests()[:4]:
        engine = make_engine(k=K)
        fill_cache(engine.runner, np.nan)
        ids, _, _ = run(engine, [request])
        assert ids[request.id] == plain[0][request.id]


@pytest.mark.long
def test_random_requests_do_not_see_their_batch(solo):
    """Rejection sampling, mixed with greedy rows, prompts in chunks beside decode windows, pages full of NaN."""
    engine = make_engine(k=K)
    fill_cache(engine.runner, np.nan)
    assert_equal_runs(run(engine, both_kinds()), solo)


@pytest.mark.slow
def test_preemption_changes_nothing(solo):
    engine = make_engine(usable_pages=9, k=K)
    assert_equal_runs(run(engine, both_kinds()), solo)
    assert engine.stats().num_preemptions > 0


@pytest.mark.slow
def test_stops_inside_the_window_cut_it(plain):
    """A stop id, max_tokens and the context limit end the output at the same token as without speculation."""
    reference = plain[0]["g1"]
    (request,) = [r for r in greedy_requests(stop_token_ids=(reference[9],)) if r.id == "g1"]
    ids, logprobs, ends = run(make_engine(k=K), [request])
    assert ids["g1"] == reference[: reference.index(reference[9]) + 1]
    assert len(logprobs["g1"]) == len(ids["g1"])
    assert ends["g1"] == ("stop", None)
    for count in range(1, 9):
        (request,) = [r for r in greedy_requests(max_tokens=count) if r.id == "g1"]
        ids, _, ends = run(make_engine(k=K), [request])
        assert ids["g1"] == reference[:count]
        assert ends["g1"] == ("length", None)
    prompt = list(range(6, 110)) * 4
    long = [Request("r", prompt, SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)) for _ in range(2)]
    full, _, ends = run(make_engine(), long[:1])
    assert len(full["r"]) == 512 - len(prompt)
    assert run(make_engine(k=K), long[1:])[0] == full


@pytest.mark.full  # step by step, for every draft, in test_speculation_properties.py
def test_skipping_dead_rows_changes_nothing():
    """Same drafts, same text, same draft cache, with the catch-up attending for all rows or for live rows only."""
    states, results = [], []
    for skip_dead in (True, False):
        engine = make_engine(k=K, skip_dead=skip_dead)
        batch = requests()
        for request in batch:
            engine.add(request)
        results.append([[out.new_ids for out in engine.step()] for _ in range(30)])
        states.append(engine.runner.state)
        for request in batch:
            engine.abort(request.id)
    assert results[0] == results[1]
    np.testing.assert_array_equal(states[0].drafts[1:], states[1].drafts[1:])
    # Page 0 is the padding page: what lies there is nobody's.
    for one, other in zip(*(jax.tree.leaves(s.draft_kv) for s in states), strict=True):
        np.testing.assert_allclose(one[1:], other[1:], atol=1e-5)


@pytest.mark.long
def test_nothing_compiles_while_speculating():
    engine = make_engine(k=K)
    before = compiles.total
    run(engine, requests())
    assert compiles.total == before
    assert tiny_runner(K).state.draft_kv is not None
