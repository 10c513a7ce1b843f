"""The flags of `jaxspec serve` that bound time and connections. Imports nothing heavy, for --help."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import ConfigError

# After warm-up nothing compiles, and a step has a budget of tokens: one that takes this long is stuck, not busy.
ENGINE_TIMEOUT = 300.0
MAX_CONNECTIONS = 4096
# Longer than clients keep idle connections, so that they close first.
KEEP_ALIVE_TIMEOUT = 75.0
HEADER_TIMEOUT = 20.0
BODY_TIMEOUT = 60.0
SEND_TIMEOUT = 60.0


@dataclass(frozen=True)
class LimitFlag:
    name: str
    kind: type[int] | type[float]
    default: int | float
    least: int
    help: str

    @property
    def metavar(self) -> str:
        return "N" if self.kind is int else "SECONDS"

    @property
    def attribute(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


LIMIT_FLAGS = (
    LimitFlag(
        "--request-timeout",
        float,
        0.0,
        0,
        "how long a request may take in all; then it gets 504 and leaves the engine (default: 0, no limit)",
    ),
    LimitFlag(
        "--queue-timeout",
        float,
        0.0,
        0,
        "how long a request may wait for its first step; then it gets 504 (default: 0, no limit)",
    ),
    LimitFlag(
        "--engine-timeout",
        float,
        ENGINE_TIMEOUT,
        0,
        "an engine step, or the answer of the event loop, that takes longer is stuck: requests fail and the process ends "
        "with exit code 1 "
        f"(default: {ENGINE_TIMEOUT:g}; 0: no limit)",
    ),
    LimitFlag(
        "--max-connections",
        int,
        MAX_CONNECTIONS,
        1,
        "most open connections; further ones get 503. The limit of descriptors (ulimit -n) may be lower "
        f"(default: {MAX_CONNECTIONS})",
    ),
    LimitFlag(
        "--timeout-keep-alive",
        float,
        KEEP_ALIVE_TIMEOUT,
        1,
        f"how long a connection may be idle between two requests (default: {KEEP_ALIVE_TIMEOUT:g})",
    ),
    LimitFlag(
        "--header-timeout",
        float,
        HEADER_TIMEOUT,
        1,
        "in which a TLS handshake must end, and the whole head of a request arrive; then the client gets 408 "
        f"(default: {HEADER_TIMEOUT:g})",
    ),
    LimitFlag(
        "--body-timeout",
        float,
        BODY_TIMEOUT,
        1,
        f"in which the whole body of a request must arrive; then it gets 408 (default: {BODY_TIMEOUT:g})",
    ),
    LimitFlag(
        "--send-timeout",
        float,
        SEND_TIMEOUT,
        1,
        "in which a client must take 16 KiB of its answer, or all that there is of it; then its connection is closed "
        f"(default: {SEND_TIMEOUT:g})",
    ),
)


def check_limits(arguments: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: a limit cannot be.
    """
    for flag in LIMIT_FLAGS:
        value = getattr(arguments, flag.attribute)
        if not flag.least <= value < math.inf:
            raise ConfigError(f"{flag.name} must be a number of at least {flag.least}, got {value}")
    if not 0 <= arguments.shutdown_timeout < math.inf:
        raise ConfigError(f"--shutdown-timeout must be a number of at least 0, got {arguments.shutdown_timeout}")


def limit_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ServerSettings`."""
    from serve.connection_table import ConnectionLimits
    from serve.deadlines import Deadlines

    return {
        "deadlines": Deadlines(arguments.request_timeout or None, arguments.queue_timeout or None),
        "engine_timeout": arguments.engine_timeout or None,
        "connections": ConnectionLimits(
            max_connections=arguments.max_connections,
            header_timeout=arguments.header_timeout,
            body_timeout=arguments.body_timeout,
            keep_alive_timeout=arguments.timeout_keep_alive,
            send_timeout=arguments.send_timeout,
        ),
    }
