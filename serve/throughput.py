"""What the server's log says about throughput every few seconds, and the clock of all such lines."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from serve.metrics import EngineSnapshot

if TYPE_CHECKING:
    from jaxspec.engine.engine import EngineStats

logger = logging.getLogger("jaxspec.serve")

LOG_SECONDS = 10.0


class PeriodicLog:
    """A line about each interval between two calls of `write`, unless a subclass finds nothing to say.

    Args:
        snapshot: the engine's latest state; None while the model loads.
        clock: seconds since any fixed point.
    """

    def __init__(self, snapshot: Callable[[], EngineSnapshot | None], *, clock: Callable[[], float] = time.monotonic):
        self._snapshot = snapshot
        self._clock = clock
        self._last_time = clock()

    def write(self) -> None:
        snapshot, now = self._snapshot(), self._clock()
        seconds, self._last_time = now - self._last_time, now
        if snapshot is not None:
            self._write(snapshot, seconds)

    def _write(self, snapshot: EngineSnapshot, seconds: float) -> None:
        """Logs what came in the last `seconds`, if anything."""
        raise NotImplementedError


async def write_every(seconds: float, *logs: PeriodicLog) -> None:
    while True:
        await asyncio.sleep(seconds)
        for log in logs:
            log.write()


class ThroughputLog(PeriodicLog):
    """vLLM's line, for each interval in which the engine worked or something waited.

    Prompt tokens count as they are computed, so those of the prefix cache do not. The hit rate is of the latest interval
    in which something was looked up.
    """

    _last: "EngineStats | None" = None
    _hit_rate = 0.0

    def _write(self, snapshot: EngineSnapshot, seconds: float) -> None:
        last, stats = self._last, snapshot.stats
        self._last = stats
        prompt = stats.prefill_tokens - (last.prefill_tokens if last else 0)
        generated = stats.generation_tokens - (last.generation_tokens if last else 0)
        queries = stats.prefix_cache_queries - (last.prefix_cache_queries if last else 0)
        if queries:
            self._hit_rate = (stats.prefix_cache_hits - (last.prefix_cache_hits if last else 0)) / queries
        if not (prompt or generated or stats.num_running or stats.num_waiting):
            return
        logger.info(
            "Engine 000: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, GPU KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            prompt / seconds,
            generated / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            100 * self._hit_rate,
        )
