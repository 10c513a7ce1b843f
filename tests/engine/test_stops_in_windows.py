"""What ends an output inside the window of accepted drafts: the first stop wins and cuts everything alike."""

import numpy as np
import pytest

from jaxspec.engine.request import Request
from jaxspec.sampling.params import SamplingParams
from tests.drafts import is_right
from tests.engine import scripted
from tests.engine.scripted import (
    NEW_TOKENS,
    engine_over,
    greedy_requests,
    pattern_runner,
    plain_run,
    with_pattern,
)
from tests.engine.tiny import SETTINGS, VOCAB, run
from tests.host_rules import StopAfter

K = 3


def fresh_tokens(ids, position, k):
    """(request, index): output tokens at a position of their windows, of an id that is new in its text there."""
    return next(
        (key, i)
        for key, text in ids.items()
        for i in range(1, NEW_TOKENS)
        if (i - 1) % (k + 1) == position and text[i] not in text[:i]
    )


def check_stop(runner, request, want_ids, want_logprobs, reason, position, *, eos=(), limited=False):
    engine = engine_over(runner, eos=eos)
    engine.add(request)
    ids, logprobs = [], []
    while engine.has_work:
        for out in engine.step():
            ids += out.new_ids
            logprobs += out.new_logprobs
            last = out
    assert ids == want_ids == request.tokens[request.prompt_len :]
    np.testing.assert_allclose(logprobs, want_logprobs, atol=1e-4)
    assert last.finish_reason == reason
    assert len(last.new_ids) - 1 == position
    stats = engine.stats()
    assert stats.generation_tokens == len(ids)
    # The cut was inside what was accepted: all drafts but, at the context limit, those that no text goes on with.
    unknown = [limited and i > position for i in range(runner.window - 1)]
    acceptance = stats.acceptance
    assert acceptance.accepted_per_position == tuple(acceptance.num_steps - missing for missing in unknown)
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.usable


@pytest.mark.parametrize(
    "k",
    [
        pytest.param(1, marks=pytest.mark.full),
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(7, marks=pytest.mark.full),
    ],
)
def test_stops_at_every_position_of_a_window(k):
    """End-of-text id, stop id, host rule, max_tokens and context limit, each at each position, all drafts accepted."""
    ids, logprobs, texts = plain_run()
    prompts = {r.id: r.prompt_ids for r in greedy_requests(VOCAB)}
    runner = pattern_runner(k)
    with with_pattern(runner, texts):
        for position in range(k + 1):
            key, i = fresh_tokens(ids, position, k)
            token, base = ids[key][i], {"temperature": 0, "max_tokens": NEW_TOKENS}
            want = ids[key][: i + 1], logprobs[key][: i + 1]
            for options, rule, eos, reason in (
                ({}, None, (token,), "stop"),
                ({"stop_token_ids": (token,)}, None, (), "stop"),
                ({}, StopAfter(i + 1), (), "stop"),
                ({"max_tokens": i + 1}, None, (), "length"),
            ):
                request = Request("r", prompts[key], SamplingParams(**base | options), rule=rule)
                check_stop(runner, request, *want, reason, position, eos=eos)
    long, long_logprobs = long_text()
    limit = SETTINGS.max_model_len
    with with_pattern(runner, [long]):
        for position in range(k + 1):
            start = limit - 2 - position - 3 * (k + 1)  # a token of the prompt's step, three windows, and the last one
            request = Request("r", long[:start], SamplingParams(temperature=0, max_tokens=None))
            check_stop(runner, request, long[start:], long_logprobs[start - limit :], "length", position, limited=True)


def long_text():
    """A greedy text up to the context limit, and the log-probabilities of its last tokens."""
    prompt = np.random.default_rng(5).integers(6, VOCAB, 460).tolist()
    request = Request("long", prompt, SamplingParams(temperature=0, max_tokens=None))
    ids, logprobs, _ = run(engine_over(scripted.plain_runner(), eos=()), [request])
    return prompt + ids["long"], logprobs["long"]


@pytest.mark.slow
def test_the_earliest_of_several_stops_wins():
    """Random stop ids, end-of-text id, host rule and max_tokens at once, against a scan of the text from the left."""
    ids, _, texts = plain_run()
    runner = pattern_runner(K)
    rng = np.random.default_rng(0)
    reasons = set()
    with with_pattern(runner, texts, seed=3):
        for _ in range(6):
            eos = int(rng.choice(ids["g0"]))
            batch, want = [], {}
            for r in greedy_requests(VOCAB):
                stops = [int(t) for t in rng.choice(ids[r.id][10:], 2)]
                most, rule = int(rng.integers(5, NEW_TOKENS)), int(rng.integers(5, NEW_TOKENS))
                params = SamplingParams(temperature=0, max_tokens=most, stop_token_ids=stops)
                batch.append(Request(r.id, r.prompt_ids, params, rule=StopAfter(rule)))
                by_id = next((i for i, t in enumerate(ids[r.id], 1) if t in (eos, *stops)), NEW_TOKENS + 1)
                end = min(by_id, most, rule)
                want[r.id] = (ids[r.id][:end], "stop" if end in (by_id, rule) else "length")
                reasons.add((end == by_id, end == most, end == rule))
            got, _, ends = run(engine_over(runner, eos=(eos,)), batch)
            assert {key: (got[key], ends[key][0]) for key in got} == want
    assert {(True, False, False), (False, True, False), (False, False, True)} <= reasons


@pytest.mark.slow
def test_eos_list_stops_on_each():
    """Three end-of-text ids, as GLM's models have: each is the end of some text."""
    ids, _, texts = plain_run()
    runner, rng, ends = pattern_runner(K), np.random.default_rng(2), set()
    while len(ends) < 3:
        eos = [int(token) for token in rng.choice(np.concatenate(list(ids.values())), 3)]
        cut = {key: next((i + 1 for i, t in enumerate(text) if t in eos), None) for key, text in ids.items()}
        ends = {ids[key][i - 1] for key, i in cut.items() if i}
    with with_pattern(runner, texts, seed=3):
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
        batch = [Request(r.id, r.prompt_ids, params) for r in greedy_requests(VOCAB)]
        got, _, reasons = run(engine_over(runner, eos=eos), batch)
    assert got == {key: ids[key][:i] for key, i in cut.items()}
    assert {key: reason for key, (reason, _) in reasons.items()} == {
        k: "stop" if i else "length" for k, i in cut.items()
    }


@pytest.mark.slow
def test_a_rejected_end_of_text_ends_nothing():
    """The end-of-text id is one that drafts propose wrongly and no text holds."""
    ids, _, texts = plain_run()
    runner, seed = pattern_runner(K), 5
    held = {t for text in texts for t in text}
    wrong = [
        (text[p] + 1) % VOCAB
        for row, text in enumerate(texts)
        for p in range(len(text) - 16 - NEW_TOKENS + 2, len(text) - 20)
        if not is_right(seed, row, p, 200) and (text[p] + 1) % VOCAB not in held
    ]
    eos = max(set(wrong), key=wrong.count)
    proposed = 0

    def look(_step):
        nonlocal proposed
        proposed += int((np.asarray(runner.state.drafts)[1:] == eos).sum())

    with with_pattern(runner, texts, seed=seed):
        batch = [
            Request(r.id, r.prompt_ids, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
            for r in greedy_requests(VOCAB)
        ]
        got, _, ends = run(engine_over(runner, eos=(eos,), observer=look), batch)
    assert proposed > 0
    assert got == ids
    assert {reason for reason, _ in ends.values()} == {"length"}
