"""How many KV slots a decode step may touch, whatever drafts the steps before it had."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.scheduler import reserved_slots


@given(
    known=st.integers(1, 500), held=st.integers(0, 7), allowed=st.integers(0, 7),
    steps=st.lists(st.integers(0, 7), min_size=1, max_size=4),
)  # fmt: skip
def test_reserved_slots_is_the_exact_maximum(known, held, allowed, steps):
    """Simulates the worst case of any sequence of drafts a step: every dispatched step accepts all that it may."""
    anchor, unread = known - 1, 0  # the newest token's KV is not written yet
    for k in steps:
        verified = min(k, held, allowed)
        reserved = reserved_slots(known, k=k, verified=verified, unread_most=unread)
        deepest = anchor + k + 1  # verify writes [anchor, anchor + k + 1)
        anchor += verified + 1
        unread += verified + 1
        if k:
            deepest = max(deepest, anchor + k - 1)  # k - 1 draft steps after the accepted window
        held = k
        assert reserved == deepest


@pytest.mark.parametrize(("k", "depth"), [(k, depth) for k in (0, 1, 3, 7) for depth in range(4)])
def test_reserved_slots_with_one_number_of_drafts(k, depth):
    """The closed form of docs/architecture.md."""
    wanted = 100 + depth if k == 0 else max(100 + (depth + 1) * k + depth, 100 + (depth + 1) * (k + 1) + k - 2)
    assert reserved_slots(100, k=k, verified=k, unread_most=depth * (k + 1)) == wanted
