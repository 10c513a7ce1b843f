"""When the prompts of several ranks begin."""

from collections.abc import Sequence
from typing import Protocol

from jaxspec.engine.request import Request, RequestState


class Rank(Protocol):
    """What is asked of a rank's `Scheduler`."""

    running: list[Request]

    @property
    def can_begin(self) -> bool:
        """Whether a waiting request may get a slot, if there are pages for it."""
        ...


class PrefillDelay:
    """Lets the prompts of several ranks begin in the same step.

    A step lasts as long as the rank with the most to do. Where one rank's prompt runs while others only decode, these wait for
    it, and in the next step it may be the other way round. So new prompts wait, while requests decode, until every rank has
    one; but not where the step has prompt tokens in any case, as of a prompt in chunks: two ranks that were a chunk apart would
    otherwise wait for each other by turns.

    Args:
        most_steps: for so many steps in a row prompts wait, no longer.
    """

    def __init__(self, most_steps: int):
        self._most = most_steps
        self._waited = 0

    def holds(self, ranks: Sequence[Rank]) -> bool:
        """Whether prompts wait in the next step, in which there are rows that decode."""
        begin = [rank.can_begin for rank in ranks]
        started = any(r.state is RequestState.PREFILL for rank in ranks for r in rank.running)
        if started or not any(begin) or all(begin) or self._waited >= self._most:
            self._waited = 0
            return False
        self._waited += 1
        return True
