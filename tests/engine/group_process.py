"""A process of a group without a model: rank 0 sends orders at a steady rate, the others finish them at once.

Arguments: count, rank, port, and how long a step may take. It runs until the group is over, and says how that came.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time

import numpy as np

from jaxspec.engine.follower import Follower
from jaxspec.engine.leader import Leader
from jaxspec.engine.orders import Kind, Order
from jaxspec.errors import GroupError
from jaxspec.nodes import Nodes

FACTS = {"jaxspec": "1"}
TIMEOUT = 1.5


def main(count: int, rank: int, port: int, step_timeout: float) -> int:
    faulthandler.enable()  # a test that waited in vain asks for the stacks by SIGABRT
    logging.basicConfig(level=logging.INFO)
    nodes = Nodes(count, rank, "127.0.0.1", port, TIMEOUT, step_timeout)
    group = follow(Follower(nodes)) if rank else lead(Leader(nodes))
    return 1 if group.failure else 0


def lead(leader: Leader) -> Leader:
    signal.signal(signal.SIGTERM, lambda *_: leader.end())
    leader.on_stop = threading.Thread(target=leader.end).start
    leader.join(FACTS)
    leader.meet({})
    print("serving", flush=True)
    number = 0
    while not leader.over.wait(0.02):
        number += 1
        try:
            leader.send(Order(Kind.STEP, 0, (np.full(64, number, np.int32),)))
        except GroupError:
            leader.over.wait()
    return leader


def follow(follower: Follower) -> Follower:
    stuck = False

    def stick(*_: object) -> None:
        nonlocal stuck
        stuck = True

    signal.signal(signal.SIGUSR1, stick)
    # Not in the handler, which may interrupt a message: the next one waits for its end.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=follower.ask_to_stop).start())
    follower.join(FACTS)
    try:
        follower.meet({})  # which may find that the group has begun and ended meanwhile
        for number, order in follower.orders():
            assert order.arrays[0].tolist() == [number] * 64
            while stuck and not follower.over.is_set():
                time.sleep(0.05)
            follower.finished = number
    except GroupError:
        follower.over.wait()
    return follower


if __name__ == "__main__":
    code = main(*map(int, sys.argv[1:4]), float(sys.argv[4]))
    sys.stdout.flush()
    # As `jaxspec serve` ends: the interpreter's own end may wait for the group's threads.
    os._exit(code)
