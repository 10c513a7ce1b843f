"""The choice of the number of drafts, in simulated time: throughput beside plain decoding and every fixed number.

Each engine runs its own table's steps; what they take was measured, see `measured_steps`.
"""

import itertools
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.engine.acceptance import probability_for
from jaxspec.engine.adaptive_drafts import CHECK_EVERY, AdaptiveDrafts, Latest
from jaxspec.engine.buckets import Bucket, bucket_table, choose_bucket, draft_choices, most_prompt_tokens
from jaxspec.engine.calibration import numbers_of_rows
from jaxspec.engine.change import Change
from jaxspec.engine.costs import StepCosts
from jaxspec.engine.draft_control import FixedDrafts, Load
from jaxspec.engine.probe import ENOUGH_OF_ALL, MOST_WITHOUT, Probe
from jaxspec.engine.step_pace import FIRST
from tests.engine.measured_steps import MeasuredSteps
from tests.engine.test_buckets import GPU

K, COUNTS = 3, (0, 1, 3)
ROWS = (1, 4, 8, 16, 32, 64, 128)
STEPS = {
    "h200": MeasuredSteps(),
    "cheap": MeasuredSteps({0: 1.0, 1: 1.03, 3: 1.08}),
    "dear": MeasuredSteps({0: 1.0, 1: 1.6, 3: 2.8}),
}
LENGTHS = (1.0, 1.5, 2.2, 3.0)
# The second of hosts that stutter: single steps take 5 % more or less, one in fifty four times as long. The third where one
# draft takes 1.6 times as long as none, beside prompts too: more than 384 tokens of these have no step without.
BOUND, STUTTERING_BOUND, DEAR_BOUND = 0.97, 0.94, 0.945
# Tokens of prompts and of answers, as `bench adaptive` has them.
PROMPT, OUTPUT = (128, 384), (128, 384)
# What a step with drafts takes of the time that others take, where the one before it proposed fewer: it has less to verify
# (0.83 to 0.92 of it at 1 and 8 requests, by a log of every step on an H200).
AFTER_FEWER = 0.87
FIXED = {k: bucket_table(replace(GPU, num_speculative_tokens=k)) for k in COUNTS}
ADAPTIVE = bucket_table(replace(GPU, num_speculative_tokens=K, adaptive_drafts=True))


def costs(name, table=ADAPTIVE):
    """As an engine measures them."""
    measured = {(b, rows) for b in table for rows in (numbers_of_rows(b))}
    return StepCosts({(b, rows): STEPS[name].seconds(b, rows) for b, rows in measured})


# Acceptance length of a request, by its number and by whether half of the time has passed.
CASES = {
    **{str(length): lambda _n, _half, length=length: length for length in LENGTHS},
    "mixed": lambda n, _half: 3.0 if n % 2 else 1.0,
    "rises": lambda _n, half: 3.0 if half else 1.0,
    "falls": lambda _n, half: 1.0 if half else 3.0,
}


class Requests:
    """So many, each followed by another; those that have yet to prefill wait."""

    def __init__(self, rows, length_of):
        self._rng, self._following, self._length_of, self._half = np.random.default_rng(0), rows, length_of, False
        self.number, self.held = np.arange(rows), np.zeros(rows, int)
        self._left = self._rng.integers(*OUTPUT, rows, endpoint=True)  # all begin together, as in `bench adaptive`
        self._p = np.array([self._probability(n) for n in self.number])
        self.waiting, self.decoding = [], np.arange(rows)  # (slot, prompt tokens); slots

    def _probability(self, number):
        return probability_for(self._length_of(number, self._half), K)

    def turn(self):
        """Half of the time has passed."""
        self._half = True
        self._p[:] = [self._probability(n) for n in self.number]

    def step(self, k, prompts):
        """Drafts verified and accepted in each window, and the slots whose requests end. So many of those that wait prefill."""
        verified = np.minimum(k, self.held[self.decoding])
        right = self._rng.random((len(self.decoding), K)) < self._p[self.decoding, None]
        accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), verified)
        begun, self.waiting = [slot for slot, _ in self.waiting[:prompts]], self.waiting[prompts:]
        self.held[:] = k
        self._left[begun] -= 1
        self._left[self.decoding] -= accepted + 1
        ended = [int(slot) for slot in self.decoding[self._left[self.decoding] <= 0]]
        for slot in ended:
            self._left[slot] = self._rng.integers(*OUTPUT, endpoint=True)
            self.number[slot], self._following = self._following, self._following + 1
            self._p[slot] = self._probability(self.number[slot])
            self.waiting.append((slot, int(self._rng.integers(*PROMPT, endpoint=True))))
        if begun or ended:
            self.decoding = np.setdiff1d(np.arange(len(self.held)), [slot for slot, _ in self.waiting])
        return verified, accepted, ended


def prompts_that_fit(waiting, budget):
    """How many of those that wait fit a step, and their tokens."""
    count = tokens = 0
    while count < min(len(waiting), 8) and tokens + waiting[count][1] <= budget:
        tokens += waiting[count][1]
        count += 1
    return count, tokens


def throughput(name, table, rows, length_of, control, *, steps, late=1, factors=None):
    """Tokens a second in simulated time; what a step accepted, and took, is known so many steps late.

    Args:
        factors: of what steps really take, by number of drafts; they are disturbed then too.
    """
    rng, before = np.random.default_rng(1), None

    def seconds_of(bucket, rows=None, prompt_tokens=None):
        return STEPS[name].seconds(bucket, rows, prompt_tokens) * (factors[bucket.drafts] if factors else 1.0)

    requests = Requests(rows, length_of)
    measured = {bucket: seconds_of(bucket) for bucket in table} if isinstance(control, AdaptiveDrafts) else None
    most = most_prompt_tokens(table, full=False)

    @cache
    def choices(prompt_tokens):
        return draft_choices(table, prompt_tokens=prompt_tokens, full=False)

    tokens, seconds, unread = 0, 0.0, []
    for step in range(steps):
        if step == steps // 2:
            requests.turn()
        decoding, number, prompts = requests.decoding, requests.number.copy(), bool(requests.waiting)
        slots = (decoding + 1).tolist()
        _, prompt_tokens = prompts_that_fit(requests.waiting, GPU.max_num_batched_tokens)
        k = control.choose(Load(slots, [K] * len(slots), K, prompts, False, choices(prompt_tokens)))
        budget = min(GPU.max_num_batched_tokens - len(slots) * (k + 1), most[k])
        count, prompt_tokens = prompts_that_fit(requests.waiting, budget)
        sizes = {"prefill_tokens": prompt_tokens, "prefill_rows": count, "decode_rows": len(slots)}
        bucket = choose_bucket(table, **sizes, full=False, drafts=k, seconds=measured)
        took = seconds_of(bucket, len(slots), prompt_tokens)
        if slots and not count and requests.held[decoding].max() < k:
            took *= AFTER_FEWER
        if factors:  # hosts stutter, and now and then they halt
            took *= rng.lognormal(sigma=0.05) * (4.0 if rng.random() < 0.02 else 1.0)
        seconds += took
        verified, accepted, ended = requests.step(k, count)
        tokens += count + len(slots) + accepted.sum()
        seen = zip(decoding.tolist(), verified.tolist(), accepted.tolist(), number[decoding].tolist(), strict=True)
        timed = (bucket, len(slots), 0, took) if slots and not prompts and bucket == before else None
        before = bucket
        unread.append(([window for window in seen if window[1]], timed))
        for slot in ended:
            control.admitted(slot + 1)
        if len(unread) > late:
            windows, timed = unread.pop(0)
            if timed and isinstance(control, AdaptiveDrafts):
                control.took(*timed)
            control.observe([(s + 1, v, a) for s, v, a, n in windows if requests.number[s] == n])
    return tokens / seconds


def ratio(name, rows, case, *, late=1, steps=None, factors=None, control=None):
    """To the better of plain decoding and the best fixed number of drafts."""
    steps, length_of = steps or (1200 if rows > 8 else 3000 if rows > 4 else 6000), CASES[case]
    same = {"steps": steps, "factors": factors}
    control = control or AdaptiveDrafts(K, rows + 1, costs(name))
    got = throughput(name, ADAPTIVE, rows, length_of, control, late=late, **same)
    return got / max(throughput(name, FIXED[k], rows, length_of, FixedDrafts(k), **same) for k in COUNTS)


SOME = [("h200", 1, "1.0"), ("h200", 16, "2.2"), ("h200", 32, "mixed"), ("dear", 128, "3.0")]
EVERY = [
    *itertools.product(["h200"], ROWS, CASES, [1]),
    *itertools.product(["cheap", "dear"], (8, 128), CASES, [0, 3]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows", "case"), SOME)
def test_throughput(name, rows, case):
    assert ratio(name, rows, case) >= BOUND


@pytest.mark.full
@pytest.mark.parametrize(("name", "rows", "case", "late"), EVERY)
def test_throughput_everywhere(name, rows, case, late):
    assert ratio(name, rows, case, late=late) >= (DEAR_BOUND if name == "dear" else BOUND)


@pytest.mark.slow
def test_what_a_load_taught_does_not_hold_the_next_one_back():
    """Requests come and go for thousands of steps, few of them and then more, whose drafts are accepted in all ways."""
    control = AdaptiveDrafts(K, max(ROWS) + 1, costs("h200"))
    for rows, cases in ((1, ("1.5", "2.2", "3.0", "mixed")), (8, ("1.0", "3.0")), (16, ("2.2",))):
        for case in cases:
            assert ratio("h200", rows, case, steps=1500, control=control) >= STUTTERING_BOUND


@pytest.mark.slow
def test_what_changes_is_followed():
    """Half of the time nothing is accepted, half of it most is: better than any fixed number by far."""
    assert ratio("h200", 8, "rises") > 1.05
    assert ratio("h200", 8, "falls") > 1.05


@pytest.mark.parametrize(("rows", "most"), [(1, 40), (4, 16), (64, 8)])
def test_a_fall_is_noticed_in_a_few_windows(rows, most):
    """Drafts of running requests that are suddenly refused, after hundreds that were not, are soon given up, but for probes."""
    slots, rng = list(range(1, rows + 1)), np.random.default_rng(0)
    control = AdaptiveDrafts(K, rows + 1, costs("h200"))
    for _ in range(400):
        assert control.choose(load(slots)) == K
        control.observe([(slot, K, int(np.cumprod(rng.random(K) < 0.85).sum())) for slot in slots])
    drafted = 0
    for _ in range(100):
        if k := control.choose(load(slots)):
            control.observe([(slot, k, 0) for slot in slots])
            drafted += 1
    assert 0 < drafted <= most
    assert control.choose(load(slots)) == 0


def test_a_probe_ends_where_no_window_reaches_its_drafts():
    """Three drafts beside one, where the first ones are refused by now: nothing is ever seen of the second."""
    probe = Probe(1, K, np.full(K, 0.5), {1: 1.0, K: 1.2}, 0.01, 1.0)
    for _ in range(ENOUGH_OF_ALL):
        assert probe.verdict is None
        probe.add(np.array([K]), np.array([[True, False, False]]), np.zeros((1, K), bool))
    assert probe.verdict is False


def test_a_probe_ends_where_no_window_verifies_its_drafts():
    """As of drafts that are looked up, of which there may be fewer."""
    probe = Probe(1, K, np.full(K, 0.5), {1: 1.0, K: 1.2}, 0.01, 1.0)
    for _ in range(MOST_WITHOUT):
        assert probe.verdict is None
        probe.add(np.ones(64, int), np.tile([True, False, False], (64, 1)), np.zeros((64, K), bool))
    assert probe.verdict is False


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_probe_of_many_rows_is_two_steps(late):
    """One that proposes and one that verifies: what is known late needs no further ones. Nothing is ever accepted."""
    slots, control, held, unread, chosen = list(range(1, 65)), AdaptiveDrafts(K, 65, costs("h200")), K, [], []
    for _ in range(600):
        k = control.choose(load(slots))
        unread.append([(slot, min(k, held), 0) for slot in slots if min(k, held)])
        held = k
        chosen.append(k)
        if len(unread) > late:
            control.observe(unread.pop(0))
    steps = [len(list(run)) for drafts, run in itertools.groupby(chosen[200:]) if drafts]
    assert len(steps) > 3
    assert set(steps) == {2}


def test_a_probe_goes_on_where_its_windows_never_came():
    """Their requests were over."""
    probe = Probe(0, 1, np.full(K, 0.5), {0: 1.0, 1: 1.2}, 0.01, 1.0)
    steps = [probe.step(64) for _ in range(2 * (2 + MOST_WITHOUT))]
    assert steps == 2 * [1, 1, *[0] * MOST_WITHOUT]


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("rows", [4, 64])
def test_a_probe_waits_for_its_own_windows(rows, late):
    """More drafts pay, though one of 16 second drafts was accepted before; what is read late is of windows before the probe."""
    slots, rng = list(range(1, rows + 1)), np.random.default_rng(0)
    control = AdaptiveDrafts(K, rows + 1, costs("h200"))
    for i in range(2000 // rows):
        control.observe([(slot, K, (slot + i) % 2 + ((slot + i) % 32 == 1)) for slot in slots])
    assert control.choose(load(slots)) == 1
    held, unread, chosen = 1, [], []
    for _ in range(1200):
        k = control.choose(load(slots))
        accepted = np.cumprod(rng.random((rows, K)) < (0.5, 0.95, 0.95), axis=1).sum(axis=1)
        verified = min(k, held)
        unread.append([(slot, verified, min(verified, int(n))) for slot, n in zip(slots, accepted, strict=True)])
        held = k
        chosen.append(k)
        if len(unread) > late:
            control.observe([window for window in unread.pop(0) if window[1]])
    assert chosen[-200:].count(K) > 180


@given(st.floats(0.02, 0.98), st.sampled_from([1, 8, 64]), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_chance_is_no_change(p, rows, seed):
    """Windows that are as likely accepted as before hardly ever seem to have changed; others soon do."""
    rng, change = np.random.default_rng(seed), Change(1)

    def steps(accepted):
        for n in range(200):
            change.add(np.ones((rows, 1), bool), rng.random((rows, 1)) < accepted, np.full(rows, p))
            if change.is_evident:
                change.accept()
                yield n

    assert len(list(steps(p))) <= 1
    assert next(steps(p + 0.5 if p < 0.5 else p - 0.5)) * rows < 64


def load(slots, choices=COUNTS, *, wanted=K, most=None, prompts=False):
    return Load(slots, [wanted] * len(slots), wanted if most is None else most, prompts, False, choices)


@pytest.mark.parametrize("prompts", [False, True])
def test_long_contexts_make_drafts_cheap(prompts):
    """A context is read once however many drafts its row has: where that takes most of the time, few accepted ones pay."""
    slots = list(range(1, 33))
    steps = {(b, rows): STEPS["h200"].seconds(b, rows) for b in ADAPTIVE for rows in numbers_of_rows(b)}
    control = AdaptiveDrafts(K, 33, StepCosts(steps, context=32, token_seconds=dict.fromkeys(COUNTS, 1e-8)))
    for step in range(60):
        control.observe([(slot, K, (slot + step) % 12 == 0) for slot in slots])
    short, long = (replace(load(slots, prompts=prompts), tokens=32 * context) for context in (256, 65536))
    assert control.choose(short) == 0
    assert control.choose(long) > 0


@given(st.floats(0, 0.95), st.sampled_from(ROWS), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_prompts_beside_rows_change_nothing(p, rows, seed):
    """They take five times as long as windows do, so that a measurement with them says little about windows."""
    rng, slots = np.random.default_rng(seed), list(range(1, rows + 1))
    steps = {(b, n): STEPS["h200"].seconds(b, n) for b in ADAPTIVE for n in numbers_of_rows(b)}
    disturbed = {(b, n): value * rng.uniform(1, 1.5) if b.prefill_tokens else value for (b, n), value in steps.items()}
    control = AdaptiveDrafts(K, rows + 1, StepCosts(disturbed))
    accepted = np.cumprod(rng.random((100, rows, K)) < p, axis=2).sum(axis=2)
    for step in accepted:
        control.observe([(slot, K, int(n)) for slot, n in zip(slots, step, strict=True)])
    drafts = [control.choose(load(slots, prompts=prompts)) for prompts in (True, False)]
    assert drafts[0] == drafts[1]


EVENTS = ("step", "step", "blind", "admit", "leave", "few")


@given(st.lists(st.sampled_from(EVENTS), min_size=20, max_size=60), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_what_is_kept_is_what_would_be_expected(events, seed):
    """Two controls see the same; one works everything out in every step."""
    rng, slots, expected = np.random.default_rng(seed), [1, 2, 3], {True: [], False: []}

    def control(keeps):
        class Watched(Latest):
            def get(self, key, make):
                value = super().get(key, make) if keeps else make()
                expected[keeps].append(value)
                return value

        with mock.patch("jaxspec.engine.adaptive_drafts.Latest", Watched):
            return AdaptiveDrafts(K, 5, costs("cheap"))

    controls = [control(True), control(False)]
    for event in events:
        k, other = (each.choose(load(slots, wanted=1 if event == "few" else K)) for each in controls)
        assert k == other
        windows = [(slot, k, int(rng.integers(0, k, endpoint=True))) for slot in slots]
        for each in controls:
            if event == "step" and k:
                each.observe(windows)
            if event == "admit":
                each.admitted(slots[0])
        if event == "leave":
            slots = slots[1:] or [1, 2, 3]
    assert expected[True] == expected[False]
    assert len(expected[True]) == len(events)


def test_choices_are_kept_to():
    """Never a number of drafts that the step cannot have, nor more than any request wants; without costs the most."""
    slots = list(range(1, 33))
    control = AdaptiveDrafts(K, 33)
    assert control.choose(load(slots)) == K
    control.costs = costs("cheap")
    assert control.choose(load(slots)) == K
    assert control.choose(load(slots, (0, 1))) == 1
    assert control.choose(load(slots, wanted=1)) == 1
    assert control.choose(load(slots, wanted=0)) == 0
    assert control.choose(load(slots, wanted=0, most=K, prompts=True)) in COUNTS
    for fixed, wanted, choices, chosen in ((3, 3, COUNTS, 3), (3, 0, COUNTS, 0), (3, 2, COUNTS, 3), (3, 0, (3,), 3)):
        assert FixedDrafts(fixed).choose(load([1], choices, wanted=wanted)) == chosen


def test_costs_are_those_of_the_cheapest_step_that_holds_the_rows():
    seconds = {
        Bucket(0, 0, 4, "lean", 0): 1.0, Bucket(0, 0, 16, "lean", 0): 2.0, Bucket(0, 0, 16, "full", 0): 3.0,
        Bucket(64, 4, 16, "lean", 0): 4.0, Bucket(64, 4, 16, "full", 3): 5.0,
    }  # fmt: skip
    table = StepCosts({(b, b.decode_rows): value for b, value in seconds.items()})
    assert [table.seconds(rows, 0) for rows in (1, 4, 5, 16)] == [1.0, 1.0, 2.0, 2.0]
    assert table.seconds(3, 0, full=True) == 3.0
    assert table.seconds(3, 3) == table.seconds(3, 3, full=True) == 5.0
    assert table.seconds(3, 1) is None


@given(
    st.dictionaries(st.tuples(st.integers(1, 16), st.integers(1, 16)), st.floats(0.1, 9), min_size=1),
    st.integers(1, 20),
)
def test_costs_between_what_was_measured(points, rows):
    """Of the cheapest bucket that holds the rows, between its own measurements; of the largest where none does."""
    seconds = {(Bucket(0, 0, max(pair), "lean", 0), min(pair)): value for pair, value in points.items()}
    most = max(bucket.decode_rows for bucket, _ in seconds)
    rows = min(rows, most)
    of_buckets = []
    for bucket in {b for b, _ in seconds if b.decode_rows >= rows}:
        known = sorted((n, value) for (b, n), value in seconds.items() if b == bucket)
        below, above = [p for p in known if p[0] <= rows] or known[:1], [p for p in known if p[0] >= rows] or known[-1:]
        (low, first), (high, last) = below[-1], above[0]
        of_buckets.append(first + (last - first) * (rows - low) / max(high - low, 1))
    assert StepCosts(seconds).seconds(rows, 0) == pytest.approx(min(of_buckets))
    assert StepCosts(seconds).seconds(most + 5, 0) == StepCosts(seconds).seconds(most, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "factors"), [
    ("2.2", {0: 1.0, 1: 1.2, 3: 1.4}), ("2.2", {0: 1.0, 1: 0.9, 3: 0.8}), ("1.5", {0: 1.3, 1: 1.0, 3: 1.0}),
    ("2.2", {0: 1.3, 1: 1.3, 3: 1.3}),
])  # fmt: skip
def test_steps_that_take_other_times_than_measured(case, factors):
    """Whichever steps the measurement got wrong, and on a host that stutters: near the best that there is."""
    assert ratio("h200", 1, case, factors=factors) >= STUTTERING_BOUND


def test_a_check_is_short_and_comes_only_where_it_may_pay():
    """A few steps with none of the drafts, once steps have been timed; no other soon after, none where drafts pay by far."""
    slots = list(range(1, 17))

    def steps_without_drafts(accepted):
        control, plain = AdaptiveDrafts(K, 17, costs("cheap")), []
        for step in range(200):
            k = control.choose(load(slots, (0, K)))
            if k == 0:
                plain.append(step)
            bucket = control.costs.bucket(16, k)
            control.took(bucket, 16, 0, control.costs.seconds_in(bucket, 16))
            control.observe([(slot, K, accepted(slot + step)) for slot in slots] if k else [])
        return plain

    first, *others = steps_without_drafts(lambda n: n % 8 == 0)  # 1.125 tokens in 1.08 steps' time
    assert first >= FIRST
    assert others == list(range(first + 1, first + FIRST + 1))  # the first of them has another bucket's before it
    assert not steps_without_drafts(lambda _: K)


def test_what_one_disturbed_check_showed_is_checked_again():
    """Steps without drafts seemed three times as long: by what was measured they are as good, and the next check shows it."""
    slots = list(range(1, 17))
    control, chosen = AdaptiveDrafts(K, 17, costs("cheap")), [K]
    for step in range(3 * CHECK_EVERY):
        k = control.choose(load(slots, (0, K)))
        if k == chosen[-1]:
            bucket = control.costs.bucket(16, k)
            disturbed = k == 0 and chosen.count(0) <= FIRST
            control.took(bucket, 16, 0, control.costs.seconds_in(bucket, 16) * (3 if disturbed else 1))
        chosen.append(k)
        control.observe([(slot, K, (slot + step) % 100 == 0) for slot in slots] if k else [])
    assert chosen.count(0) > CHECK_EVERY  # 1.01 tokens in 1.08 steps' time: none is better


@pytest.mark.parametrize("choices", [COUNTS, (K,)])
def test_what_is_seen_is_learned_without_costs_too(choices):
    """Nothing piles up while steps are not measured yet, or where there is one number of drafts."""
    control, slots = AdaptiveDrafts(K, 17), list(range(1, 17))
    for _ in range(200):
        assert control.choose(load(slots, choices)) == K
        control.observe([(slot, K, 0) for slot in slots])
    control.costs = costs("cheap")
    assert control.choose(load(slots)) == 0
