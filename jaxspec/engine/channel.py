"""Messages between the processes of a group, over one TCP connection each: a kind, a length, bytes. Nothing is executed.

Every wait has a limit: a read that hears nothing for the channel's timeout, and a write that the other side does not take,
are the end of the other side.
"""

import contextlib
import enum
import json
import select
import socket
import struct
import threading
import time
from typing import Any

from jaxspec.errors import GroupError


class Say(enum.IntEnum):
    """Kinds of messages.

    HELLO, WELCOME, REFUSED: who comes, and the answer. READY, BEGIN: its steps are compiled; all are so. ORDER: of rank 0.
    BEAT: a sign of life; of others, how far they are. STOP: a process is asked to end. END: of the group, as it should be.
    FAILED: of the group, as it should not.
    """

    HELLO, WELCOME, REFUSED, READY, BEGIN, ORDER, BEAT, STOP, END, FAILED = range(1, 11)


# Who comes tells little; masks of all slots are the largest orders.
MOST_JSON_BYTES = 1 << 16
MOST_BYTES = 1 << 28
_HEAD = struct.Struct("<BI")
_KINDS = frozenset(map(int, Say))


class Channel:
    """One connection.

    Args:
        timeout: seconds that a read waits for the next bytes, and a write for the other side to take all of its own.
    """

    def __init__(self, sock: socket.socket, timeout: float):
        self._sock = sock
        self.timeout = timeout
        self._writing = threading.Lock()
        sock.settimeout(timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, what: Say, body: bytes = b"") -> None:
        """
        Raises:
            GroupError: the other side has gone, or takes nothing.
        """
        try:
            with self._writing:
                self._sock.sendall(_HEAD.pack(what, len(body)) + body)
        except TimeoutError:
            raise GroupError(f"takes no message within {self.timeout:g} s") from None
        except OSError as error:
            raise GroupError(f"has closed the connection ({error.strerror or error})") from None

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    def send_last(self, what: Say, body: bytes, within: float) -> None:
        """As `send`, in a short time, and to a side that may have gone or take nothing."""
        if self._writing.acquire(timeout=within):
            try:
                self.timeout = within
                self._sock.settimeout(within)
                self._sock.sendall(_HEAD.pack(what, len(body)) + body)
            except OSError:
                pass
            finally:
                self._writing.release()

    def send_json(self, what: Say, value: Any) -> None:
        self.send(what, json.dumps(value).encode())

    def read(self, *, most: int = MOST_BYTES, within: float | None = None) -> tuple[Say, bytes]:
        """The next message.

        Args:
            most: bytes that it may have.
            within: seconds for all of it; None: each wait for bytes may take the channel's timeout.

        Raises:
            GroupError: the other side has gone, is silent, or talks of something else.
        """
        deadline = None if within is None else time.monotonic() + within
        kind, length = _HEAD.unpack(self._exactly(_HEAD.size, deadline))
        if length > most or kind not in _KINDS:
            raise GroupError("speaks another protocol")
        return Say(kind), self._exactly(length, deadline)

    def _exactly(self, count: int, deadline: float | None) -> bytes:
        data = bytearray(count)
        rest = memoryview(data)
        try:
            while rest:
                if deadline is not None:
                    self._sock.settimeout(max(deadline - time.monotonic(), 1e-3))
                received = self._sock.recv_into(rest)
                if not received:
                    raise GroupError("has closed the connection")
                rest = rest[received:]
        except TimeoutError:
            raise GroupError("has been silent for too long") from None
        except OSError as error:
            raise GroupError(f"has closed the connection ({error.strerror or error})") from None
        finally:
            with contextlib.suppress(OSError):  # closed by another thread: the error above says so
                self._sock.settimeout(self.timeout)
        return bytes(data)

    def has_ended(self) -> bool:
        """Whether the other side has closed it, as far as is known and nothing is left to read."""
        try:
            readable, _, _ = select.select([self._sock], [], [], 0)
            return bool(readable) and not self._sock.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        self._sock.close()


def read_json(body: bytes) -> dict[str, Any]:
    """
    Raises:
        GroupError: it is no object.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise GroupError("speaks another protocol")
    return value
