"""Any other rank of a group: comes to rank 0, receives its orders and tells how far they are."""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator

from jaxspec.engine.channel import MOST_JSON_BYTES, Channel, Say, read_json
from jaxspec.engine.group import JOIN_SECONDS, LAST_SECONDS, ORDER_HEAD, PROGRESS, PROTOCOL, Facts, Group, complaint
from jaxspec.engine.orders import Chain, Order, decode
from jaxspec.errors import ConfigError, GroupError, JaxspecError
from jaxspec.nodes import Nodes
from jaxspec.progress import Progress

_RETRY_SECONDS = 0.2


class Follower(Group):
    """Any other rank.

    Attributes:
        finished: number of the newest order that this process is done with; told with each sign of life.
    """

    def __init__(self, nodes: Nodes):
        super().__init__(nodes)
        self._chain = Chain()
        self._received: queue.SimpleQueue[tuple[int, Order] | None] = queue.SimpleQueue()
        self._begin = threading.Semaphore(0)
        self._channel: Channel | None = None
        self._seen = self._chain.number, self._chain.digest  # of the newest order
        self.finished = 0

    def join(self, facts: Facts, progress: Progress | None = None, *, within: float = JOIN_SECONDS) -> None:
        """Comes to rank 0, which may start later, and waits until all have come.

        Raises:
            GroupError: it has not answered in time, or the group has ended. ConfigError: it refuses this process.
        """
        if progress:
            progress(0, 1, f"Waiting for process 0 of the group at {self.nodes.host}:{self.nodes.port}")
        hello = {
            "rank": self.nodes.rank,
            "count": self.nodes.count,
            "facts": {**facts, "protocol": str(PROTOCOL)},
        }
        deadline = time.monotonic() + within
        why = "it does not answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                sock = socket.create_connection((self.nodes.host, self.nodes.port), min(left, self.nodes.timeout))
            except OSError as error:
                why = str(error.strerror or error)
                time.sleep(_RETRY_SECONDS)
                continue
            if sock.getsockname() == sock.getpeername():  # a port that the system gives out may meet itself
                sock.close()
                continue
            channel = Channel(sock, self.nodes.timeout)
            try:
                channel.send_json(Say.HELLO, hello)
                self._channel = channel  # from here on rank 0 counts on this process
                kind, body = channel.read(most=MOST_JSON_BYTES, within=max(deadline - time.monotonic(), 1e-3))
            except GroupError as error:  # not there yet, or a proxy that is
                why = f"it {error}"
                self._channel = None
                channel.close()
                time.sleep(_RETRY_SECONDS)
                continue
            if kind is not Say.WELCOME:
                channel.close()
                raise self._turned_away(kind, body)
            self.start(self._hear, "node 0")
            self.start(self._beat, "beats of the group")
            return
        raise self.break_up(
            f"process 0 at {self.nodes.host}:{self.nodes.port} was not there within {within:g} s: {why}"
        )

    def _turned_away(self, what: Say, body: bytes) -> JaxspecError:
        """What rank 0 answers that lets nobody in."""
        if what is Say.REFUSED:
            return ConfigError(f"process 0 of the group refuses this one: {read_json(body).get('why')}")
        if what is Say.END:
            self._end()
            return GroupError("the group has ended before all had come")
        return self.break_up(f"process 0 {complaint(what, body)}")

    def meet(self, facts: Facts) -> None:
        """See `Leader.meet`."""
        self._talk().send_json(Say.READY, dict(facts))
        self._begin.acquire()
        self.check()

    def orders(self) -> Iterator[tuple[int, Order]]:
        """Orders with their numbers, until the group ends as it should.

        Raises:
            GroupError: it has ended otherwise.
        """
        while (received := self._received.get()) is not None:
            yield received
        if self.failure:
            raise self.failure

    @property
    def has_come(self) -> bool:
        """Whether rank 0 knows of this process, and would miss it."""
        return self._channel is not None

    def ask_to_stop(self) -> None:
        """This process should end: rank 0 lets the group finish what it has. Where rank 0 has gone that shows otherwise."""
        if (channel := self._channel) is not None:
            with contextlib.suppress(GroupError):
                channel.send(Say.STOP)

    def _talk(self) -> Channel:
        assert self._channel is not None, "not before `join`"
        return self._channel

    def _hear(self) -> None:
        channel = self._talk()
        try:
            while True:
                kind, body = channel.read()
                if kind is Say.ORDER:
                    self._take(body)
                elif kind is Say.BEGIN:
                    self._begin.release()
                elif kind is Say.END:
                    self._end()
                    break
                elif kind is not Say.BEAT:
                    raise complaint(kind, body)
        except (GroupError, ValueError, struct.error) as error:
            self.break_up(f"process 0 {error}")
        finally:
            channel.close()
        self._received.put(None)
        self._begin.release()

    def _end(self) -> None:
        """As it should."""
        with self.telling:
            self.ended.set()
        self.over.set()

    def _take(self, body: bytes) -> None:
        number, digest = ORDER_HEAD.unpack_from(body)
        data = body[ORDER_HEAD.size :]
        self._chain.add(data)
        if (number, digest) != (self._chain.number, self._chain.digest):
            raise GroupError(f"has sent other bytes than it says as order {number}: their hash differs")
        self._seen = number, digest
        self._received.put((number, decode(data)))

    def _beat(self) -> None:
        while not self.ended.wait(self.beat_seconds()):
            try:
                self._talk().send(Say.BEAT, PROGRESS.pack(self.finished, *self._seen))
            except GroupError as error:
                self.break_up(f"process 0 {error}")

    def tell_failure(self, why: str) -> None:
        self._received.put(None)
        self._begin.release()
        if self._channel is not None:
            self._channel.send_last(Say.FAILED, why.encode(), LAST_SECONDS)
