"""The histogram of token gaps against prometheus_client's own."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from serve.token_gaps import TokenGaps

BOUNDS = (0.001, 0.01, 0.5, 2.5, 10)
LABELS = {"model_name": "m", "engine": "0"}


def lines(registry: CollectorRegistry) -> list[str]:
    """What a scrape shows, without the time of creation."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from([0.0, *BOUNDS, 0.25, 3.0, 1000.0]), st.integers(1, 4))))
def test_as_the_librarys_histogram(gaps):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = TokenGaps("gap_seconds", "Between tokens", LABELS, BOUNDS)
    ours.register(fast)
    slow = Histogram("gap_seconds", "Between tokens", list(LABELS), buckets=BOUNDS, registry=theirs).labels(**LABELS)
    for seconds, count in gaps:
        fast.add(seconds, count)
        for _ in range(count):
            slow.observe(seconds)
    shown, expected = ([line for line in lines(each) if "_sum" not in line] for each in (ours, theirs))
    assert shown == expected
    (total,), (right,) = (
        [float(line.split()[-1]) for line in lines(each) if "_sum" in line] for each in (ours, theirs)
    )
    assert abs(total - right) <= 1e-9 * right
