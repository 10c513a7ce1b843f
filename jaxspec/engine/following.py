"""What a process of a group does that is not rank 0: it launches what it is sent, and decides nothing."""

import queue
import threading
from typing import Any

from jaxspec.engine.follower import Follower
from jaxspec.engine.launcher import Launcher
from jaxspec.engine.step import StepArrays


def follow(launcher: Launcher, follower: Follower) -> None:
    """Launches rank 0's orders until the group ends as it should.

    Raises:
        GroupError: it has ended otherwise.
    """
    launched: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    threading.Thread(target=_finish, args=(launched, follower), name="finished orders", daemon=True).start()
    hidden = None
    for number, order in follower.orders():
        out = launcher.launch(order, hidden)
        is_step = isinstance(out, StepArrays)
        hidden = out.hidden if is_step else hidden
        launched.put((number, out.packed if is_step else None))


def _finish(launched: "queue.SimpleQueue[tuple[int, Any]]", follower: Follower) -> None:
    """Waits for each step in turn: rank 0 watches how far this process is."""
    try:
        while True:
            number, packed = launched.get()
            if packed is not None:
                packed.block_until_ready()
            follower.finished = number
    except Exception as error:  # of the device, perhaps because another process has gone
        follower.fail(follower.cause(error))
