"""The server process: the port, the signals, the exit code."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import uvicorn
from fastapi import FastAPI

from jaxspec.errors import ConfigError, JaxspecError
from serve.app import create_app, route_names
from serve.connection_table import ACCEPT_BURST, raise_descriptor_limit
from serve.engine_thread import Phase
from serve.errors import unavailable
from serve.loop_watch import LoopWatch
from serve.model import Progress, ServedModel
from serve.service import ServerSettings, Service
from serve.step_watch import stack_of

if TYPE_CHECKING:
    from jaxspec.engine.leader import Leader

logger = logging.getLogger("jaxspec.serve")

BACKLOG = 2048
_DRAIN_POLL_SECONDS = 0.02
# The end of the time that a shutdown may take: for errors to those that still wait, and for the running step.
_CLOSING_SECONDS = 2.0
_LEAST_CLOSING_SECONDS = 1.0
# The same after a second signal.
_FORCED_SECONDS = 1.0
# For connections that are still open once every response is written or aborted.
_CLOSE_SECONDS = 1
_THREAD_SECONDS = 0.1


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Bound before the weights load, so that a port in use is an error at once.

    Raises:
        ConfigError: the address cannot be bound.
    """
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        # A restarted server can bind while old connections are in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # without this another listener could still bind it on Linux
    except OSError as e:
        if sock is not None:
            sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror or e}") from e
    return sock


def http_config(service: Service) -> uvicorn.Config:
    tls = service.settings.tls
    return uvicorn.Config(
        create_app(service),
        loop="asyncio" if tls else "auto",  # see `Handshake`
        http=cast(Any, service.connections.protocol(tls.context() if tls else None)),
        backlog=ACCEPT_BURST,
        ws="none",
        access_log=False,  # `serve.middleware` logs, with request ids
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=cast(int, service.settings.connections.keep_alive_timeout),
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )


def run_server(
    settings: ServerSettings,
    load: Callable[[Progress], ServedModel],
    sock: socket.socket,
    *,
    shutdown_timeout: float,
    on_ready: Callable[[ServedModel], None] = lambda _model: None,
    group: "Leader | None" = None,
) -> int:
    """Serves until a signal or the engine's death ends it; returns the exit code.

    Args:
        group: of processes that end together with this one.

    Raises:
        JaxspecError: the model cannot be loaded.
    """
    server: _Server

    def on_phase(phase: Phase) -> None:
        if phase is Phase.READY and service.engine_thread.model is not None:
            on_ready(service.engine_thread.model)
        elif phase is Phase.DEAD:
            server.drain(_DRAIN_AFTER_DEATH_SECONDS)

    raise_descriptor_limit()
    options: dict[str, Any] = {} if group is None else {"cause": group.cause}
    service = Service(settings, load, on_phase=on_phase, **options)
    config = http_config(service)
    logger.info("Routes: %s", ", ".join(route_names(cast(FastAPI, config.app))))
    server = _Server(config, service, shutdown_timeout)
    if group is not None:
        group.on_failure = server.from_thread(service.engine_thread.fail)
        group.on_stop = server.from_thread(lambda: server.stop("another process of the group is asked to end"))
    server.run(sockets=[sock])
    server.dismiss()
    failure = service.engine_thread.failure
    if failure is not None and group is not None:
        group.fail(failure)
    if isinstance(failure, JaxspecError):
        raise failure
    code = 1 if failure else server.exit_code
    if group is None and (service.engine_thread.alive or _has_busy_threads()):
        # A compilation, a stuck step, a long text: an orderly exit would wait for it, or crash.
        end_process(code)
    return code


# Requests in flight have failed already; this is the time to write that to their sockets.
_DRAIN_AFTER_DEATH_SECONDS = 1.0


def end_process(code: int) -> NoReturn:
    """At once, without the orderly end of the interpreter."""
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)


def _has_busy_threads() -> bool:
    """Threads that the interpreter would wait for at its end; idle ones get a moment to go."""
    deadline = time.monotonic() + _THREAD_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(deadline - time.monotonic(), 0))
            if thread.is_alive():
                return True
    return False


class _Server(uvicorn.Server):
    """uvicorn, except that the first signal drains: the port stays open and answers 503 until every request is done."""

    def __init__(self, config: uvicorn.Config, service: Service, shutdown_timeout: float):
        super().__init__(config)
        self._thread = threading.current_thread()  # whose event loop this is
        self._service = service
        self._shutdown_timeout = shutdown_timeout
        self._drain_task: asyncio.Task[None] | None = None
        self._signalled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_resort: threading.Timer | None = None
        self._loop_watch: LoopWatch | None = None
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(BACKLOG)  # asyncio takes few at a time, but those that come at once may wait in the system
        timeout = self._service.settings.engine_timeout
        if timeout is not None:
            self._loop_watch = LoopWatch(asyncio.get_running_loop(), timeout, self._frozen)
            self._loop_watch.start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own handlers raise the signal again at the end, which would change the exit code.
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        # The first one forces nothing, even where something else has begun a drain: another process of the group that was
        # asked to end at the same time, or the engine's death, which leaves a second at most.
        if self._drain_task is None or not self._signalled:
            self._signalled = True
            self.stop(f"{signal.Signals(sig).name}: finishing the requests in flight (again to stop at once)")
            return
        self.exit_code = 128 + sig
        self._end_within(_FORCED_SECONDS)
        self._drain_task.cancel()
        why = "the server has been stopped"
        self._drain_task = asyncio.get_running_loop().create_task(self._give_up(_FORCED_SECONDS / 2, why))

    def stop(self, why: str) -> None:
        """The server is asked to end."""
        logger.info("%s", why)
        self.drain(self._shutdown_timeout)

    def from_thread(self, function: Callable[..., None]) -> Callable[..., None]:
        """Calls it on the event loop; where that does not run yet or any more, not at all."""

        def call(*args: Any) -> None:
            with contextlib.suppress(RuntimeError):
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(function, *args)

        return call

    def drain(self, timeout: float) -> None:
        """Refuses new requests, waits for those in flight, then ends the server: all of it within `timeout` seconds.

        Ending takes up to a second, so that a shorter time is not kept.
        """
        if self._drain_task is None:
            self._service.draining = True
            closing = min(_CLOSING_SECONDS, timeout / 4)
            self._end_within(max(timeout, timeout - closing + _LEAST_CLOSING_SECONDS))
            self._drain_task = asyncio.get_running_loop().create_task(self._drain(timeout - closing, closing / 2))

    def dismiss(self) -> None:
        """The event loop has ended in time."""
        if self._last_resort is not None:
            self._last_resort.cancel()
        if self._loop_watch is not None:
            self._loop_watch.stop()

    async def _drain(self, timeout: float, patience: float) -> None:
        service = self._service
        if await _becomes_true(lambda: not service.in_flight and not service.connections.num_unsent, timeout):
            self.should_exit = True
            return
        logger.warning("%d requests did not finish within %g s", service.in_flight, timeout)
        await self._give_up(patience, "the server is shutting down")

    async def _give_up(self, patience: float, why: str) -> None:
        """Tells the clients that still wait, and ends whether or not they take notice."""
        service, error = self._service, unavailable(why)
        service.engine_stop_seconds = patience
        service.engine_thread.fail_all(error)
        await _becomes_true(lambda: not service.in_flight and not service.connections.num_unsent, patience / 2)
        service.connections.end_all(error)
        await _becomes_true(lambda: not service.in_flight and not service.connections.num_unsent, patience / 2)
        service.connections.abort_all()
        self.should_exit = True

    def _end_within(self, seconds: float) -> None:
        """The last resort is a thread: the event loop may be busy, or wait for a step, a template, a tokenizer."""
        if self._last_resort is not None:
            self._last_resort.cancel()
        self._last_resort = threading.Timer(seconds, self._exit_now)
        self._last_resort.daemon = True
        self._last_resort.start()

    def _frozen(self, seconds: float) -> None:
        """On the watch's thread: nobody can be told any more, but whoever started the process can start another."""
        logger.error(
            "the event loop has not answered for %g s (--engine-timeout); it is at\n%s",
            seconds,
            stack_of(self._thread),
        )
        end_process(1)

    def _exit_now(self) -> None:
        os._exit(1 if self._service.engine_thread.failure else self.exit_code)


async def _becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_DRAIN_POLL_SECONDS)
    return True
