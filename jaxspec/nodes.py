"""Which process of a group this is: several processes, usually one a host, that serve one model together."""

import math
from dataclasses import dataclass

from jaxspec.config import flagged
from jaxspec.errors import ConfigError, shown

MAX_NODES = 1024
# Nothing was heard of another process for so long, by default: it has ended, or its host, or the network between.
NODE_TIMEOUT = 30.0


@dataclass(frozen=True)
class Nodes:
    """
    Attributes:
        count: processes of the group.
        rank: this one's number. 0 has the requests and decides; the others launch what it orders.
        host, port: where rank 0 listens for the others; jax's own coordinator is at the next port.
        timeout: seconds without a sign of life after which another process has ended.
        step_timeout: seconds that an order may take; None: no limit.
    """

    count: int
    rank: int
    host: str
    port: int
    timeout: float = NODE_TIMEOUT
    step_timeout: float | None = None

    @property
    def coordinator(self) -> str:
        """The address of jax's coordinator."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port + 1}"


def nodes_of(
    count: int, rank: int | None, coordinator: str | None, *, timeout: float, step_timeout: float | None
) -> Nodes | None:
    """The group of these options, as the flags of `jaxspec serve` give them; None for one process.

    Raises:
        ConfigError: they make no sense; the text names the flag.
    """
    if not 1 <= count <= MAX_NODES:
        raise ConfigError(f"--nnodes must be between 1 and {MAX_NODES}, got {count}")
    if not 1 <= timeout < math.inf:
        raise ConfigError(f"--node-timeout must be a number of at least 1, got {timeout}")
    if count == 1:
        if rank:
            raise ConfigError(
                f"--node-rank {rank} needs --nnodes, the number of processes that serve the model together"
            )
        return None
    if rank is None or coordinator is None:
        missing = "--node-rank" if rank is None else "--coordinator"
        raise ConfigError(
            f"--nnodes {count} needs {missing}: each process is told its number, and where number 0 listens"
        )
    if not 0 <= rank < count:
        raise ConfigError(f"--node-rank must be between 0 and {count - 1} for --nnodes {count}, got {rank}")
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("tcp://").strip("[]")
    # The next port is jax's.
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65535:
        raise ConfigError(f"--coordinator must be HOST:PORT with a port from 1 to 65534, got {shown(coordinator)}")
    return Nodes(count, rank, host, int(port), timeout, step_timeout)


def devices_of_each(tensor_parallel_size: int, processes: int) -> int:
    """How many devices each of the processes brings.

    Raises:
        ConfigError: they cannot bring as many each.
    """
    if tensor_parallel_size % processes:
        raise ConfigError(
            f"{flagged('tensor_parallel_size')} {tensor_parallel_size} must be a multiple of {processes}, the number of "
            "processes (--nnodes), because each brings as many devices"
        )
    return tensor_parallel_size // processes
