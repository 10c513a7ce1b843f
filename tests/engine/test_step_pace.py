"""How long steps take beside what they were measured to."""

import numpy as np
import pytest

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.step_pace import FIRST, StepPace

NONE, ONE, MOST = (Bucket(0, 0, 4, "lean", k) for k in (0, 1, 3))


def test_a_pace_knows_what_buckets_differ_in():
    """Of a bucket that is left, its difference to the others; what has changed since then has changed for all."""
    rng, (plain, drafting) = np.random.default_rng(0), (NONE, MOST)
    pace = StepPace()

    def run(bucket, ratio, steps=40):
        for _ in range(steps):
            pace.observe(bucket, ratio * rng.lognormal(sigma=0.02) * (5.0 if rng.random() < 0.03 else 1.0))

    assert pace.factor(plain) == pace.factor(drafting) == 1.0
    run(drafting, 1.2)
    assert pace.factor(plain) == pytest.approx(pace.factor(drafting)) == pytest.approx(1.2, rel=0.03)
    for _ in range(3):
        run(plain, 1.0, FIRST)
        run(drafting, 1.2)
    assert pace.factor(drafting) / pace.factor(plain) == pytest.approx(1.2, rel=0.08)
    run(plain, 0.8)
    assert pace.factor(plain) == pytest.approx(0.8, rel=0.03)
    assert pace.factor(drafting) == pytest.approx(0.96, rel=0.08)
    run(drafting, 9.0, FIRST - 1)  # too few to say
    assert pace.factor(plain) == pytest.approx(0.8, rel=0.03)
    for disturbed in (True, False, True):
        run(plain, 0.8)
        run(drafting, 2.0 if disturbed else 0.96, FIRST)
    assert pace.factor(drafting) / pace.factor(plain) == pytest.approx(1.2, rel=0.08)


def test_two_disturbed_visits_show_nothing():
    pace = StepPace()
    for ratio in (1.5, 1.6):
        for bucket, level in ((NONE, 1.0), (ONE, ratio)):
            for _ in range(FIRST):
                pace.observe(bucket, level)
    assert pace.factor(ONE) == pace.factor(NONE) == pytest.approx(1.0)


@pytest.mark.parametrize("steps", [FIRST, 40])
def test_small_errors_of_a_pace_do_not_add_up(steps):
    """First steps of which each seems a little shorter than those after it, in thousands of visits to two of three buckets."""
    pace = StepPace()
    for _ in range(2000):
        for bucket, length in ((NONE, 40), (ONE, steps)):
            for step in range(length):
                pace.observe(bucket, 0.95 if step < FIRST else 1.0)
    factors = [pace.factor(bucket) for bucket in (NONE, ONE, MOST)]
    assert factors[0] == pytest.approx(factors[1], rel=0.06)
    assert factors == pytest.approx([1.0] * 3, rel=0.06 if steps == FIRST else 0.3)
