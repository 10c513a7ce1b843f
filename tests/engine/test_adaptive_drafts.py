"""The choice of the number of drafts, in simulated time: throughput beside plain decoding and every fixed number."""

import itertools
import time

import numpy as np
import pytest

from jaxspec.engine.adaptive_drafts import AdaptiveDrafts
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.costs import StepCosts
from jaxspec.engine.draft_control import FixedDrafts, Load

K, COUNTS = 3, (0, 1, 3)
ROWS = (1, 4, 8, 16, 32, 64, 128)
# Milliseconds of a plain step, and what one and three drafts make of it. "h200" is near what was measured there.
PLAIN = (2.1, 3.2, 4.2, 5.2, 6.2, 6.8, 7.8)
FACTORS = {
    "h200": ((1.45, 1.3, 1.2, 1.16, 1.14, 1.16, 1.2), (2.16, 1.75, 1.5, 1.38, 1.32, 1.38, 1.46)),
    "cheap": ((1.03,) * 7, (1.08,) * 7),
    "dear": ((1.6,) * 7, (2.8,) * 7),
}
LENGTHS = (1.0, 1.5, 2.2, 3.0)
BOUND = 0.985


def costs(name):
    seconds = {}
    for rows, plain, *factors in zip(ROWS, PLAIN, *FACTORS[name], strict=True):
        for k, factor in zip(COUNTS, (1.0, *factors), strict=True):
            seconds[Bucket(0, 0, rows, "lean", k)] = 1e-3 * plain * factor
    return StepCosts(seconds)


def probability(length):
    """Of accepting a draft at any position, so that windows of three drafts yield so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if 1 + p + p**2 + p**3 < length else (low, p)
    return low


# Acceptance length of a request, by its number and by how much of the time has passed.
CASES = {
    **{str(length): lambda _n, _t, length=length: length for length in LENGTHS},
    "mixed": lambda n, _t: 3.0 if n % 2 else 1.0,
    "rises": lambda _n, t: 3.0 if t > 0.5 else 1.0,
    "falls": lambda _n, t: 3.0 if t < 0.5 else 1.0,
}


def throughput(step_costs, rows, length_of, control, *, steps, late=1, output=256):
    """Tokens a second of requests of `output` tokens, each followed by another, whose steps are read so late."""
    rng = np.random.default_rng(0)
    p_of = {length: probability(length) for length in LENGTHS}
    held, left = np.zeros(rows, int), rng.integers(1, output, rows)
    number, following = np.arange(rows), rows
    tokens, seconds, unread = 0, 0.0, []
    for step in range(steps):
        k = control.choose(Load(range(1, rows + 1), [K] * rows, K, prompts=False, full=False, choices=COUNTS))
        p = np.array([p_of[length_of(n, step / steps)] for n in number])
        verified = np.minimum(k, held)
        right = rng.random((rows, K)) < p[:, None]
        accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), verified)
        seconds += step_costs.seconds(rows, k)
        tokens += rows + accepted.sum()
        held[:] = k
        seen = zip(range(rows), verified.tolist(), accepted.tolist(), number.tolist(), strict=True)
        unread.append([window for window in seen if window[1]])
        left -= accepted + 1
        for row in np.flatnonzero(left <= 0):
            left[row], number[row], following = output, following, following + 1
            control.admitted(row + 1)
        if len(unread) > late:
            control.observe([(row + 1, v, a) for row, v, a, n in unread.pop(0) if number[row] == n])
    return tokens / seconds


def ratio(name, rows, case, *, late=1, steps=None):
    """To the better of plain decoding and the best fixed number of drafts."""
    step_costs, steps = costs(name), steps or (3000 if rows <= 8 else 1200)
    length_of = CASES[case]
    control = AdaptiveDrafts(K, rows + 1, step_costs)
    got = throughput(step_costs, rows, length_of, control, steps=steps, late=late)
    return got / max(throughput(step_costs, rows, length_of, FixedDrafts(k), steps=steps) for k in COUNTS)


SOME = [("h200", 1, "1.0"), ("h200", 1, "2.2"), ("h200", 32, "mixed"), ("h200", 8, "rises"), ("dear", 128, "3.0")]
EVERY = list(itertools.product(FACTORS, (1, 8, 32, 128), CASES))


@pytest.mark.parametrize(("name", "rows", "case"), SOME)
def test_throughput(name, rows, case):
    assert ratio(name, rows, case) >= BOUND


@pytest.mark.full
@pytest.mark.parametrize(("name", "rows", "case"), EVERY)
@pytest.mark.parametrize("late", [0, 3])
def test_throughput_everywhere(name, rows, case, late):
    # A step of one row tells of one window: a probe misleads more often, which few seconds of steps do not average out.
    assert ratio(name, rows, case, late=late, steps=10_000 if rows == 1 else None) >= BOUND


def test_what_changes_is_followed():
    """Half of the time nothing is accepted, half of it most is: better than any fixed number by far."""
    assert ratio("h200", 32, "rises") > 1.05
    assert ratio("h200", 32, "falls") > 1.05


def load(slots, choices=COUNTS, *, wanted=K, most=None, prompts=False):
    return Load(slots, [wanted] * len(slots), wanted if most is None else most, prompts, False, choices)


def test_a_decision_takes_the_host_hardly_any_time():
    control = AdaptiveDrafts(K, 129, costs("h200"))
    busy = load(list(range(1, 129)))
    windows = [(slot, K, slot % 4) for slot in range(1, 129)]
    times = []
    for _ in range(300):
        control.observe(windows)
        started = time.perf_counter()
        control.choose(busy)
        times.append(time.perf_counter() - started)
    assert min(times) < 50e-6


def test_choices_are_kept_to():
    """Never a number of drafts that the step cannot have, nor more than any request wants; without costs the most."""
    control = AdaptiveDrafts(K, 9)
    assert control.choose(load([1, 2])) == K
    control.costs = costs("cheap")
    assert control.choose(load([1, 2])) == K
    assert control.choose(load([1, 2], (0, 1))) == 1
    assert control.choose(load([1, 2], wanted=1)) == 1
    assert control.choose(load([1, 2], wanted=0)) == 0
    assert control.choose(load([1, 2], wanted=0, most=K, prompts=True)) in COUNTS
    for fixed, wanted, choices, chosen in ((3, 3, COUNTS, 3), (3, 0, COUNTS, 0), (3, 2, COUNTS, 3), (3, 0, (3,), 3)):
        assert FixedDrafts(fixed).choose(load([1], choices, wanted=wanted)) == chosen


def test_costs_are_those_of_the_smallest_step_that_holds_the_rows():
    seconds = {
        Bucket(0, 0, 4, "lean", 0): 1.0, Bucket(0, 0, 16, "lean", 0): 2.0, Bucket(0, 0, 16, "full", 0): 3.0,
        Bucket(64, 4, 16, "lean", 0): 4.0, Bucket(64, 4, 16, "full", 3): 5.0, Bucket(256, 4, 16, "lean", 0): 6.0,
    }  # fmt: skip
    table = StepCosts(seconds)
    assert [table.seconds(rows, 0) for rows in (1, 4, 5, 16)] == [1.0, 1.0, 2.0, 2.0]
    assert table.seconds(3, 0, full=True) == 3.0
    assert table.seconds(3, 0, prompts=True) == 6.0
    assert table.seconds(3, 3) == table.seconds(3, 3, full=True) == 5.0
    assert table.seconds(3, 3, prompts=True) is None
    assert table.seconds(3, 1) is None
