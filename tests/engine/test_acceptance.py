"""Acceptance statistics and synthetic acceptance in the real engine: chunks beside windows, stops, preemption."""

import numpy as np
import pytest

from jaxspec.engine.acceptance import Acceptance
from tests.engine.test_engine import requests
from tests.engine.test_scheduler import make_engine as make_mock_engine
from tests.engine.tiny import cached, make_engine, run

K, MEAN = 3, 2.6

pytestmark = pytest.mark.long


@cached
def finished(synthetic):
    """An engine, its requests at their ends, and the accepted drafts in each one's output; some were preempted."""
    engine = make_engine(usable_pages=9, k=K, synthetic=synthetic)
    batch = requests()
    accepted = dict.fromkeys((r.id for r in batch), 0)
    for each in batch:
        engine.add(each)
    while engine.has_work:
        for out in engine.step():
            assert out.num_accepted <= min(K, len(out.new_ids))
            accepted[out.request_id] += out.num_accepted
    return engine, batch, accepted


@pytest.mark.parametrize("synthetic", [None, MEAN])
def test_identities(synthetic):
    engine, batch, accepted = finished(synthetic)
    for request in batch:
        one = request.acceptance
        assert sum(one.histogram) == one.num_steps
        assert sum(i * n for i, n in enumerate(one.histogram)) == one.num_accepted == sum(one.accepted_per_position)
        assert one.num_drafted == K * one.num_steps
        if one.num_steps:
            assert one.mean_length == pytest.approx(1 + one.num_accepted / one.num_steps)
            assert one.rate == pytest.approx((one.mean_length - 1) / K)
            assert sum(one.rate_per_position) == pytest.approx(one.mean_length - 1)
            assert list(one.rate_per_position) == sorted(one.rate_per_position, reverse=True)
        # The last window may have been cut; every other token is the first one, a window's own, or an accepted draft.
        whole = 1 + one.num_steps + one.num_accepted
        assert whole - K <= request.num_output <= whole
        assert one.num_accepted - K <= accepted[request.id] <= one.num_accepted
    total = engine.stats().acceptance
    assert total.histogram == tuple(sum(r.acceptance.histogram[i] for r in batch) for i in range(K + 1))
    assert engine.stats().num_preemptions > 0


def test_what_came_since():
    assert Acceptance((5, 2, 1), 16).since(Acceptance((3, 2, 0), 10)) == Acceptance((2, 0, 1), 6)


def test_synthetic_acceptance_has_the_mean_that_was_asked_for():
    total = finished(MEAN)[0].stats().acceptance
    part = MEAN - 2
    sigma = (part * (1 - part) / total.num_steps) ** 0.5
    assert total.num_steps > 50
    assert abs(total.mean_length - MEAN) <= 3 * sigma
    first, second, third = total.rate_per_position
    assert (first, third) == (1, 0)
    assert abs(second - part) <= 3 * sigma


@pytest.mark.parametrize("synthetic", [None, MEAN])
def test_acceptance_is_the_same_alone_and_in_a_batch(synthetic):
    for known in finished(synthetic)[1][:2]:
        (again,) = [r for r in requests() if r.id == known.id]
        run(make_engine(k=K, synthetic=synthetic), [again])
        assert again.windows == known.windows
        np.testing.assert_array_equal(again.tokens, known.tokens)


def test_without_speculation_there_are_no_statistics():
    engine = make_mock_engine()
    (request,) = requests()[:1]
    run(engine, [request])
    assert request.acceptance is None
    assert engine.stats().acceptance is None
