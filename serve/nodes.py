"""`jaxspec serve` as several processes: rank 0 serves, the others follow it. None of them outlives the group."""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from jaxspec.errors import GroupError, JaxspecError
from jaxspec.nodes import NODE_TIMEOUT, Nodes, devices_of_each, nodes_of

if TYPE_CHECKING:
    from jaxspec.config import EngineConfig
    from jaxspec.engine.leader import Leader

logger = logging.getLogger("jaxspec.serve")

# Signals come to the main thread, which looks so often.
_LOOK_SECONDS = 0.2


def add_node_flags(group: argparse._ActionsContainer, flag: Callable[..., None]) -> None:
    count = "processes that serve one model together, usually one a host, each with the same options (default: 1)"
    flag(group, "--nnodes", "N", count, type=int, default=1)
    flag(
        group,
        "--node-rank",
        "R",
        "number of this process; 0 has the HTTP server and decides, the others follow",
        type=int,
    )
    where = "where process 0 listens for the others, and at the next port jax's coordinator: a private network"
    flag(group, "--coordinator", "HOST:PORT", where)
    timeout = "without a sign of life of a process for this long the group ends, each with exit code 1"
    flag(group, "--node-timeout", "SECONDS", f"{timeout} (default: {NODE_TIMEOUT:g})", type=float, default=NODE_TIMEOUT)


def nodes_given(arguments: argparse.Namespace, config: "EngineConfig") -> Nodes | None:
    """
    Raises:
        ConfigError: the options of the group make no sense, or its processes cannot bring as many devices each.
    """
    nodes = nodes_of(
        arguments.nnodes,
        arguments.node_rank,
        arguments.coordinator,
        timeout=arguments.node_timeout,
        step_timeout=arguments.engine_timeout or None,
    )
    if nodes is not None:
        devices_of_each(config.tensor_parallel_size, nodes.count)
    return nodes


def lead(group: "Leader", run: Callable[[], int]) -> NoReturn:
    """Serves as rank 0, and ends the group with it: jax's own end of a group would wait for all of it.

    An exit code other than 1 says that the end was asked for, by one signal or by a second that cut requests (128 and its
    number): in the others nothing has failed then, and they end with 0.
    """
    from serve.server import end_process

    try:
        code = run()  # it tells the group of an engine that has died
    except JaxspecError as error:
        code = _say(error)
        group.fail(error)
    except BaseException as error:
        logger.exception("process 0 of the group has failed")
        group.fail(error)
        code = 1
    group.end()
    group.over.wait(_LOOK_SECONDS)
    end_process(code)


def follow(nodes: Nodes, model: str, config: "EngineConfig", revision: str | None) -> NoReturn:
    """Launches what rank 0 orders until the group ends."""
    from jaxspec import llm
    from jaxspec.engine.follower import Follower
    from serve.server import end_process
    from serve.startup import console_progress, say

    group = Follower(nodes)
    asked: list[int] = []  # signals

    def work() -> None:
        try:
            llm.follow(model, config, group, revision=revision, progress=console_progress())
        except BaseException as error:
            cause = error if isinstance(error, JaxspecError) else group.cause(error)
            if not isinstance(cause, JaxspecError):
                logger.exception("process %d of the group has failed", nodes.rank)
            elif not isinstance(cause, GroupError):
                _say(cause)
            group.fail(cause)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    say(f"Process {nodes.rank} of {nodes.count}: following process 0 at {nodes.host}:{nodes.port}")
    threading.Thread(target=work, name="engine", daemon=True).start()
    told = False
    while not group.over.wait(_LOOK_SECONDS):
        if len(asked) > 1:
            end_process(128 + asked[-1])
        if asked and not group.has_come:
            logger.info("%s: process 0 does not know of this process yet", signal.Signals(asked[0]).name)
            end_process(0)
        if asked and not told:
            told = True
            logger.info("%s: process 0 ends the group (again to stop at once)", signal.Signals(asked[0]).name)
            group.ask_to_stop()
    end_process(1 if group.failure else 0)


def _say(error: JaxspecError) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 1
