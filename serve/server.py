"""The server process: the port, the signals, the exit code."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from jaxspec.errors import ConfigError, JaxspecError
from serve.app import create_app
from serve.engine_thread import Phase
from serve.errors import unavailable
from serve.model import Progress, ServedModel
from serve.service import ServerSettings, Service

logger = logging.getLogger("jaxspec.serve")

_DRAIN_POLL_SECONDS = 0.05
# For connections that are still open once every response is written or aborted.
_CLOSE_SECONDS = 5


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Bound before the weights load, so that a port in use is an error at once.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        # A restarted server can bind while old connections are in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)  # without this another listener could still bind it on Linux
    except OSError as e:
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror or e}") from e
    return sock


def http_config(service: Service) -> uvicorn.Config:
    tls = service.settings.tls
    return uvicorn.Config(
        create_app(service),
        http="h11",  # of uvicorn's parsers the one that limits the size of headers
        ws="none",
        access_log=False,  # `serve.middleware` logs, with request ids
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # longer than clients keep idle connections, so that they close first
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        **(tls.uvicorn_options() if tls else {}),
    )


def run_server(
    settings: ServerSettings,
    load: Callable[[Progress], ServedModel],
    sock: socket.socket,
    *,
    shutdown_timeout: float,
    on_ready: Callable[[ServedModel], None] = lambda _model: None,
) -> int:
    """Serves until a signal or the engine's death ends it; returns the exit code.

    Raises:
        JaxspecError: the model cannot be loaded.
    """
    server: _Server

    def on_phase(phase: Phase) -> None:
        if phase is Phase.READY and service.engine_thread.model is not None:
            on_ready(service.engine_thread.model)
        elif phase is Phase.DEAD:
            server.drain(_DRAIN_AFTER_DEATH_SECONDS)

    service = Service(settings, load, on_phase=on_phase)
    server = _Server(http_config(service), service, shutdown_timeout)
    server.run(sockets=[sock])
    failure = service.engine_thread.failure
    if isinstance(failure, JaxspecError):
        raise failure
    code = 1 if failure else server.exit_code
    if service.engine_thread.alive:
        # The engine thread is in a compilation or a stuck step: an orderly exit would wait for it, or crash.
        sys.stdout.flush()
        logging.shutdown()
        os._exit(code)
    return code


# Requests in flight have failed already; this is the time to write that to their sockets.
_DRAIN_AFTER_DEATH_SECONDS = 1.0


class _Server(uvicorn.Server):
    """uvicorn, except that the first signal drains: the port stays open and answers 503 until every request is done."""

    def __init__(self, config: uvicorn.Config, service: Service, shutdown_timeout: float):
        super().__init__(config)
        self._service = service
        self._shutdown_timeout = shutdown_timeout
        self._drain_task: asyncio.Task[None] | None = None
        self.exit_code = 0

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
        if self._drain_task is None:
            logger.info("%s: finishing the requests in flight (again to stop at once)", signal.Signals(sig).name)
            self.drain(self._shutdown_timeout)
        else:
            self.exit_code = 128 + sig
            self._service.engine_stop_seconds = 0.0
            self._service.engine_thread.fail_all(unavailable("the server has been stopped"))
            self.should_exit = True

    def drain(self, timeout: float) -> None:
        """Refuses new requests, waits for those in flight, then ends the server."""
        if self._drain_task is None:
            self._service.draining = True
            self._drain_task = asyncio.get_running_loop().create_task(self._drain(timeout))

    async def _drain(self, timeout: float) -> None:
        async def empty() -> None:
            while self._service.in_flight:
                await asyncio.sleep(_DRAIN_POLL_SECONDS)

        try:
            await asyncio.wait_for(empty(), timeout)
        except TimeoutError:
            logger.warning("%d requests did not finish within %g s", self._service.in_flight, timeout)
            self._service.engine_thread.fail_all(unavailable("the server is shutting down"))
        self.should_exit = True
