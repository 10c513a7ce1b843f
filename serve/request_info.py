"""Which HTTP request the running code works for: set once by the middleware, read where a log line or a deadline needs it."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RequestInfo:
    """
    Attributes:
        id: as in the response's `x-request-id`.
        arrival: on the clock of `time.monotonic()`, when the request's head had been read.
    """

    id: str = "-"
    arrival: float = field(default_factory=time.monotonic)


_current: ContextVar[RequestInfo | None] = ContextVar("request_info", default=None)


def set_request_info(info: RequestInfo) -> None:
    """For the running task and those that it starts."""
    _current.set(info)


def request_info() -> RequestInfo:
    """Of the request that is being answered; outside any request one that has just arrived."""
    return _current.get() or RequestInfo()
