"""Watches that the event loop answers: one that does not can neither serve nor notice a stuck engine nor a signal."""

import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable

_MOST_INTERVAL = 1.0


class LoopWatch:
    """A thread that asks the loop for a sign of life, again and again.

    Counted are short intervals in which this process ran, as in `serve.step_watch`: a suspended process is not frozen.
    Code that never gives the interpreter back stops this thread as well.

    Args:
        timeout: seconds; a loop that does not answer for so long is frozen.
        on_frozen: called once, on the thread, with the timeout.
    """

    def __init__(self, loop: AbstractEventLoop, timeout: float, on_frozen: Callable[[float], None]):
        self._loop = loop
        self._timeout = timeout
        self._on_frozen = on_frozen
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        interval = min(self._timeout / 20, _MOST_INTERVAL)
        answered = threading.Event()
        answered.set()
        spent, last = 0.0, time.monotonic()
        while not self._stopped.wait(interval):
            now = time.monotonic()
            spent += min(now - last, 2 * interval)
            last = now
            if answered.is_set():
                spent = 0.0
                answered.clear()
                try:
                    self._loop.call_soon_threadsafe(answered.set)
                except RuntimeError:  # it has ended
                    return
            elif spent >= self._timeout:
                self._on_frozen(self._timeout)
                return
