"""How long a request may take, from its arrival: in all, and until its first step."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from serve.errors import ApiError, deadline_passed

T = TypeVar("T")


@dataclass(frozen=True)
class Deadlines:
    """Seconds; None: no limit."""

    request: float | None = None
    queue: float | None = None

    async def bound_waiting(self, work: Coroutine[Any, Any, T], arrival: float) -> T:
        """Work that comes before a request's first step.

        Raises:
            ApiError: 504: it took too long.
        """
        limits = [seconds for seconds in (self.request, self.queue) if seconds is not None]
        if not limits:
            return await work
        left = max(arrival + min(limits) - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(left) as scope:
                return await work
        except TimeoutError as e:
            if not scope.expired():
                raise
            if self.queue is not None and self.queue == min(limits):
                raise self.queued_too_long() from e
            raise self.took_too_long() from e

    def watch(
        self, arrival: float, *, has_started: Callable[[], bool], fail: Callable[[ApiError], None]
    ) -> list[asyncio.TimerHandle]:
        """Calls `fail` when a deadline passes; the timers are to be cancelled when the request ends before."""
        loop = asyncio.get_running_loop()
        past = time.monotonic() - arrival

        def check_queue() -> None:
            if not has_started():
                fail(self.queued_too_long())

        timers = []
        if self.request is not None:
            timers.append(loop.call_later(self.request - past, lambda: fail(self.took_too_long())))
        if self.queue is not None:
            timers.append(loop.call_later(self.queue - past, check_queue))
        return timers

    def took_too_long(self) -> ApiError:
        return deadline_passed(f"the request was not finished within {self.request:g} s (--request-timeout)")

    def queued_too_long(self) -> ApiError:
        return deadline_passed(f"the request did not start within {self.queue:g} s (--queue-timeout)")


NO_DEADLINES = Deadlines()
