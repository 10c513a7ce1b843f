"""Constrained requests inside the real step: what a mask forbids never comes, whatever else the engine does."""

import dataclasses

import numpy as np
import pytest

from jaxspec.compat import compiles
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.host_rule import FilledMasks, RuleResult
from jaxspec.engine.mask_pace import LONGEST, WORTH, MaskPace
from jaxspec.engine.request import Request, RequestState
from jaxspec.errors import InvalidRequestError
from jaxspec.sampling.params import MAX_LOGPROBS, SamplingParams
from tests.engine.test_schedules import options
from tests.engine.test_transforms import Planter, plant, raw_logits
from tests.engine.tiny import EOS, VOCAB, cached, make_engine, run, tiny_runner
from tests.host_rules import RandomConstraint
from tests.sampling.rules_reference import softmax

K = 3
LENGTHS = (3, 70, 64, 100, 10, 33, 129, 1)
SPECULATING = [0, pytest.param(K, marks=pytest.mark.slow)]


def requests(*, free=False, temperature=0.0, **options):
    """Constrained and free ones in turn, or the free ones alone."""
    rng = np.random.default_rng(2)
    for i, length in enumerate(LENGTHS):
        prompt = rng.integers(6, VOCAB, length).tolist()
        constrained = i % 2 == 0
        if constrained and free:
            continue
        rule = RandomConstraint(VOCAB, EOS, seed=i, length=30 + 2 * i) if constrained else None
        params = SamplingParams(
            max_tokens=60 if constrained else 40, temperature=temperature, seed=i, logprobs=MAX_LOGPROBS, **options
        )
        yield Request(f"m{i}", prompt, params, rule)


def constrained(all_requests):
    return [r for r in all_requests if r.rule]


@cached
def solo(*, k=0, temperature=0.0):
    texts = {}
    for request in requests(temperature=temperature):
        ids, logprobs, ends = run(make_engine(k=k), [request])
        texts[request.id] = (ids[request.id], logprobs[request.id], ends[request.id])
    return texts


def run_with_drafts(engine, all_requests):
    """Drafts that are right, or wrong, or not even allowed, by turns."""
    texts = {name: ids for name, (ids, _, _) in solo().items()}
    rng = np.random.default_rng(0)

    def draft_of(request, index):
        text = texts[request.id]
        return text[index] if index < len(text) and rng.random() < 0.7 else int(rng.integers(6, VOCAB))

    ids = {r.id: [] for r in all_requests}
    accepted = 0
    engine.add(*all_requests)
    while engine.has_work:
        for out in engine.step():
            ids[out.request_id] += out.new_ids
            accepted += out.num_accepted
        plant(engine, all_requests, draft_of)
    return ids, accepted


def test_the_likeliest_allowed_id_is_chosen():
    """The raw alternatives show it; log-probabilities are those of the raw distribution."""
    request = next(iter(requests()))
    engine = make_engine()
    engine.add(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    ids = [i for o in outputs for i in o.new_ids]
    seen = 0
    for position, (alternatives, logprob) in enumerate(
        zip((a for o in outputs for a in o.new_alternatives), (p for o in outputs for p in o.new_logprobs), strict=True)
    ):
        allowed = request.rule.allowed(ids[:position])
        likeliest = [(token, value) for token, value in alternatives if allowed[token]]
        if likeliest:
            assert (ids[position], logprob) == (likeliest[0][0], pytest.approx(likeliest[0][1], abs=1e-5))
            seen += ids[position] != alternatives[0][0]
    assert seen > 5, "the masks changed hardly anything"
    assert ids[-1] == EOS
    assert len(ids) == request.rule.length + 1


@pytest.mark.parametrize("k", SPECULATING)
@pytest.mark.parametrize("usable_pages", [None, 6])
def test_mask_rows_follow_logits_in_mixed_steps(k, usable_pages):
    """All at once, with prompts in chunks beside windows, also where requests are preempted: as alone."""
    engine = make_engine(usable_pages, k=k)
    everyone = list(requests())
    before = compiles.total
    ids, logprobs, ends = run(engine, everyone)
    assert compiles.total == before, "a mask must not compile"
    for request in everyone:
        alone, alone_logprobs, end = solo()[request.id]
        assert ids[request.id] == alone, request.id
        np.testing.assert_allclose(logprobs[request.id], alone_logprobs, atol=2e-4)
        assert ends[request.id] == end
    if usable_pages:
        assert engine.stats().num_preemptions
    for request in constrained(everyone):
        assert request.rule.fed == ids[request.id], "fed once each, those of a preempted request too"


class CountingConstraint(RandomConstraint):
    filled = 0

    def fill_masks(self, drafts, words):
        self.filled += 1
        super().fill_masks(drafts, words)


@pytest.mark.parametrize("k", SPECULATING)
def test_forced_token_advances_once(k):
    """Chunks in the middle and requests that resume, again and again, neither ask for masks nor feed the matcher."""
    engine = make_engine(k=k)
    prompt = np.random.default_rng(4).integers(6, VOCAB, 150).tolist()  # three chunks
    request = Request("r", prompt, SamplingParams(max_tokens=60, temperature=0), CountingConstraint(VOCAB, EOS))
    engine.add(request)
    ids, chose = [], 0
    while engine.has_work:
        new = [token for out in engine.step() for token in out.new_ids]
        ids += new
        chose += bool(new)
        if new and chose % 3 == 1 and engine.has_work:
            engine.scheduler.preempt(request)
    assert engine.stats().num_preemptions >= len(ids) // (3 * (k + 1))
    assert request.rule.fed == ids
    assert request.rule.filled == chose
    again = Request("r", prompt, request.params, RandomConstraint(VOCAB, EOS))
    assert run(make_engine(), [again])[0]["r"] == ids


@pytest.mark.parametrize("k", SPECULATING)
def test_masks_neither_recompile_nor_change_logprobs(k):
    """Log-probabilities are those of the raw distribution, by one pass over the text without any mask."""
    prompt = [20, 30, 40]
    request = Request(
        "r", prompt, SamplingParams(max_tokens=60, temperature=0), RandomConstraint(VOCAB, EOS, length=25)
    )
    engine = make_engine(k=k)
    before = compiles.total
    ids, logprobs, _ = run(engine, [request])
    assert compiles.total == before
    for i, (token, logprob) in enumerate(zip(ids["r"], logprobs["r"], strict=True)):
        want = np.log(softmax(raw_logits([*prompt, *ids["r"][:i]]).astype(np.float64)))
        assert logprob == pytest.approx(want[token], abs=2e-4)


@pytest.mark.slow
def test_drafts_are_verified_under_the_mask():
    """Right, wrong and illegal ones: the text is that of plain decoding, and drafts are accepted."""
    everyone = list(requests())
    ids, accepted = run_with_drafts(make_engine(k=K), everyone)
    assert ids == {name: text for name, (text, _, _) in solo().items()}
    assert accepted > 60


@pytest.mark.long
@pytest.mark.parametrize(("depth", "split"), [(2, False), (1, True), (3, True)])
def test_steps_read_late_change_no_text(depth, split):
    """Constrained rows wait for their readback while the others run ahead; or all choose late, in split steps."""
    engine = late_engine(depth, k=K, split=split)
    steps = watched(engine)
    ids, _, _ = run(engine, list(requests()))
    assert ids == {name: text for name, (text, _, _) in solo().items()}
    assert any(step.plan.split for step in steps) == split


def late_engine(depth, **options):
    engine = make_engine(**options)
    engine.settings = engine.scheduler.settings = dataclasses.replace(engine.settings, readout_depth=depth)
    return engine


def watched(engine):
    """All steps that the engine reads from now on."""
    steps = []
    engine.observer = steps.append
    return steps


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.full), pytest.param(K, marks=pytest.mark.long)])
def test_constrained_rows_get_a_token_in_every_step(k):
    """At readout depth 1, like the free ones, which do not notice; no step waits for another, and none compiles."""
    engine = late_engine(1, k=k, split=True)
    run(engine, [next(requests(free=True))])
    everyone = [r for r in requests() if len(r.prompt_ids) < 20]  # whose prompts are one step
    before, steps = compiles.total, watched(engine)
    ids, _, _ = run(engine, everyone)
    assert compiles.total == before, "the first grammar must not compile"
    assert ids == {r.id: solo()[r.id][0] for r in everyone}
    assert len(constrained(everyone)) > 1
    for request in everyone:
        mine = [i for i, step in enumerate(steps) if request in step.plan.requests]
        assert mine == list(range(mine[0], mine[-1] + 1)), "a step without the request"
        emitted = [int(steps[i].emitted[steps[i].plan.requests.index(request)]) for i in mine]
        assert all(emitted[:-1]), "a step without a token"  # the last one began before the end was read
    with_grammars = [s for s in steps if not s.plan.prefill and any(r.constraint for r in s.plan.decode)]
    assert all(step.plan.split for step in with_grammars)
    # The test of the test: without split steps a constrained row is in every second step.
    waiting = late_engine(1, k=k)
    steps = watched(waiting)
    request = next(requests())
    run(waiting, [request, next(requests(free=True))])
    assert sum(request in step.plan.requests for step in steps) < 0.7 * len(steps)


@pytest.mark.long
def test_rows_that_end_while_a_step_is_in_two_parts():
    """Stopped on the host by what is read meanwhile, or aborted between the parts: their rows say nothing more.

    Nobody asks for the masks of a rule that has ended the output, which might be one whose matcher has failed.
    """

    class Ending(RandomConstraint):
        def feed(self, ids, ended):
            result = super().feed(ids, ended)
            return result._replace(keep=len(ids)) if len(self.fed) > 9 else result

        def fill_masks(self, drafts, words):
            assert len(self.fed) <= 9, "the output is over"
            super().fill_masks(drafts, words)

    engine = late_engine(3, k=K, split=True)
    everyone = list(requests())
    everyone[0].rule = Ending(VOCAB, EOS, seed=0)
    aborted, ids = everyone[2], {r.id: [] for r in everyone}
    engine.add(*everyone)
    between = 0
    while engine.has_work:
        for out in engine.step():
            ids[out.request_id] += out.new_ids
            if out.finish_reason:
                assert all(r.id != out.request_id for r in engine.scheduler.running)
        begun = engine.runner.begun
        if begun and aborted in begun.decode and aborted.state is RequestState.DECODE:
            between += 1
            engine.abort(aborted.id)
    assert between == 1
    assert 9 < len(ids["m0"]) < 14
    for request in everyone:
        want = solo()[request.id][0]
        assert ids[request.id] == (want[: len(ids[request.id])] if request in (everyone[0], aborted) else want)
    assert engine.stats().kv_cache_usage == 0


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.full), pytest.param(K, marks=pytest.mark.long)])
@pytest.mark.parametrize("fails_in", ["feed", "fill_masks"])
def test_a_rule_that_fails_while_a_step_is_in_two_parts(k, fails_in):
    """By what is read meanwhile, or where its masks are filled for the second part: its request alone ends, with an error.

    A matcher that fails in a mask lets the end of the text come, and says what happened when it is fed the next time.
    """
    between = []

    class Failing(RandomConstraint):
        failed = False

        def feed(self, ids, ended):
            if not self.failed:
                super().feed(ids, ended)
            if fails_in == "feed" and len(self.fed) > 9:
                self.failed = True
                between.append(engine.runner.begun is not None and request in engine.runner.begun.decode)
            return RuleResult(error="it is broken" if self.failed else None)

        def fill_masks(self, drafts, words):
            assert not self.failed, "the output is over"
            if fails_in == "fill_masks" and len(self.fed) > 9:
                self.failed = True
                between.append(engine.runner.begun is not None and request in engine.runner.begun.decode)
                words[:] = np.packbits(np.arange(32 * words.shape[1]) == EOS, bitorder="little").view(np.int32)
            else:
                super().fill_masks(drafts, words)

    engine = late_engine(1, k=k, split=True)
    slots = engine.scheduler.num_free_slots
    request, *others = requests()
    request.rule = Failing(VOCAB, EOS, seed=0)
    ids, _, ends = run(engine, [request, *others])
    assert between == [True]
    assert ends[request.id] == ("error", "it is broken")
    for other in others:
        want_ids, _, want_end = solo()[other.id]
        assert (ids[other.id], ends[other.id]) == (want_ids, want_end)
    assert engine.stats().kv_cache_usage == 0
    assert engine.scheduler.num_free_slots == slots
    assert not engine.runner.in_flight


@pytest.mark.parametrize("k", SPECULATING)
def test_free_requests_do_not_notice(k):
    free, _, _ = run(make_engine(k=k), list(requests(free=True)))
    assert free == {name: solo()[name][0] for name in free}


@pytest.mark.parametrize("k", SPECULATING)
def test_random_requests_keep_to_their_masks(k):
    """`RandomConstraint.feed` checks each id."""
    everyone = list(requests(temperature=1.5, top_p=0.95))
    ids, _, ends = run(make_engine(k=k), everyone)
    for request in constrained(everyone):
        assert ids[request.id][-1] == EOS
        assert ends[request.id] == ("stop", None)


@pytest.mark.parametrize("k", SPECULATING)
def test_grammar_end_beats_min_tokens(k):
    rule = RandomConstraint(VOCAB, EOS, length=5)
    params = SamplingParams(max_tokens=40, min_tokens=30, temperature=0)
    ids, _, ends = run(make_engine(k=k), [Request("r", [7, 8, 9], params, rule)])
    assert (len(ids["r"]), ids["r"][-1], ends["r"]) == (6, EOS, ("stop", None))


def test_a_failing_rule_ends_its_own_request():
    class Failing(RandomConstraint):
        def feed(self, ids, ended):
            result = super().feed(ids, ended)
            return result._replace(error="it is broken") if len(self.fed) > 3 else result

    everyone = [
        Request("bad", [7, 8], SamplingParams(max_tokens=20), Failing(VOCAB, EOS)),
        Request("good", [7, 8], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)),
    ]
    ids, _, ends = run(make_engine(), everyone)
    assert ends["bad"] == ("error", "it is broken")
    assert len(ids["good"]) == 20


@pytest.mark.slow
def test_synthetic_acceptance_is_refused():
    with options(tiny_runner(K), synthetic_acceptance_length=2.6):  # refused before any step
        engine = make_engine(k=K)
    with pytest.raises(InvalidRequestError, match="structured output needs drafts that are verified"):
        engine.add(Request("r", [7], SamplingParams(), RandomConstraint(VOCAB, EOS)))


@pytest.mark.long
def test_drafts_without_masks_are_not_verified():
    """In a step whose masks after drafts would be late, constrained rows choose one token. The text is the same."""

    class Late(RandomConstraint):
        @classmethod
        def fill_many(cls, rows, words, may_begin=lambda _rows: True):
            known = super().fill_many(rows, words)
            if not may_begin(len(rows)):
                known = [FilledMasks(1, 0)] * len(rows)
            return known

    class EveryThird(MaskPace):
        steps = 0

        def from_now(self, bucket, rows):  # noqa: ARG002
            self.steps += 1
            in_time = self.steps % 3 != 0
            return lambda _waiting: in_time

    engine = late_engine(1, k=K, split=True)
    engine.mask_pace = EveryThird()
    everyone, steps, rng = list(requests()), [], np.random.default_rng(0)
    for request in constrained(everyone):
        request.rule.__class__ = Late
    texts = {name: text for name, (text, _, _) in solo().items()}

    def draft_of(request, index):
        text = texts[request.id]
        return text[index] if index < len(text) and rng.random() < 0.7 else int(rng.integers(6, VOCAB))

    with Planter(engine, draft_of):
        plant_read = engine.observer
        engine.observer = lambda step: (plant_read(step), steps.append(step))
        ids, _, _ = run(engine, everyone)
    assert ids == texts
    verified = {"late": [], "in time": [], "free": []}
    number = 0
    for step in steps:
        number += step.plan.split
        kind = "in time" if not step.plan.split or number % 3 else "late"
        for row, request in enumerate(step.plan.decode, len(step.plan.prefill)):
            if step.emitted[row]:
                verified[kind if request.constraint else "free"].append(int(step.verified[row]))
    assert {kind: set(counts) for kind, counts in verified.items()} == {"late": {0}, "in time": {K}, "free": {K}}


@pytest.mark.parametrize("k", SPECULATING)
def test_uploads_of_any_number_of_slots(k):
    runner = tiny_runner(k)
    S, *shape = runner.state.masks.shape
    rng = np.random.default_rng(0)
    for count in (1, 2, 4, S - 1):
        slots = rng.permutation(np.arange(1, S))[:count].astype(np.int32)
        words = rng.integers(-(2**31), 2**31, (count, *shape)).astype(np.int32)
        counts = rng.integers(1, shape[0] + 1, count).astype(np.int32)
        counts[-1] = shape[0]
        filled = np.arange(shape[0]) < counts[:, None]
        before = np.array(runner.state.masks)
        runner.write_masks(slots, np.zeros(count, np.int32), counts, words[filled])
        after = np.array(runner.state.masks)
        np.testing.assert_array_equal(after[slots], np.where(filled[..., None], words, -1))
        others = np.setdiff1d(np.arange(1, S), slots)
        np.testing.assert_array_equal(after[others], before[others])


def test_uploads_lower_what_slots_hold():
    """And never raise it: where fewer drafts were found than there are masks for."""
    runner = tiny_runner(K)
    S = runner.state.held.shape[0]
    held = np.arange(S, dtype=np.int32) % (K + 1)
    runner.put(held=held)
    slots, verified = np.array([2, 5, 7], np.int32), np.array([1, 3, 0], np.int32)
    runner.write_masks(slots, verified, np.array([2, 1, 1], np.int32), np.zeros((4, runner.mask_shape[1]), np.int32))
    want = held.copy()
    want[slots] = np.minimum(held[slots], verified)
    np.testing.assert_array_equal(np.array(runner.state.held)[1:], want[1:])
    runner.put(held=np.zeros(S, np.int32))


def test_masks_may_take_what_the_host_has_left_of_a_step(monkeypatch):
    """Of the shortest step lately, of which each bucket has its own; and longer the more of its rows wait for them."""
    now = 100.0
    monkeypatch.setattr("jaxspec.engine.mask_pace.time.monotonic", lambda: now)
    pace, bucket, other = MaskPace(), Bucket(0, 0, 8, "full", K), Bucket(0, 0, 4, "full", K)
    assert pace.from_now(bucket, 8)(1)
    for step in (0.3, 0.010, 0.020):
        pace.observe(bucket, step, 0.003)
    free = 0.0101 - 0.003 - LONGEST
    for rows, waiting in ((8, 1), (8, 4), (1, 1)):
        now = 100.0
        may_begin = pace.from_now(bucket, rows)
        worth = WORTH * waiting / rows * 0.0101
        for seconds, want in ((0.0, True), (free, True), (free + 0.99 * worth, True), (free + 1.01 * worth, False)):
            now = 100.0 + seconds
            assert may_begin(waiting) == want
    assert pace.from_now(other, 4)(1)


def test_one_row_waits_for_its_masks_where_the_host_takes_longer_than_the_device():
    pace, bucket = MaskPace(), Bucket(0, 0, 1, "full", K)
    for _ in range(100):
        pace.observe(bucket, 0.0058, 0.0055)
    assert pace.from_now(bucket, 1)(1)
    assert not pace.from_now(bucket, 8)(1)
