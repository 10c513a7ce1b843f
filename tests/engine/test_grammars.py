"""Real grammars in the real step, with every kind of draft: each request has the text of plain decoding, alone.

The faults that engines with grammars and speculation have had, and the tests that show their absence. Tests without a
file are in this one; files are under tests/.

  - a mask's row is not that of its logits in a mixed step
          test_every_text_is_that_of_plain_decoding
          engine/test_masks.py::test_mask_rows_follow_logits_in_mixed_steps
  - the mask of a row behind an illegal draft is a former request's
          test_grammar.py::test_rows_behind_illegal_draft_are_refilled
  - a chunk in the middle, or a request that resumes, advances the matcher
          engine/test_masks.py::test_forced_token_advances_once
  - the matcher advances past a stop inside an accepted window
          test_every_text_is_that_of_plain_decoding
          test_grammar.py::test_advance_ends_at_stop
  - a matcher that has ended allows anything but the end
          test_grammar.py::test_finished_matcher_allows_only_eos
  - min_tokens forbids the end where nothing else may come
          test_every_text_is_that_of_plain_decoding
          engine/test_masks.py::test_grammar_end_beats_min_tokens
  - ids behind the vocabulary are drawn
          test_grammar.py::test_padded_vocabulary_is_masked
  - text depends on the draft, or on when output is read
          test_every_text_is_that_of_plain_decoding
          test_texts_with_any_number_of_drafts_from_step_to_step
          test_structured.py::test_same_json_with_and_without_drafts
  - a thought ends inside a window
          test_every_text_is_that_of_plain_decoding
          test_thoughts.py::test_reasoning_boundary_in_window
  - a step chooses with the masks of the step before
          test_every_text_is_that_of_plain_decoding
          engine/test_masks.py::test_constrained_rows_get_a_token_in_every_step
  - masks compile something, or change log-probabilities
          engine/test_masks.py::test_masks_neither_recompile_nor_change_logprobs
  - one bad grammar harms other requests, or choices share a matcher
          serve/test_structured.py::test_bad_grammar_is_one_400
  - tags are cut by tokens or deltas
          serve/parsers/test_parsers.py::test_tool_deltas_concatenate_at_every_split
  - the distribution is not the target's over what the grammar allows
          test_the_distribution_is_the_targets_over_what_is_allowed
"""

import collections
import contextlib
import itertools
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.compat import compiles
from jaxspec.engine.mask_pace import MaskPace
from jaxspec.engine.request import Request
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.structured import StructuredOutputsParams
from serve.parsers.grammar import held_calls
from serve.parsers.json_calls import JsonCalls
from tests.engine.grammar_requests import (
    PIECES,
    THOUGHT_END,
    compiler,
    constrained,
    fits,
    grammar_requests,
    prompt_of,
    tokenizer,
)
from tests.engine.scripted import changing_runner, eagle3_runner, exchanged, target_params
from tests.engine.test_draft_counts import Forced
from tests.engine.test_schedules import make_engine, options
from tests.engine.test_transforms import Planter, plant, raw_logits
from tests.engine.tiny import EOS, VOCAB, cached, fill_cache, run, tiny_runner
from tests.sampling.rules_reference import softmax

K = 3
# Each runner, and whether its target is the one of tests/engine/tiny.py or that of tests/engine/scripted.py.
RUNNERS = {
    "plain": (lambda: tiny_runner(0), False),
    "plain, split steps": (lambda: tiny_runner(0, split=True), False),
    "nextn, k=1": (lambda: tiny_runner(1), False),
    "nextn, k=1, split steps": (lambda: tiny_runner(1, split=True), False),
    "nextn, k=3, split steps": (lambda: tiny_runner(3, split=True), False),
    "nextn, k=7, split steps": (lambda: tiny_runner(7, split=True), False),
    "eagle3 llama, k=1": (lambda: eagle3_runner("llama", 1, sampler="full"), True),
    "eagle3 llama, k=3, split steps": (lambda: eagle3_runner("llama", 3, sampler="full", split=True), True),
    "eagle3 llama, k=7, split steps": (lambda: eagle3_runner("llama", 7, sampler="full", split=True), True),
    "eagle3 mla, k=3, split steps": (lambda: eagle3_runner("mla", 3, sampler="full", split=True), True),
}
# Readout depth, mixed steps, usable pages: the longest request takes four.
EVERY = tuple(itertools.product(range(4), (True, False), (None, 4, 6)))
FEW = ((0, True, 6), (2, False, None))
CASES = [
    pytest.param("plain", FEW, marks=pytest.mark.long),
    pytest.param("nextn, k=3, split steps", (*FEW, (1, True, 6)), marks=pytest.mark.long),
    *(pytest.param(name, EVERY, marks=pytest.mark.full) for name in RUNNERS),
]


def test_the_table_names_tests_that_exist():
    tests = Path(__file__).parents[1]
    named = re.findall(r"^ {10}(?:(\S+\.py)::)?(test_\w+)", str(__doc__), re.MULTILINE)
    assert len(named) > 15
    for file, test in named:
        source = (tests / file if file else Path(__file__)).read_text()
        assert f"def {test}(" in source, f"{file}::{test}"


@cached
def solo(scripted):
    """What `alone` finds with one of the two targets."""
    runner = tiny_runner(0)
    with exchanged(runner, target=target_params("tiny")) if scripted else contextlib.nullcontext():
        return alone(runner)


def alone(runner):
    """(ids, log-probabilities, reason) of each of `grammar_requests` by id: alone, without prefix cache.

    runner: without drafts.
    """
    found = {}
    with options(runner, prefix_caching=False):
        for request in grammar_requests():
            ids, logprobs, ends = run(make_engine(runner), [request])
            reason, error = ends[request.id]
            assert error is None
            assert request.rule is None or fits(request, ids[request.id], reason)
            found[request.id] = (ids[request.id], logprobs[request.id], reason)
    return found


def check(runner, want, engine, rng, *, atol=2e-4):
    """Runs every request with drafts that are right, wrong or illegal by turns; returns how many were accepted.

    atol: of log-probabilities.
    """
    texts = {name: ids for name, (ids, _, _) in want.items()}

    def draft_of(request, index):
        text = texts[request.id]
        return text[index] if index < len(text) and rng.random() < 0.8 else rng.randrange(EOS, VOCAB)

    made = grammar_requests()
    ids, logprobs, ends, accepted = {r.id: [] for r in made}, {r.id: [] for r in made}, {}, 0
    engine.add(*made)
    with Planter(engine, draft_of) if runner.window > 1 else contextlib.nullcontext():
        while engine.has_work:
            for out in engine.step():
                ids[out.request_id] += out.new_ids
                logprobs[out.request_id] += out.new_logprobs
                accepted += out.num_accepted
                assert out.error is None
                ends[out.request_id] = out.finish_reason
    for name, (want_ids, want_logprobs, want_end) in want.items():
        assert (ids[name], ends[name].value) == (want_ids, want_end), name
        np.testing.assert_allclose(logprobs[name], want_logprobs, atol=atol)
    return accepted


class ErraticPace(MaskPace):
    """There is never time for the masks after drafts, or always, by turns at random."""

    def __init__(self):
        super().__init__()
        self.late, self._rng = 0, random.Random(2)

    def from_now(self, bucket, rows):  # noqa: ARG002
        is_late = self._rng.random() < 0.5
        self.late += is_late
        return lambda _waiting: not is_late


def record_plans(engine):
    """A list to which each step's plan is added once it is read."""
    plans = []
    engine.step_log = SimpleNamespace(write=lambda plan, *_, **__: plans.append(plan))
    return plans


@pytest.mark.parametrize(("name", "cases"), CASES)
def test_every_text_is_that_of_plain_decoding(name, cases):
    """Whatever the draft and its length, read at once or late, in mixed steps or not, with or without preemption.

    Where steps are read late and may run in two parts, many do, and half of these begin no mask after a draft.
    """
    make, scripted = RUNNERS[name]
    runner, want, rng = make(), solo(scripted), random.Random(0)
    accepted = preempted = 0
    fill_cache(runner, np.nan)
    if runner.window > 1:
        plant(make_engine(runner), (), None)  # as `Planter`, with operations of its own, which compile once
    before = compiles.total
    for depth, mixed, usable in cases:
        with options(runner, readout_depth=depth, mixed=mixed):
            engine = make_engine(runner, usable)
            plans = record_plans(engine)
            engine.mask_pace = pace = ErraticPace()
            accepted += check(runner, want, engine, rng)
        split = sum(plan.split for plan in plans)
        assert split > len(plans) / 4 if depth and runner.split else split == 0
        assert pace.late >= split / 4
        preempted += engine.stats().num_preemptions
    assert compiles.total == before
    assert preempted > 0
    assert accepted > 60 * len(cases) or runner.window == 1


def every_changing(k):
    """Numbers of drafts in turn, and a case of `EVERY`."""
    sequences = ((0, 1, k), (k, 0, 0), (1, k, 1), (k, 1, 0, 0, k), (0, k))
    return [(sequence, *case) for sequence, case in zip(itertools.cycle(sequences), EVERY)]


CHANGING = [
    pytest.param(1, "llama", [((0, 1), 1, True, 5), ((1, 1, 0), 2, False, None)], False, marks=pytest.mark.long),
    *(
        pytest.param(k, draft, every_changing(k), True, marks=pytest.mark.full)
        for k, draft in ((1, "llama"), (3, "nextn"), (3, "llama"), (7, "nextn"))
    ),
]


@pytest.mark.parametrize(("k", "draft", "cases", "split"), CHANGING)
def test_texts_with_any_number_of_drafts_from_step_to_step(k, draft, cases, split):
    """As with adaptive speculation: a window may have fewer or more drafts than its row's masks were filled along.

    Where steps may be split, those with none and with k drafts may run in two parts, those with one of several do not.
    """
    runner = changing_runner(k, draft, sampler="full", split=split)
    want, rng = solo(True), random.Random(1)
    accepted = preempted = 0
    fill_cache(runner, 0.0)
    plant(make_engine(runner), (), None)
    before = compiles.total
    for sequence, depth, mixed, usable in cases:
        with options(runner, readout_depth=depth, mixed=mixed):
            engine = make_engine(runner, usable, control=Forced(sequence))
            plans = record_plans(engine)
            accepted += check(runner, want, engine, rng)
        assert {plan.drafts for plan in plans} == set(sequence)
        in_parts = {plan.drafts for plan in plans if plan.split}
        assert in_parts == ({0, k} & set(sequence) if depth and split else set())
        preempted += engine.stats().num_preemptions
    assert compiles.total == before
    assert preempted > 0
    assert accepted > 40 * len(cases)


def chi_square(counts, probabilities):
    """The statistic with rare texts pooled, and a bound beyond its 0.999 quantile."""
    total = sum(counts.values())
    assert set(counts) <= set(probabilities)
    pairs = [(counts[text], total * p) for text, p in probabilities.items() if total * p >= 5]
    rest = total - sum(want for _, want in pairs)
    pairs.append((total - sum(got for got, _ in pairs), max(rest, 1e-9)))
    df = len(pairs) - 1 - (rest < 1)
    statistic = sum((got - want) ** 2 / want for got, want in pairs[: df + 1])
    return statistic, df + 3.3 * (2 * df) ** 0.5 + 8


def distribution(prompt, asked, length, temperature):
    """Of all texts of `length` ids: the target's at each position, renormalised over what the matcher allows there."""
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, probability in texts.items():
            matcher = compiler().compile(asked).matcher.deep_copy()
            assert not text or matcher.consume_tokens(list(text))
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB]
            logits = raw_logits([*prompt, *text]).astype(np.float64) / temperature
            for token, p in enumerate(softmax(np.where(bits > 0, logits, -np.inf))):
                if p > 0:
                    longer[(*text, token)] = probability * p
        texts = longer
    return texts


@pytest.mark.full
def test_the_distribution_is_the_targets_over_what_is_allowed():
    """With drafts from a distribution that knows no grammar: some are legal and accepted, others are not even allowed."""
    asked, temperature, length = StructuredOutputsParams(regex="[abc]{9}"), 1.3, 3
    prompt = prompt_of(np.random.default_rng(1), 4)
    rng = np.random.default_rng(0)
    legal = [THOUGHT_END + 1 + i for i, piece in enumerate(PIECES) if set(piece) <= set("abc")]
    weights = np.full(VOCAB, 0.3 / VOCAB)
    weights[legal] += 0.7 * rng.dirichlet(np.ones(len(legal)))
    runner = tiny_runner(K)
    engine = make_engine(runner)
    made = [
        constrained(
            str(i), prompt, asked, max_tokens=length, temperature=temperature, num_speculative_tokens=(K, 1)[i % 2]
        )
        for i in range(800)
    ]
    logits = np.broadcast_to((temperature * np.log(weights)).astype(np.float32), runner.state.draft_logits.shape)
    logits = jax.device_put(jnp.asarray(logits), runner.state.draft_logits.sharding)
    log_z = jnp.zeros_like(runner.state.draft_log_z)
    engine.add(*made)
    while engine.has_work:
        engine.step()
        plant(engine, engine.scheduler.running, lambda _request, _index: int(rng.choice(VOCAB, p=weights)))
        # Copies: the step takes the state's arrays.
        runner.state = runner.state._replace(draft_logits=logits + 0, draft_log_z=log_z + 0)
    counts = collections.Counter(tuple(request.tokens[len(prompt) :]) for request in made)
    accepted = engine.stats().acceptance
    assert 0.15 < accepted.num_accepted / accepted.num_drafted < 0.9
    statistic, bound = chi_square(counts, distribution(prompt, asked, length, temperature))
    assert statistic < bound
    # The test of the test: it tells another temperature.
    statistic, bound = chi_square(counts, distribution(prompt, asked, length, 0.65))
    assert statistic > bound


# Calls as `<name{...}>` in free text: one character opens them, so that random text has many.
CALLS = JsonCalls(opens=("<",), close=">")
FITS = {"type": "object", "properties": {"n": {"enum": [12, 34]}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.long
def test_calls_in_free_text_are_held_and_text_is_not():
    """With and without drafts, read at once or late: one text, that of the same request without a grammar up to its call."""
    asked = StructuredOutputsParams(
        grammar=held_calls(CALLS, {"f": FITS}, tokenizer().special_id, tokenizer().special_ids)
    )
    (opening,) = tokenizer().encode("<")
    unknown = dict.fromkeys(range(tokenizer().vocab_size, VOCAB), -50.0)  # no grammar allows an id that is no token
    sampled = {"temperature": 1.0, "max_tokens": 150, "logit_bias": {opening: 2.5, **unknown}}
    rng, runner = np.random.default_rng(7), tiny_runner(K, split=True)
    prompts = [prompt_of(rng, 5 + 9 * i) for i in range(4)]

    def made():
        return [constrained(str(i), prompt, asked, seed=i, **sampled) for i, prompt in enumerate(prompts)]

    want, _, _ = run(make_engine(tiny_runner(0)), made())
    free = [Request(str(i), prompt, SamplingParams(seed=i, **sampled)) for i, prompt in enumerate(prompts)]
    loose, _, _ = run(make_engine(tiny_runner(0)), free)
    draws = random.Random(0)

    def draft_of(request, index):
        text = want[request.id]
        return text[index] if index < len(text) and draws.random() < 0.8 else draws.randrange(EOS, VOCAB)

    for depth in (0, 1, 2):
        with options(runner, readout_depth=depth):
            engine = make_engine(runner)
            requests = made()
            engine.add(*requests)
            with Planter(engine, draft_of):
                while engine.has_work:
                    assert all(out.error is None for out in engine.step())
        assert {r.id: r.tokens[r.prompt_len :] for r in requests} == want
    calls = []
    for name, ids in want.items():
        start = ids.index(opening) if opening in ids else len(ids)
        assert ids[: start + 1] == loose[name][: start + 1]
        text = tokenizer().decode(ids)
        calls += re.findall(r'<\n\{"name": "f", "arguments": (.*?)\}\n>', text, re.DOTALL)
        assert text.count("<") - text.count("\n>") <= 1, "the last may be cut"
    assert len(calls) > 4
    assert {json.loads(call)["n"] for call in calls} <= {12, 34}
