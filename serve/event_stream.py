"""An answer as server-sent events, each written as its output comes, for as long as the client keeps up."""

import collections
import logging
from collections.abc import Iterable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.connection import EVENTS_KEY
from serve.disconnect import until_disconnect
from serve.engine_thread import EngineThread
from serve.errors import ApiError, as_api_error
from serve.generation import Choice, Delta, Generation

logger = logging.getLogger("jaxspec.serve")

# Proxies close idle connections, and a long prompt may take longer than they wait.
PING_SECONDS = 15.0


class StreamWriter(Protocol):
    """Makes events of an output. `ping` is sent where there have been none for a while."""

    ping: bytes

    def opening(self) -> Iterable[bytes]:
        """Sent before any output."""
        ...

    def add(self, choice: Choice, delta: Delta) -> Iterable[bytes]:
        """Of the newest output, usually one; none where nothing is ready to be shown. What comes before an error is sent."""
        ...

    def ending(self) -> Iterable[bytes]:
        """After all output."""
        ...

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """In place of what is left."""
        ...


class EventSink(Protocol):
    """Where events go."""

    @property
    def keeps_up(self) -> bool:
        """The client has taken what was written, or has gone: then whatever is written is dropped."""
        ...

    def write_event(self, event: bytes) -> None:
        """Writes without waiting."""
        ...

    async def drain(self) -> None:
        """Waits until it keeps up."""
        ...


class _Messages:
    """The events of a connection that is another server's, as ASGI messages."""

    def __init__(self, send: Send):
        self._send, self._waiting = send, collections.deque[bytes]()

    @property
    def keeps_up(self) -> bool:
        return not self._waiting

    def write_event(self, event: bytes) -> None:
        self._waiting.append(event)

    async def drain(self) -> None:
        while self._waiting:
            await self._send({"type": "http.response.body", "body": self._waiting.popleft(), "more_body": True})


class _Written:
    """Takes a generation's output, and writes it."""

    def __init__(self, writer: StreamWriter, sink: EventSink):
        self._writer, self._sink = writer, sink

    @property
    def keeps_up(self) -> bool:
        return self._sink.keeps_up

    def take(self, choice: Choice, delta: Delta) -> None:
        for event in self._writer.add(choice, delta):
            self._sink.write_event(event)

    def ping(self) -> None:
        self._sink.write_event(self._writer.ping)

    async def drain(self) -> None:
        await self._sink.drain()


class EventStream(Response):
    """Server-sent events. While the client's side takes none, the engine's output is merged."""

    media_type = "text/event-stream"

    def __init__(self, engine: EngineThread, generation: Generation, writer: StreamWriter):
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._engine = engine
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_events(send, scope.get(EVENTS_KEY) or _Messages(send)))
        finally:
            self._engine.release(self._generation)

    async def _send_events(self, send: Send, sink: EventSink) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        writer = self._writer
        try:
            for event in writer.opening():
                sink.write_event(event)
            await self._generation.feed(_Written(writer, sink), PING_SECONDS)
            for event in writer.ending():
                sink.write_event(event)
        except Exception as e:
            if not isinstance(e, ApiError):
                logger.exception("bug in a stream")
            for event in writer.failed(as_api_error(e)):
                sink.write_event(event)
        await sink.drain()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
