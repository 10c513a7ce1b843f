"""Rank 0 of a group: lets the others in, sends them its orders and watches them."""

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxspec.engine.channel import MOST_JSON_BYTES, Channel, Say, read_json
from jaxspec.engine.group import (
    JOIN_SECONDS,
    LAST_SECONDS,
    ORDER_HEAD,
    PROGRESS,
    PROTOCOL,
    Facts,
    Group,
    complaint,
    difference,
    logger,
)
from jaxspec.engine.orders import Chain, Order, encode
from jaxspec.errors import ConfigError, GroupError, shown
from jaxspec.nodes import Nodes
from jaxspec.progress import Progress

# For one to say who it is.
_HELLO_SECONDS = 5.0
# While it waits for the others it looks so often whether the group has ended meanwhile.
_LOOK_SECONDS = 0.5
# For the others to take note of the end.
_END_SECONDS = 2.0


class _Member:
    """Another process, as rank 0 sees it."""

    def __init__(self, rank: int, channel: Channel):
        self.rank, self.channel = rank, channel
        self.ready: dict[str, Any] | None = None
        self.finished = 0  # orders
        self.gone = threading.Event()


class Leader(Group):
    """Rank 0. Listens from the start, so that a port in use is an error at once.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, nodes: Nodes):
        super().__init__(nodes)
        self._listener = _listen(nodes.host, nodes.port)
        self._members: dict[int, _Member] = {}
        self._chain = Chain()
        self._unseen: dict[int, bytes] = {}  # digests of orders that some have yet to receive
        self._unfinished: dict[int, float] = {}  # when orders were sent that some have yet to finish
        self._counting = threading.Condition()

    def join(self, facts: Facts, progress: Progress | None = None, *, within: float = JOIN_SECONDS) -> None:
        """Waits until every other process has come, and lets nobody else in. One that ends meanwhile may come again.

        Args:
            facts: of this process, which all must share.

        Raises:
            GroupError: some have not come in time, or the group has ended: one of them may have been asked to.
        """
        deadline = time.monotonic() + within
        said: list[int] = []
        try:
            while missing := [rank for rank in range(1, self.nodes.count) if rank not in self._members]:
                if progress and missing != said:
                    progress(len(self._members), self.nodes.count - 1, f"Waiting for processes {missing} of the group")
                said = missing
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.break_up(f"processes {missing} have not come within {within:g} s")
                self._attend(facts, min(left, _LOOK_SECONDS))
                self.check()
        finally:
            self._listener.close()
            for member in self._members.values():  # if only until those that are told of the end have gone
                self.start(lambda m=member: self._hear(m), f"node {member.rank}")  # type: ignore[misc]
        for member in self._members.values():
            self._send(member, Say.WELCOME)
        self.start(self._beat, "beats of the group")

    def _attend(self, facts: Facts, seconds: float) -> None:
        """Waits so long for somebody to come, or for one that has come to say something."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for member in self._members.values():
                selector.register(member.channel, selectors.EVENT_READ, member)
            ready = [key.data for key, _ in selector.select(seconds)]
        for member in filter(None, ready):
            try:
                self._take(member, *member.channel.read(most=MOST_JSON_BYTES, within=_HELLO_SECONDS))
            except (GroupError, struct.error) as error:
                logger.warning("process %d of the group %s before all have come", member.rank, error)
                self._members.pop(member.rank).channel.close()
        if None in ready:
            with contextlib.suppress(TimeoutError):  # it has gone again
                sock, peer = self._listener.accept()
                self._admit(Channel(sock, self.nodes.timeout), peer[0], facts)

    def _admit(self, channel: Channel, peer: str, facts: Facts) -> None:
        try:
            kind, body = channel.read(most=MOST_JSON_BYTES, within=_HELLO_SECONDS)
            if kind is not Say.HELLO:
                raise GroupError("speaks another protocol")
            hello = read_json(body)
            rank = hello.get("rank")
            problem = self._obstacle(rank, hello, facts)
            if problem:
                channel.send_json(Say.REFUSED, {"why": problem})
                raise GroupError(f"is refused as process {shown(rank)}: {problem}")
        except GroupError as error:
            logger.warning("%s %s", peer, error)
            channel.close()
            return
        assert isinstance(rank, int)
        if rank in self._members:
            self._members[rank].channel.close()  # of a process that has ended, see `_obstacle`
        self._members[rank] = _Member(rank, channel)
        logger.info("process %d of the group has come from %s", rank, peer)

    def _obstacle(self, rank: Any, hello: Mapping[str, Any], facts: Facts) -> str | None:
        count = self.nodes.count
        if hello.get("count") != count:
            return f"it has --nnodes {shown(hello.get('count'))} where process 0 has {count}"
        if type(rank) is not int or not 0 < rank < count:
            return f"--node-rank {shown(rank)} is not between 1 and {count - 1}"
        if rank in self._members and not self._members[rank].channel.has_ended():
            return f"there is a process with --node-rank {rank} already"
        return difference({**facts, "protocol": str(PROTOCOL)}, hello.get("facts"))

    def meet(self, facts: Facts) -> None:
        """Waits until every process has loaded and compiled.

        Args:
            facts: of what was made of the options, which all must share.

        Raises:
            GroupError: the group has ended.
        """
        with self._counting:
            self._counting.wait_for(
                lambda: self.ended.is_set() or all(m.ready is not None for m in self._members.values())
            )
        for member in self._members.values():
            if not self.ended.is_set() and (problem := difference(facts, member.ready)):
                self.break_up(f"process {member.rank} does not fit: {problem}")
        self.check()
        for member in self._members.values():
            member.ready = None
            self._send(member, Say.BEGIN)

    def send(self, order: Order) -> None:
        """
        Raises:
            GroupError: the group has ended.
        """
        self.check()
        data = encode(order)
        with self._counting:
            self._chain.add(data)
            number, digest = self._chain.number, self._chain.digest
            self._unseen[number], self._unfinished[number] = digest, time.monotonic()
        for member in self._members.values():
            self._send(member, Say.ORDER, ORDER_HEAD.pack(number, digest) + data)

    def _send(self, member: _Member, what: Say, body: bytes = b"") -> None:
        try:
            member.channel.send(what, body)
        except GroupError as error:
            raise self.break_up(f"process {member.rank} {error}") from None

    def _hear(self, member: _Member) -> None:
        try:
            while True:
                self._take(member, *member.channel.read())
        except (GroupError, struct.error) as error:
            member.gone.set()
            self.break_up(f"process {member.rank} {error}")
        finally:
            member.channel.close()

    def _take(self, member: _Member, what: Say, body: bytes) -> None:
        if what is Say.BEAT:
            self._note(member, *PROGRESS.unpack(body))
        elif what is Say.READY:
            with self._counting:
                member.ready = read_json(body)
                self._counting.notify_all()
        elif what is Say.STOP:
            self.on_stop()
        else:
            raise complaint(what, body)

    def _note(self, member: _Member, finished: int, received: int, digest: bytes) -> None:
        with self._counting:
            if received > self._chain.number or self._unseen.get(received, digest) != digest:
                raise GroupError(f"has received other orders than were sent, up to number {received}")
            member.finished = finished
            least = min(m.finished for m in self._members.values())
            # Those that all have finished are received by all.
            for number in [n for n in self._unfinished if n <= least]:
                del self._unfinished[number]
                del self._unseen[number]

    def _beat(self) -> None:
        while not self.ended.wait(self.beat_seconds()):
            for member in list(self._members.values()):
                try:
                    self._send(member, Say.BEAT)
                except GroupError:
                    return
            limit = self.nodes.step_timeout
            with self._counting:
                oldest, sent = next(iter(self._unfinished.items()), (0, time.monotonic()))
                slow = [m.rank for m in self._members.values() if m.finished < oldest]
            if limit is not None and time.monotonic() - sent > limit:
                self.break_up(f"processes {slow} have not finished order {oldest} within {limit:g} s")

    def tell_failure(self, why: str) -> None:
        with self._counting:
            self._counting.notify_all()
        for member in list(self._members.values()):  # others may be coming
            if not member.gone.is_set():
                member.channel.send_last(Say.FAILED, why.encode(), LAST_SECONDS)

    def end(self) -> None:
        """The group ends as it should: tells the others, and waits a moment until they have gone."""
        with self.telling:
            if self.ended.is_set():
                return
            self.ended.set()
        with self._counting:
            self._counting.notify_all()
        members = list(self._members.values())  # others may be coming
        for member in members:
            member.channel.send_last(Say.END, b"", LAST_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        for member in members:
            member.gone.wait(max(deadline - time.monotonic(), 0))
        self.over.set()


def _listen(host: str, port: int) -> socket.socket:
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()
        sock.settimeout(_LOOK_SECONDS)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise ConfigError(
            f"cannot listen at --coordinator {host}:{port}, which must be an address of process 0's host: "
            f"{error.strerror or error}"
        ) from error
    return sock
