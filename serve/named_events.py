"""Streams whose events have names, as those of the Responses and the Messages API."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from pydantic_core import to_json

from serve.errors import ApiError
from serve.generation import Choice, Delta

NamedEvent = Mapping[str, Any]  # with its name as `type`


class Writer(Protocol):
    """Makes events of an output. `ping` is sent while there are none."""

    ping: bytes

    def opening(self) -> Iterable[NamedEvent]: ...

    def add(self, choice: Choice, delta: Delta) -> Iterable[NamedEvent]:
        """Of the newest output; with the last one also what ends the stream."""
        ...

    def failed(self, error: ApiError) -> Iterable[NamedEvent]: ...


class NamedEvents:
    """A `StreamWriter` of such a writer's events."""

    def __init__(self, writer: Writer):
        self._writer, self.ping = writer, writer.ping

    def opening(self) -> Iterable[bytes]:
        return map(_written, self._writer.opening())

    def add(self, choice: Choice, delta: Delta) -> Iterable[bytes]:
        return map(_written, self._writer.add(choice, delta))

    def ending(self) -> Iterable[bytes]:
        return ()

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return map(_written, self._writer.failed(error))


def _written(event: NamedEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event))
