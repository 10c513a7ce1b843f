"""Processes that share a closed loop: one event loop in Python reads some 5000 tokens a second, which servers exceed."""

import asyncio
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from bench.serving.client import Outcome
    from bench.serving.endpoint import Endpoint

# More would take cores from the server that is measured.
MOST = 8


def default_count() -> int:
    """Half of the cores of the machine."""
    return max(1, min(MOST, (os.cpu_count() or 1) // 2))


class Senders:
    """So many processes, or with one this process; a context, which ends them."""

    def __init__(self, count: int) -> None:
        # Started afresh: a fork would copy what jax and its threads hold.
        spawn = multiprocessing.get_context("spawn")
        self.count = count
        self._pool = ProcessPoolExecutor(count, spawn) if count > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def send(
        self, endpoint: "Endpoint", bodies: Sequence[Mapping[str, Any]], concurrency: int, timeout: float
    ) -> "list[Outcome]":
        """The outcomes of all requests, in their order; `concurrency` at once, split over the processes.

        Args:
            timeout: seconds for each request.
        """
        parts = min(self.count, concurrency, len(bodies))
        target = endpoint.url, dict(endpoint.headers), endpoint.trust_env
        if parts == 1 or self._pool is None:
            return _send(target, bodies, concurrency, timeout)
        shares = [concurrency // parts + (part < concurrency % parts) for part in range(parts)]
        waiting = [
            self._pool.submit(_send, target, bodies[part::parts], share, timeout) for part, share in enumerate(shares)
        ]
        of_parts = [future.result() for future in waiting]
        return [of_parts[i % parts][i // parts] for i in range(len(bodies))]


def _send(
    target: tuple[str, dict[str, str], bool], bodies: Sequence[Mapping[str, Any]], concurrency: int, timeout: float
) -> "list[Outcome]":
    from bench.serving.client import run_load

    url, headers, trust_env = target
    sent = run_load(url, headers, bodies, arrivals=None, concurrency=concurrency, timeout=timeout, trust_env=trust_env)
    return asyncio.run(sent)
