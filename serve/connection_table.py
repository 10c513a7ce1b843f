"""All connections of the server: how many there may be, how long each may take, how much may be unread in all."""

import asyncio
import functools
import logging
import resource
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from serve.connection import Connection
from serve.errors import ApiError
from serve.handshake import Handshake
from serve.limits import BODY_TIMEOUT, HEADER_TIMEOUT, KEEP_ALIVE_TIMEOUT, MAX_CONNECTIONS, SEND_TIMEOUT
from serve.log_limit import LimitedLogger

logger = logging.getLogger("jaxspec.http")

# Descriptors that are left for everything else: files, and connections between `accept` and their refusal.
RESERVED_DESCRIPTORS = 64
# How many connections asyncio accepts in each turn of its loop. One that is refused has its descriptor for four turns.
ACCEPT_BURST = RESERVED_DESCRIPTORS // 8
_LINGERING = 16
# A client sends its first request at once: one that has not for so long can make room for another.
_EVICTABLE_SECONDS = 1.0
_WANTED_DESCRIPTORS = 65536

AnyConnection = Connection | Handshake


@dataclass(frozen=True)
class ConnectionLimits:
    """Times in seconds.

    Attributes:
        max_connections: further ones get 503, or are closed if they want TLS, unless an idle one can be closed for them.
            The process's limit of descriptors may be lower, and is respected.
        header_timeout: for a TLS handshake, and for the whole head of a request, from the connection or the head's first
            byte on.
        body_timeout: for the whole body.
        keep_alive_timeout: between two requests.
        send_timeout: in which a client must take 16 KiB, or all that there is for it.
        max_unsent_bytes: over all connections; beyond, the one with most is closed.
        max_head_bytes: of a request.
    """

    max_connections: int = MAX_CONNECTIONS
    header_timeout: float = HEADER_TIMEOUT
    body_timeout: float = BODY_TIMEOUT
    keep_alive_timeout: float = KEEP_ALIVE_TIMEOUT
    send_timeout: float = SEND_TIMEOUT
    max_unsent_bytes: int = 256 * 2**20
    max_head_bytes: int = 16 * 2**10


class ConnectionTable:
    """Lives on the event loop.

    Attributes:
        log: for what clients can cause as often as they like.
    """

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits
        self.log = LimitedLogger(logger)
        self._open: set[AnyConnection] = set()
        self._lingering: set[AnyConnection] = set()
        self._waiting: OrderedDict[AnyConnection, float] = OrderedDict()  # for a request, since; the oldest first
        self._sweeping = False
        shortest = min(limits.header_timeout, limits.body_timeout, limits.send_timeout)
        self._interval = min(max(shortest / 4, 0.02), 1.0)

    def protocol(self, tls: ssl.SSLContext | None) -> Callable[..., AnyConnection]:
        """What makes a connection, with uvicorn's arguments."""
        make = functools.partial(Connection, table=self)
        return make if tls is None else lambda **options: Handshake(make(**options), self, tls)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_unsent(self) -> int:
        """Connections whose clients have not taken all output."""
        return sum(connection.unsent > 0 for connection in self._open)

    def admit(self, connection: AnyConnection) -> bool:
        """Whether there is room for it. The longest idle connection makes room if need be."""
        self._sweep_soon()
        if self._is_full(connection) and not self._evict():
            self.log.warning(
                "%d connections are open, and there may be no more (--max-connections %d, %d descriptors): others are refused",
                len(self._open),
                self.limits.max_connections,
                descriptor_limit(),
            )
            return False
        self._open.add(connection)
        self.waiting(connection)
        return True

    def waiting(self, connection: AnyConnection) -> None:
        """For its first or next request."""
        if connection in self._open:
            self._waiting[connection] = time.monotonic()
            self._waiting.move_to_end(connection)

    def busy(self, connection: AnyConnection) -> None:
        self._waiting.pop(connection, None)

    def may_linger(self, connection: AnyConnection) -> bool:
        """Whether a refused connection may stay open until its client has read why."""
        if len(self._lingering) >= _LINGERING:
            return False
        self._lingering.add(connection)
        return True

    def forget(self, connection: AnyConnection) -> None:
        self._open.discard(connection)
        self._lingering.discard(connection)
        self._waiting.pop(connection, None)

    def end_all(self, error: ApiError) -> None:
        """Tells every client that waits for an answer, and closes all connections but those with a response under way."""
        for connection in list(self._open):
            connection.end(error)

    def abort_all(self) -> None:
        for connection in [*self._open, *self._lingering]:
            connection.abort()

    def _is_full(self, connection: AnyConnection) -> bool:
        if len(self._open) >= self.limits.max_connections:
            return True
        # The system gives the lowest free number, so this is also a bound on how many are in use.
        sock = connection.transport.get_extra_info("socket")
        return sock is not None and sock.fileno() >= descriptor_limit() - RESERVED_DESCRIPTORS

    def _evict(self) -> bool:
        oldest, since = next(iter(self._waiting.items()), (None, 0.0))
        if oldest is None or time.monotonic() - since < _EVICTABLE_SECONDS:
            return False
        self.forget(oldest)
        oldest.abort()
        return True

    def _sweep_soon(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            asyncio.get_running_loop().call_later(self._interval, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = False
        connections = [*self._open, *self._lingering]
        if connections:
            self._sweep_soon()
        now = time.monotonic()
        for connection in connections:
            connection.check(now)
        unsent = {c: c.unsent for c in self._open}
        while sum(unsent.values()) > self.limits.max_unsent_bytes:
            worst = max(unsent, key=lambda c: unsent[c])
            self.log.warning(
                "clients leave %d bytes unread: the slowest one's connection is closed", sum(unsent.values())
            )
            worst.abort()
            del unsent[worst]


def descriptor_limit() -> int:
    """How many descriptors the process may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """As far as the process may, up to what any server needs: shells often leave it at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
