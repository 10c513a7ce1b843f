"""Free ports, and a TCP proxy that tests cut: it stops to forward and closes nothing, or it changes a byte."""

import contextlib
import random
import select
import socket
import threading


def free_ports(count: int = 1) -> int:
    """The first of so many neighbouring ports that nobody uses, and that the system does not give to connections."""
    while True:
        first = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


class CutProxy:
    """Forwards connections to a port of this machine.

    Attributes:
        port: where it listens.
        silent: nothing is forwarded any more, in either direction, and nothing is closed.
        flip: of the next bytes that go to the listening side's client, one is changed.
    """

    def __init__(self, target: int, port: int = 0):
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.silent = self.flip = False
        self._closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        with client, server, contextlib.suppress(OSError):
            while not self._closing:
                ready, _, _ = select.select([client, server], [], [], 0.1)
                if self.silent:
                    ready and threading.Event().wait(0.05)
                    continue
                for source in ready:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if self.flip and source is server and len(data) > 200:
                        self.flip = False
                        data = data[:-1] + bytes([data[-1] ^ 1])
                    (server if source is client else client).sendall(data)

    def close(self) -> None:
        self._closing = True
        self._listener.close()
