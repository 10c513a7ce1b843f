"""The group of processes that serve one model: rank 0 sends its orders, the others receive them.

Before anything else each process tells rank 0 what it runs and with which options; one that differs is refused by name.
Orders are numbered and hashed in a chain, and both sides compare: what one process launched and another did not ends the
group. So does a process that has ended, that is silent, or that does not finish an order. A group that has ended stays so.
"""

import logging
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.engine.channel import Say
from jaxspec.engine.orders import DIGEST_BYTES
from jaxspec.errors import GroupError, JaxspecError, shown
from jaxspec.nodes import Nodes

logger = logging.getLogger("jaxspec.nodes")

# The meaning of messages; part of what processes compare.
PROTOCOL = 1
# For all to come; hosts start at different times.
JOIN_SECONDS = 300.0
# For each to be told of a failure.
LAST_SECONDS = 0.5
# How often a sign of life is given: this part of the timeout, and at least every second.
_BEAT_PART = 0.2
# An error of the device may be the first sign that another process has ended; this long the group may take to see it.
_CAUSE_SECONDS = 1.0
ORDER_HEAD = struct.Struct(f"<Q{DIGEST_BYTES}s")
PROGRESS = struct.Struct(f"<QQ{DIGEST_BYTES}s")  # orders finished, orders received, digest of the latter

Facts = Mapping[str, str]


class Group:
    """What both sides have: an end, told once.

    Attributes:
        nodes: of this process.
        failure: why the group has ended; None while it has not, and where it has ended as it should.
        ended: set as soon as the group has ended, as it should or not; `over`: and who could be told has been told.
        telling: held while that is decided.
        on_failure: called once with it, on a thread of the group. on_stop: called where a process is asked to end.
    """

    def __init__(self, nodes: Nodes):
        self.nodes = nodes
        self.failure: GroupError | None = None
        self.on_failure: Callable[[GroupError], None] = lambda _error: None
        self.on_stop: Callable[[], None] = lambda: None
        self.over = threading.Event()
        self.ended = threading.Event()
        self.telling = threading.Lock()
        self._failed = threading.Event()

    def break_up(self, why: str) -> GroupError:
        """Ends the group, unless it has ended: says so in the log, to the other side and to this one."""
        with self.telling:
            if self.failure is not None:
                return self.failure
            error = GroupError(f"the group of {self.nodes.count} processes has ended: {why}")
            if self.ended.is_set():
                return error
            self.failure = error
            self.ended.set()
        logger.error("%s", error)
        self._failed.set()
        try:
            self.tell_failure(why)
            self.on_failure(error)
        finally:  # this process waits for it to end
            self.over.set()
        return error

    def check(self) -> None:
        """
        Raises:
            GroupError: the group has ended.
        """
        if self.ended.is_set():
            raise self.failure or GroupError("the group has ended")

    def tell_failure(self, why: str) -> None:
        """Wakes who waits for messages, and tells the other side."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """This process cannot go on."""
        kind = "" if isinstance(error, JaxspecError) else f"{type(error).__name__}: "
        self.break_up(f"process {self.nodes.rank} has failed: {kind}{error}")

    def cause(self, error: BaseException) -> BaseException:
        """Why the device failed: the group's end, if it is that, else `error` itself."""
        self._failed.wait(_CAUSE_SECONDS)
        return self.failure or error

    def start(self, run: Callable[[], None], name: str) -> None:
        """A thread that ends with the process."""
        threading.Thread(target=run, name=name, daemon=True).start()

    def beat_seconds(self) -> float:
        """Between two signs of life."""
        return min(_BEAT_PART * self.nodes.timeout, 1.0)


def complaint(what: Say, body: bytes) -> GroupError:
    """Of the other side, which has failed, or whose message has no place here."""
    if what is Say.FAILED:
        return GroupError(f"says: {body[:1000].decode(errors='replace')}")
    return GroupError("speaks another protocol")


def difference(ours: Facts, theirs: Any) -> str | None:
    """The first fact that differs, in words; None if all are equal."""
    if not isinstance(theirs, dict):
        return "it does not say what it runs"
    for name in (*ours, *theirs):
        a, b = ours.get(name, "none"), theirs.get(name, "none")
        if a != b:
            return f"{name} is {shown(b)} there and {shown(a)} here (process 0)"
    return None
