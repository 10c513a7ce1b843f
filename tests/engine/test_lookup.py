"""Drafts that are looked up in a request's own text: what is found, where the text comes from, and whose q is used.

That no text changes is shown beside all other drafts, in test_schedules.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config import Lookup
from jaxspec.engine.lookup import HISTORY, look_up
from jaxspec.engine.request import Request
from jaxspec.models.cache import page_bytes
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.rejection import verify
from jaxspec.sampling.sampler import SamplingRows
from tests.engine.scripted import engine_over, lookup_runner
from tests.engine.test_masks import requests
from tests.engine.tiny import VOCAB, run

ROWS, LENGTH, K = 4, 40, 5
RULES = (Lookup(1, 4), Lookup(2, 3), Lookup(3, 3), Lookup(1, 24, per_token=1.0))


def found_by_hand(text, k, lookup):
    """The definition: of all earlier places, the longest equal end, of several the latest; and the text from there on."""
    best, at = 0, 0
    for place in range(len(text) - 1):
        length = 0
        while length < lookup.most and length <= place and text[place - length] == text[-1 - length]:
            length += 1
        if length >= max(best, lookup.least):
            best, at = length, place
    if not best:
        return None
    grown = list(text)
    for i in range(k):
        grown.append(grown[at + 1 + i])
    return grown[len(text) :][: k if lookup.per_token is None else min(k, int(lookup.per_token * best))]


@functools.cache
def compiled(lookup):
    return jax.jit(functools.partial(look_up, k=K, lookup=lookup))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    texts=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=LENGTH) | st.just([0] * LENGTH), min_size=ROWS, max_size=ROWS
    ),
    rule=st.sampled_from(RULES),
    beyond=st.integers(0, 3),
)
def test_what_is_found_is_the_definition(texts, rule, beyond):
    """Few ids, so that ends recur; what lies behind the newest token is of former requests and counts for nothing."""
    rows = np.full((ROWS, LENGTH), beyond, np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    newest = np.array([len(text) - 1 for text in texts], np.int32)
    got = compiled(rule)(rows, newest)
    for text, ids, count in zip(texts, np.asarray(got.ids), np.asarray(got.number), strict=True):
        assert ids[:count].tolist() == (found_by_hand(text, K, rule) or [])
        assert set(ids.tolist()) <= {*text, beyond}  # ids that do not count are legal too


def repeating_requests(**params):
    """Prompts of two pages, the first of which is the same and holds most of the second; output goes on to the third."""
    rng = np.random.default_rng(3)
    made = []
    text = rng.integers(6, 30, 70).tolist()
    for i in range(4):
        own = rng.integers(6, VOCAB, 10).tolist()
        made.append(Request(f"l{i}", [*text, *own, *text[:32], *own[:4]], SamplingParams(max_tokens=24, **params)))
    return made


def histograms(engine, requests):
    ids, _, _ = run(engine, requests)
    return ids, [(request.windows, request.drafted) for request in requests]


@pytest.mark.long
@pytest.mark.parametrize("model", [False, True])
def test_the_text_of_cached_pages_and_of_preempted_requests_is_there(model):
    """Pages bring their ids with them: every window verifies what it does when each token has passed through a step."""
    runner = lookup_runner(3, model=model)
    params = {"temperature": 0.0, "ignore_eos": True}
    engine = engine_over(runner)
    want = histograms(engine, repeating_requests(**params))
    assert sum(drafted for _, drafted in want[1]) > 0
    again = repeating_requests(**params)
    assert histograms(engine, again) == want
    assert all(request.num_cached_tokens >= 64 for request in again)
    engine = engine_over(runner)
    engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - 7)
    assert histograms(engine, repeating_requests(**params)) == want
    assert engine.stats().num_preemptions > 0


@pytest.mark.slow
def test_slots_hold_drafts_again_in_the_same_place():
    """As steps are timed that verify them: with an array elsewhere a recorded graph would be changed in every one."""
    runner = lookup_runner(3)
    place = runner.state.held.unsafe_buffer_pointer()
    for drafts in (3, 2, 0):
        runner.hold(drafts)
        assert (np.asarray(runner.state.held) == drafts).all()
    assert runner.state.held.unsafe_buffer_pointer() == place


@pytest.mark.slow
def test_a_row_uses_the_text_where_it_finds_something_and_else_the_model():
    """In each step: drafts, how many, and of which kind, as the host finds them in the request's tokens."""
    runner = lookup_runner(3, model=True)
    kinds, seen = {True: 0, False: 0}, []

    def look(step):
        state = runner.state
        for row, request in enumerate(step.plan.requests):
            seen.append((request, row, step, bool(state.looked_up[request.slot]), int(state.held[request.slot])))

    engine = engine_over(runner, observer=look)
    for request in repeating_requests(temperature=1.0, seed=1, ignore_eos=True):
        engine.add(request)
    while engine.has_work:
        seen.clear()
        engine.step()
        for request, row, step, looked_up, held in seen:
            if not request.slot or (row < len(step.plan.prefill) and not step.plan.prefill[row].final):
                continue
            by_hand = found_by_hand(request.tokens, 3, runner.settings.lookup)
            assert looked_up == (by_hand is not None)
            assert held == 3
            if by_hand:
                assert step.drafts[row].tolist() == by_hand
            kinds[looked_up] += 1
    assert min(kinds.values()) > 5


@pytest.mark.full
def test_rules_hold_with_drafts_from_the_text():
    """Masks at each position of a window, and every other parameter: the text is that of requests without drafts."""
    engine = engine_over(lookup_runner(3, full=True))
    options = {"repetition_penalty": 1.1, "min_tokens": 3, "logit_bias": {9: 1.0}}
    want, _, _ = run(engine, list(requests(num_speculative_tokens=0, **options)))
    drafting = list(requests(**options))
    got, _, _ = run(engine, drafting)
    assert got == want
    assert sum(request.drafted for request in drafting if request.rule) > 0


def test_a_text_costs_no_kv():
    """Where nothing but the text drafts, there is no draft's KV and no q; the text takes four bytes a token."""
    runner = lookup_runner(3, model=False)
    state = runner.state
    assert state.draft_kv == state.draft_logits == state.draft_log_z == state.looked_up == ()
    (ids,) = state.history
    assert ids.nbytes == page_bytes([HISTORY], runner.settings.page_size, {}) * runner.settings.num_pages


# --- losslessness ---


@pytest.mark.long
def test_a_looked_up_draft_is_accepted_as_often_as_the_target_says_it():
    """A point mass without a stored q: the token after the context follows p, whatever was proposed."""
    V, D, k = 8, 4000, 2
    rng = np.random.default_rng(0)
    logits = np.broadcast_to(rng.standard_normal((k + 1, V)).astype(np.float32) * 1.5, (D, k + 1, V))
    drafts = np.broadcast_to(np.array([logits[0, 0].argmax(), 3], np.int32), (D, k))
    rows = SamplingRows(
        temperature=jnp.ones(D), top_p=jnp.ones(D), min_p=jnp.zeros(D), top_k=jnp.zeros(D, jnp.int32),
        seeds=jnp.asarray(rng.integers(0, 2**32, (D, 2), np.uint32)), greedy_drafts=jnp.zeros(D, bool),
        seeded=jnp.zeros(D, bool),
    )  # fmt: skip
    held = jnp.full(D, k).at[: D // 4].set(0)  # nothing was found: plain sampling
    got = verify(logits, drafts, None, jnp.zeros(D, bool), held, rows, jnp.full(D, 7), full=False)
    assert not np.asarray(got.accepted[: D // 4]).any()
    p = np.exp(logits[0] - np.logaddexp.reduce(logits[0], axis=1, keepdims=True))
    first = np.bincount(np.asarray(got.ids[:, 0]), minlength=V) / D
    np.testing.assert_allclose(first, p[0], atol=4 * np.sqrt(0.25 / D))
    on = np.asarray(got.accepted) > 0
    assert abs(on[D // 4 :].mean() - p[0].max()) < 4 * np.sqrt(0.25 / D)
    second = np.bincount(np.asarray(got.ids)[on, 1], minlength=V) / on.sum()
    np.testing.assert_allclose(second, p[1], atol=4 * np.sqrt(0.25 / on.sum()))
