"""Logging of what any client can cause as often as it likes."""

import logging
import time
from collections.abc import Callable
from typing import Any

_SECONDS = 60.0
_MOST = 5


class LimitedLogger(logging.LoggerAdapter):
    """A logger that writes at most a few records of one message template a minute.

    The first record of a later minute says how many were left out.

    Args:
        clock: seconds, for tests.
    """

    # uvicorn asks for it before it formats a line about each connection.
    level = logging.INFO

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic):
        super().__init__(logger, {})
        self._clock = clock
        self._windows: dict[object, tuple[float, int]] = {}  # template -> start, number of records

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        now = self._clock()
        start, count = self._windows.get(msg, (now, 0))
        left_out = max(count - _MOST, 0)
        if now - start >= _SECONDS:
            if left_out:
                super().log(level, "%d more lines in %.0f s like the following one", left_out, now - start)
            start, count = now, 0
        self._windows[msg] = start, count + 1
        if count < _MOST:
            super().log(level, msg, *args, **kwargs)
