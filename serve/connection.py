"""One HTTP connection: uvicorn's, with bounds on its time and its unread output, strict framing, and OpenAI's error body."""

import contextlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from serve.errors import ApiError, unavailable

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Receive, Scope, Send

    from serve.connection_table import ConnectionTable

# A body of more chunks than this must have chunks of some size: parsing each one costs far more than its bytes.
_MANY_CHUNKS = 1024
_LEAST_CHUNK_BYTES = 64
# A reader makes progress if it takes this much before the send timeout is over.
_PROGRESS_BYTES = 16 * 1024
# TLS ends with a word from both sides. A client that does not say it may not keep the connection.
_CLOSING_SECONDS = 1.0
# How long the client of a refused connection has to read why, before the socket is closed on its unread request.
_REFUSED_SECONDS = 1.0


# In an ASGI scope: the task of the handler, which is cancelled when its connection ends; and the `Connection`, for the events
# of a stream, which no middleware looks at.
TASK_KEY, EVENTS_KEY = "jaxspec.task", "jaxspec.events"


class StrictH11(h11.Connection):
    """h11, except that a request whose length can be read in two ways is an error (request smuggling), and that the chunks of
    an answer are framed here: h11 takes longer for one than it takes to write it.

    Attributes:
        num_requests: heads read so far.
    """

    def __init__(self, max_head_bytes: int, on_request: Callable[[], None]):
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes
        self._on_request = on_request
        self._num_chunks = self._num_bytes = 0
        self._answers_in_chunks = False
        self.num_requests = 0

    def frame(self, data: bytes) -> bytes:
        """A part of an answer's body, as it is sent."""
        if self._answers_in_chunks and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return super().send(h11.Data(data=data)) or b""

    def send(self, event: Any) -> bytes | None:  # type: ignore[override]
        if type(event) is h11.Data:
            return self.frame(event.data)
        sent = super().send(event)
        if type(event) is h11.Response:  # h11 has chosen the framing
            self._answers_in_chunks = sent is not None and b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.num_requests += 1
            self._num_chunks = self._num_bytes = 0
            self._on_request()
            # h11 itself bounds a head only as long as it is incomplete, and much may come at once.
            size = len(event.target) + sum(len(name) + len(value) for name, value in event.headers)
            if size > self._max_head_bytes:
                raise h11.RemoteProtocolError("the head is too big")
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length, or in HTTP/1.0")
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > max(_MANY_CHUNKS, self._num_bytes // _LEAST_CHUNK_BYTES):
                raise h11.RemoteProtocolError("the body's chunks are too small")
        return event


class SendWatch:
    """Whether a client takes its output: `_PROGRESS_BYTES`, or all that there is, within every `timeout` seconds."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._most = 0
        self._since = 0.0

    def is_stuck(self, unsent: int, now: float) -> bool:
        """Asked now and then. `unsent` bytes wait for the client at the time `now`."""
        if not unsent or not self._most or unsent <= self._most - _PROGRESS_BYTES:
            self._most, self._since = unsent, now
        self._most = max(self._most, unsent)
        return now - self._since > self._timeout


class Connection(H11Protocol):
    """A connection that its `ConnectionTable` checks every now and then."""

    def __init__(self, *args: Any, table: "ConnectionTable", **options: Any):
        super().__init__(*args, **options)
        self._table = table
        self._parser = StrictH11(table.limits.max_head_bytes, lambda: table.busy(self))
        self.conn = self._parser
        self.logger = table.log  # type: ignore[assignment]
        self._refused = False
        self._phase: tuple[str, int] | None = None
        self._phase_since = 0.0
        self._sending = SendWatch(table.limits.send_timeout)
        self._app, self.app = self.app, self._serve
        self._descriptor: int | None = None  # of the socket, where what is written to it goes to the client as it is

    # --- what asyncio and uvicorn call ---

    def connection_made(self, transport: "asyncio.Transport") -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.scheme == "http" and (sock := transport.get_extra_info("socket")) is not None:
            self._descriptor = sock.fileno()
        if self._table.admit(self):
            return
        self._refused = True
        self._write_error(unavailable("the server has as many connections as it accepts"))
        if transport.can_write_eof():
            transport.write_eof()
        if not self._table.may_linger(self):
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._descriptor = None  # soon another connection's
        self._table.forget(self)
        super().connection_lost(exc)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_handler()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._table.waiting(self)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text does not say what is wrong
        self.refuse(ApiError(400, "this is not a valid HTTP/1.1 request", code="invalid_http"))

    def timeout_keep_alive_handler(self) -> None:
        if self.unsent:
            self.abort()  # `close` would wait for the reader
        else:
            super().timeout_keep_alive_handler()

    def _should_upgrade(self) -> bool:
        return False  # the header is ignored, without uvicorn's two warnings for each request

    # --- what a stream calls ---

    @property
    def keeps_up(self) -> bool:
        """The client has taken what was sent to it, but for what the system and a small buffer hold, or has gone."""
        return not self.flow.write_paused or self.cycle.disconnected

    def write_event(self, event: bytes) -> None:
        """Sends a part of the body of the answer that runs; nothing if the client has gone.

        Where nothing else waits to be sent, the socket is written to here. uvloop's own write keeps Python's lock during the
        system call, which is half of what an event costs, and the engine's thread would wait for it.
        """
        if self.cycle.disconnected:
            return
        framed = self._parser.frame(event)
        transport = self.transport
        if self._descriptor is not None and not (transport.is_closing() or transport.get_write_buffer_size()):
            # What is wrong, if anything, the transport finds out.
            with contextlib.suppress(OSError):
                framed = framed[os.write(self._descriptor, framed) :]
        if framed:
            transport.write(framed)

    async def drain(self) -> None:
        """Waits until the client keeps up."""
        if not self.keeps_up:
            await self.flow.drain()

    # --- what the table calls ---

    @property
    def unsent(self) -> int:
        """Bytes that the client's side has not taken."""
        return self.transport.get_write_buffer_size()

    def check(self, now: float) -> None:
        """Ends the connection if its client is too slow."""
        limits = self._table.limits
        if self._sending.is_stuck(self.unsent, now):
            self._table.log.warning(
                "%s takes no output for %g s (--send-timeout): connection closed", self._peer, limits.send_timeout
            )
            self.abort()
            return
        phase = (self._phase_name(), self._parser.num_requests)
        if phase != self._phase:
            self._phase, self._phase_since = phase, now
        waited = now - self._phase_since
        if phase[0] == "head" and waited > limits.header_timeout:
            if self.conn.trailing_data[0]:
                self.refuse(_too_late("head", limits.header_timeout, "--header-timeout"))
            else:
                self.transport.close()
        elif phase[0] == "body" and waited > limits.body_timeout:
            self.refuse(_too_late("body", limits.body_timeout, "--body-timeout"))
        elif phase[0] == "closing" and not self.unsent and waited > _CLOSING_SECONDS:
            self.abort()
        elif phase[0] == "refused" and waited > _REFUSED_SECONDS:
            self.transport.close()

    def end(self, error: ApiError) -> None:
        """At shutdown: says why where no response has begun. A response that has begun may end by itself."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering or not self.cycle.response_started:
            self.refuse(error) if answering else self.transport.close()

    def refuse(self, error: ApiError) -> None:
        """Answers in place of the application, where nothing has been answered yet, and closes the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # whatever the application still sends is dropped
            self.cycle.message_event.set()
            self._cancel_handler()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write_error(error)
            self.transport.close()
        else:
            self.abort()

    def abort(self) -> None:
        self.transport.abort()

    # --- ---

    async def _serve(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        scope[EVENTS_KEY] = self
        await self._app(scope, receive, send)

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else "a client"

    def _phase_name(self) -> str:
        """What the connection waits for. uvicorn itself closes one that is idle between two requests."""
        if self.transport.is_closing():
            return "closing"
        if self._refused:
            return "refused"
        if self.conn.their_state is h11.SEND_BODY:  # also after an early answer, such as 413
            return "body"
        if self.cycle is None:
            return "head"
        if not self.cycle.response_complete:
            return "answer"
        return "head" if self.conn.trailing_data[0] else "idle"

    def _cancel_handler(self) -> None:
        scope: dict[str, Any] = {**self.scope} if self.scope else {}
        if (task := scope.get(TASK_KEY)) is not None:
            task.cancel()

    def _write_error(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        headers = {
            **(error.headers or {}),
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        for event in (
            h11.Response(status_code=error.status_code, headers=list(headers.items())),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")


def _too_late(part: str, seconds: float, flag: str) -> ApiError:
    return ApiError(408, f"the request's {part} did not arrive within {seconds:g} s ({flag})", code="request_timeout")
