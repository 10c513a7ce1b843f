"""Bounded waiting: how many choices may be on their way to the engine or wait there for their first step.

A choice counts from the moment when its request has been read, before tokenisation, until the engine first schedules
it or its HTTP request ends. One that has run and was preempted does not count: its client is being served.
"""

from collections.abc import Callable
from types import TracebackType

from jaxspec.errors import InvalidRequestError
from serve.errors import rate_limited
from serve.metrics import Metrics


class Admission:
    """Lives on the event loop, where checking for room and taking it are one step.

    Args:
        limit: most choices that may wait.
        submitted: how many of the choices that the engine thread has been given wait for their first step.
    """

    def __init__(self, limit: int, submitted: Callable[[], int], metrics: Metrics):
        self._limit = limit
        self._submitted = submitted
        self._metrics = metrics
        self._reserved = 0

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
        if queued + count > self._limit:
            self._metrics.record_rejection()
            raise rate_limited(
                f"the queue is full: {queued} outputs wait, {count} more were asked for, and at most {self._limit} "
                "may be queued; try again later"
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
