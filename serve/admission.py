"""Bounded waiting: how many choices may be on their way to the engine or wait there for their first step.

A choice counts from the moment when its request has been read, before tokenisation, until the engine first schedules
it or its HTTP request ends. One that has run and was preempted does not count: its client is being served.
"""

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from jaxspec.errors import InvalidRequestError
from serve.errors import RETRY_AFTER_SECONDS, rate_limited
from serve.metrics import Metrics

# Of so many choices the rate is known at which the queue moves.
_REMEMBERED = 256


class Admission:
    """Lives on the event loop, where checking for room and taking it are one step.

    Args:
        limit: most choices that may wait.
        submitted: how many of the choices that the engine thread has been given wait for their first step.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        limit: int,
        submitted: Callable[[], int],
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limit = limit
        self._submitted = submitted
        self._metrics = metrics
        self._clock = clock
        self._reserved = 0
        # On a clock that stands still while nothing waits: an idle hour says nothing about the queue's pace.
        self._starts: deque[float] = deque(maxlen=_REMEMBERED)
        self._idle_seconds = 0.0

    def started(self, count: int) -> None:
        """So many choices have left the queue for their first step."""
        self._starts.extend([self._busy_time()] * count)

    def seconds_until_room(self, count: int) -> float:
        """About how long it takes until `count` choices fit, if the queue moves as it did lately."""
        missing = self.num_queued + count - self._limit
        if not self._starts:
            return RETRY_AFTER_SECONDS
        # Time without any start counts too: a queue that stands still promises nothing.
        return missing * (self._busy_time() - self._starts[0]) / len(self._starts)

    def _busy_time(self) -> float:
        return self._clock() - self._idle_seconds

    @property
    def num_queued(self) -> int:
        return self._reserved + self._submitted()

    def reserve(self, count: int) -> "Reservation":
        """Room for `count` choices.

        Raises:
            ApiError: 429: there is not enough of it now.
            InvalidRequestError: there never will be.
        """
        if count > self._limit:
            raise InvalidRequestError(
                f"the request asks for {count} outputs (prompts times n), but at most {self._limit} may be queued",
                param="n",
            )
        queued = self.num_queued
        if not queued and self._starts:
            self._idle_seconds += self._busy_time() - self._starts[-1]
        if queued + count > self._limit:
            self._metrics.record_rejection()
            raise rate_limited(
                f"the queue is full: {queued} outputs wait, {count} more were asked for, and at most {self._limit} "
                "may be queued; try again later",
                self.seconds_until_room(count),
            )
        self._reserved += count
        return Reservation(count, self._give_back)

    def _give_back(self, count: int) -> None:
        self._reserved -= count


class Reservation:
    """Room that a request holds until the engine thread counts its choices, or until it leaves its `with` block."""

    def __init__(self, count: int, give_back: Callable[[int], None]):
        self._count = count
        self._give_back = give_back

    def release(self) -> None:
        """Later calls have no effect."""
        count, self._count = self._count, 0
        self._give_back(count)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
