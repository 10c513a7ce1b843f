"""Streams whose events have names, as those of the Responses and the Messages API."""

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from pydantic_core import to_json

from serve.answer import with_pings
from serve.errors import ApiError, as_api_error
from serve.generation import Choice, Delta, Generation

logger = logging.getLogger("jaxspec.serve")

NamedEvent = Mapping[str, Any]  # with its name as `type`


class Writer(Protocol):
    """Makes events of an output. `ping` is sent while there are none."""

    ping: bytes

    def opening(self) -> Iterable[NamedEvent]: ...

    def add(self, choice: Choice, delta: Delta) -> Iterable[NamedEvent]:
        """Of the newest output; with the last one also what ends the stream."""
        ...

    def failed(self, error: ApiError) -> Iterable[NamedEvent]: ...


async def named_events(generation: Generation, writer: Writer) -> AsyncGenerator[bytes, None]:
    try:
        for event in writer.opening():
            yield written(event)
        async with aclosing(with_pings(generation)) as deltas:
            async for news in deltas:
                if news is None:
                    yield writer.ping
                    continue
                for event in writer.add(*news):
                    yield written(event)
    except Exception as e:
        if not isinstance(e, ApiError):
            logger.exception("bug in a stream")
        for event in writer.failed(as_api_error(e)):
            yield written(event)


def written(event: NamedEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event))
