"""Watches that engine steps end."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

# Of the timeout: from here on the server says that it is not healthy, and accepts nothing.
_SUSPICIOUS_PART = 0.4
_MOST_INTERVAL = 1.0


class StepWatch:
    """
    The engine thread tells when a step begins and ends, the event loop counts the time in between.

    Counted are short intervals in which this process ran: while it was suspended, or its clock jumped, no step was stuck.
    A compilation that has ended restarts the count: warm-up should have made it, but a step that compiles is not stuck.

    Args:
        timeout: seconds; None: no limit.
        compiles: number of compilations so far.
    """

    def __init__(self, timeout: float | None, compiles: Callable[[], int]):
        self._timeout = timeout
        self._compiles = compiles
        self._step = 0
        self._running = False
        self._spent = 0.0

    def step_begins(self) -> None:
        self._step += 1
        self._running = True

    def step_ends(self) -> None:
        self._running = False

    @property
    def suspicious(self) -> bool:
        """A step takes long, though perhaps not for ever."""
        return self._running and self._timeout is not None and self._spent > _SUSPICIOUS_PART * self._timeout

    async def run(self, on_stuck: Callable[[float], None]) -> None:
        """Until a step is stuck."""
        if self._timeout is None:
            return
        interval = min(self._timeout / 20, _MOST_INTERVAL)
        seen = (0, 0)
        last = time.monotonic()
        while self._spent < self._timeout:
            await asyncio.sleep(interval)
            now = time.monotonic()
            state = (self._step, self._compiles())
            self._spent = self._spent + min(now - last, 2 * interval) if self._running and state == seen else 0.0
            seen, last = state, now
        on_stuck(self._timeout)


def stack_of(thread: threading.Thread) -> str:
    """Where the thread is: names of files and functions, no values."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(ended)"
