"""`RequestOutput` is complete, for every way in which a request ends: a front end needs no other source."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.engine.engine import Engine
from jaxspec.engine.output import FinishReason, RequestOutput
from jaxspec.engine.request import Request
from jaxspec.errors import InvalidRequestError
from jaxspec.sampling.params import SamplingParams
from jaxspec.text import text_stream
from tests.engine.mock_runner import MockRunner
from tests.engine.test_scheduler import CONTEXT, PAGE, SETTINGS
from tests.host_rules import StopAfter
from tests.serve.mock_engine import byte_tokenizer, taken

TOKENIZER = byte_tokenizer()
VOCAB = 256  # all ids are bytes
PROMPT = [72, 73]


def make_engine(k: int = 3, *, depth: int = 0, eos: Sequence[int] = (), **changes) -> Engine:
    fields = {"max_model_len": CONTEXT, "page_size": PAGE, "num_speculative_tokens": k, "readout_depth": depth}
    return Engine(
        MockRunner(dataclasses.replace(SETTINGS, **fields | changes), VOCAB), vocab_size=VOCAB, eos_token_ids=eos
    )


def make_request(prompt: Sequence[int] = PROMPT, name: str = "r", **params) -> Request:
    asked = SamplingParams(**{"max_tokens": 30, "seed": 1, "logprobs": 2} | params)
    return Request(name, prompt, asked, text_stream(TOKENIZER, prompt, asked))


def run(engine: Engine, *requests: Request, before_step: Callable[[int], None] = lambda _step: None):
    """All outputs of each request, by its id; nothing but the engine reads the requests."""
    outputs: dict[str, list[RequestOutput]] = {r.id: [] for r in requests}
    engine.add(*map(taken, requests))
    for step in itertools.count():
        if not engine.has_work:
            return outputs
        before_step(step)
        made = engine.step()
        assert len({o.request_id for o in made}) == len(made), "two outputs of one request in a step"
        for output in made:
            outputs[output.request_id].append(output)


def check(outputs: list[RequestOutput], *, k: int, prompt: Sequence[int] = PROMPT, alternatives: int = 2):
    """What holds of every request, whatever ended it; returns ids, text and the last output."""
    *earlier, last = outputs
    assert all(o.finish_reason is None and o.stats is None and o.error is None for o in earlier)
    assert last.finish_reason is not None
    assert (last.error is not None) == (last.finish_reason is FinishReason.ERROR)
    ids = [i for o in outputs for i in o.new_ids]
    for o in outputs:
        assert len(o.new_ids) == len(o.new_logprobs) == len(o.new_alternatives) == len(o.new_text_offsets)
        assert o.new_logprobs == tuple(-float(i) for i in o.new_ids)
        assert o.new_alternatives == tuple(((i, -float(i)),) * alternatives for i in o.new_ids)
        assert 0 <= o.num_accepted <= min(k, len(o.new_ids))
    stats = last.stats
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (len(prompt), len(ids))
    assert {o.num_cached_tokens for o in outputs if o.first_scheduled_time} <= {stats.num_cached_tokens}
    assert [o.time for o in outputs] == sorted(o.time for o in outputs)
    assert stats.end_time == last.time >= stats.arrival_time
    assert {o.first_scheduled_time for o in outputs} == {stats.first_scheduled_time}
    first_token = next((o.time for o in outputs if o.new_ids), None)
    assert stats.first_token_time == first_token
    if first_token is not None:
        assert stats.arrival_time <= stats.first_scheduled_time <= first_token
    assert stats.preempted_seconds >= 0
    if k:
        accepted = sum(o.num_accepted for o in outputs)
        assert accepted <= stats.acceptance.num_accepted <= accepted + k
        assert stats.acceptance.num_drafted == k * stats.acceptance.num_steps
    else:
        assert stats.acceptance is None
    offsets = [offset for o in outputs for offset in o.new_text_offsets]
    assert offsets == sorted(offsets)
    return ids, "".join(o.new_text for o in outputs), last


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("depth", [0, 2])
def test_every_way_to_end(k, depth):
    want, text, last = check(run(make_engine(k, depth=depth), make_request())["r"], k=k)
    assert (last.finish_reason, len(want), text) == (FinishReason.LENGTH, 30, TOKENIZER.decode(want))

    for end in (1, 7, 8, 9, 20):
        token = want[end]
        cut = want[: want.index(token) + 1]
        stopped = run(make_engine(k, depth=depth), make_request(stop_token_ids=(token,)))["r"]
        ids, text, last = check(stopped, k=k)
        # The id that ended the output is one of its ids, but no part of its text.
        assert (ids, last.finish_reason, text) == (cut, FinishReason.STOP, TOKENIZER.decode(cut[:-1]))
        ended = run(make_engine(k, depth=depth, eos=(token,)), make_request())["r"]
        assert check(ended, k=k)[:2] == (cut, text)

    context = make_request([5] * (CONTEXT - 12), max_tokens=None)
    ids, _, last = check(run(make_engine(k, depth=depth), context)["r"], k=k, prompt=[5] * (CONTEXT - 12))
    assert (len(ids), last.finish_reason) == (12, FinishReason.LENGTH)


@settings(max_examples=60, deadline=None)
@given(k=st.integers(0, 7), depth=st.integers(0, 3), seed=st.integers(0, 20), start=st.integers(1, 40))
def test_a_stop_string_inside_a_window(k, depth, seed, start):
    """Text, ids, log-probabilities and offsets end alike; the pieces are the text of the whole up to the stop string."""
    params = {"max_tokens": 60, "seed": seed, "skip_special_tokens": False}
    want, whole, _ = check(run(make_engine(k, depth=depth), make_request(**params))["r"], k=k)
    assert whole == TOKENIZER.decode(want)
    stop = whole[start : start + 2]
    if not stop:
        return
    ids, text, last = check(run(make_engine(k, depth=depth), make_request(**params, stop=(stop,)))["r"], k=k)
    assert last.finish_reason is FinishReason.STOP
    assert text == whole[: whole.index(stop)]
    assert ids == want[: len(ids)]
    assert stop in TOKENIZER.decode(ids)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("step", [0, 1, 6])
def test_aborted(k, step):
    engine = make_engine(k, max_num_seqs=1)

    def abort(now: int) -> None:
        if now == step:
            engine.abort("r")
            engine.abort("waiting")

    outputs = run(engine, make_request(), make_request(name="waiting"), before_step=abort)
    want, _, _ = check(run(make_engine(k), make_request())["r"], k=k)
    ids, text, last = check(outputs["r"], k=k)
    assert (last.finish_reason, ids) == (FinishReason.ABORT, want[: len(ids)])
    assert bool(ids) == (step > 0)
    assert TOKENIZER.decode(ids).startswith(text)
    (last,) = outputs["waiting"]
    check([last], k=k)
    assert (last.finish_reason, last.stats.first_scheduled_time) == (FinishReason.ABORT, None)


@pytest.mark.parametrize("k", [0, 3])
def test_failed(k):
    engine = make_engine(k)

    def fail(step: int) -> None:
        engine.runner.nan_in = "r" if step == 3 else None

    outputs = run(engine, make_request(), make_request(name="other"), before_step=fail)
    ids, _, last = check(outputs["r"], k=k)
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the model produced NaN for this request")
    assert ids
    assert check(outputs["other"], k=k)[2].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_and_resumed(k, depth):
    """A pool for one whole request: the other is preempted, and its outputs are as if it had not been."""
    params = {"max_tokens": 60, "seed": 1}
    want, text, _ = check(run(make_engine(k), make_request(**params))["r"], k=k)
    engine = make_engine(k, depth=depth, num_pages=14)
    outputs = run(engine, make_request(**params), make_request(name="other", **params))
    ends = [check(outputs[name], k=k) for name in ("r", "other")]
    assert all((ids, found) == (want, text) for ids, found, _ in ends)
    stats = [last.stats for _, _, last in ends]
    assert sum(s.num_preemptions for s in stats) == engine.stats().num_preemptions > 0
    for each in stats:
        assert (each.preempted_seconds > 0) == (each.num_preemptions > 0)
        assert each.preempted_seconds < each.end_time - each.first_token_time


def test_the_first_output_tells_that_a_request_is_scheduled():
    """A prompt of several chunks: one output without ids at its first step, the next with the first token."""
    engine = make_engine(max_num_batched_tokens=20)
    prompt = [7] * 70
    first, second, *_ = outputs = run(engine, make_request(prompt, max_tokens=20))["r"]
    check(outputs, k=3, prompt=prompt)
    assert (first.new_ids, second.num_accepted, len(second.new_ids)) == ((), 0, 1)
    assert first.first_scheduled_time is not None
    again = run(engine, make_request(prompt, max_tokens=20))["r"]
    assert check(again, k=3, prompt=prompt)[2].stats.num_cached_tokens == again[0].num_cached_tokens == 64


def test_without_a_text_rule_there_is_no_text():
    params = SamplingParams(max_tokens=9, seed=1)
    for rule in (None, StopAfter(4)):
        outputs = run(make_engine(), Request("r", PROMPT, params, rule))["r"]
        assert all((o.new_text, o.new_text_offsets, o.new_alternatives) == ("", (), ()) for o in outputs)
        assert sum(len(o.new_ids) for o in outputs) == (4 if rule else 9)


def test_a_rule_is_fed_each_id_once_until_the_output_has_ended():
    want = check(run(make_engine(), make_request())["r"], k=3)[0]
    for needs_readback in (False, True):
        rule = StopAfter(10, needs_readback=needs_readback)
        params = SamplingParams(max_tokens=30, seed=1)
        outputs = run(make_engine(depth=2), Request("r", PROMPT, params, rule))["r"]
        assert [i for o in outputs for i in o.new_ids] == want[:10]
        assert rule.fed[:10] == want[:10]
        assert len(rule.fed) <= 13  # no window after the one that ended it


def test_outputs_are_frozen():
    (output, *_) = run(make_engine(), make_request())["r"]
    with pytest.raises(AttributeError):
        output.new_ids = ()  # type: ignore[misc]


@pytest.mark.parametrize("bad", [[], [VOCAB], [1] * CONTEXT])
def test_all_requests_are_added_or_none(bad):
    engine = make_engine()
    with pytest.raises(InvalidRequestError):
        engine.add(make_request(), make_request(bad, name="bad"))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add(make_request(), make_request())
    assert not engine.has_work
    assert engine.stats().prompt_tokens == 0


def test_a_request_is_validated_once():
    """Validation walks over all of a prompt, so it is not repeated."""
    walks = []

    class Prompt(list):
        def __iter__(self):
            walks.append(1)
            return super().__iter__()

    request = make_request()
    request.tokens = Prompt(PROMPT)
    make_engine().add(request)
    assert len(walks) == 1
