"""A TLS connection until its handshake has ended: it counts among the open connections from its first moment on."""

import asyncio
import ssl
from typing import TYPE_CHECKING, cast

from serve.errors import ApiError

if TYPE_CHECKING:
    from serve.connection import Connection
    from serve.connection_table import ConnectionTable


class Handshake(asyncio.Protocol):
    """Makes TLS of a connection that has just been accepted, and hands it to the protocol of its requests.

    Left to the event loop, a handshake would be seen by nobody until it has ended: clients that never end theirs could
    take every descriptor. Needs asyncio's own loop: uvloop reads before a handshake can begin here.
    """

    def __init__(self, connection: "Connection", table: "ConnectionTable", context: ssl.SSLContext):
        self._connection = connection
        self._table = table
        self._context = context
        self._early = bytearray()  # requests that came together with the last word of the handshake
        self._task: asyncio.Task[None] | None = None

    # --- what asyncio calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.pause_reading()  # until TLS reads
        if self._table.admit(self):
            self._task = asyncio.get_running_loop().create_task(self._run())
        else:
            self.abort()  # no answer can be read before the handshake

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._table.forget(self)

    # --- what the table calls ---

    unsent = 0

    def check(self, now: float) -> None:
        """asyncio itself ends a handshake that takes too long."""

    def end(self, error: ApiError) -> None:  # noqa: ARG002 - the table's signature
        self.abort()

    def abort(self) -> None:
        self.transport.abort()

    # --- ---

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport = await loop.start_tls(
                self.transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._table.limits.header_timeout,
            )
        except OSError:  # no TLS, a certificate that is missing, too slow, or gone
            transport = None
        finally:
            self._table.forget(self)
        if transport is None or transport.is_closing():
            self.abort()
            return
        transport.set_protocol(self._connection)
        self._connection.connection_made(transport)
        if self._early:
            self._connection.data_received(bytes(self._early))
