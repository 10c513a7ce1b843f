"""What the server's log says about speculation every few seconds."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from serve.metrics import EngineSnapshot

if TYPE_CHECKING:
    from jaxspec.engine.acceptance import Acceptance

logger = logging.getLogger("jaxspec.serve")


class AcceptanceLog:
    """A line with vLLM's fields for each interval in which something was drafted.

    Args:
        snapshot: the engine's latest state; None while the model loads.
        clock: seconds since any fixed point.
    """

    def __init__(self, snapshot: Callable[[], EngineSnapshot | None], *, clock: Callable[[], float] = time.monotonic):
        self._snapshot = snapshot
        self._clock = clock
        self._last_time = clock()
        self._last: Acceptance | None = None

    def write(self) -> None:
        """Logs what came since the last call, if anything."""
        snapshot, now = self._snapshot(), self._clock()
        seconds, self._last_time = now - self._last_time, now
        if snapshot is None or (total := snapshot.stats.acceptance) is None:
            return
        news = total if self._last is None else total.since(self._last)
        self._last = total
        if not news.num_steps:
            return
        synthetic = snapshot.synthetic_acceptance_length
        logger.info(
            "Speculative decoding: Mean acceptance length: %.2f, Accepted throughput: %.2f tokens/s, "
            "Drafted throughput: %.2f tokens/s, Accepted: %d tokens, Drafted: %d tokens, "
            "Per-position acceptance rate: %s, Avg draft acceptance rate: %.1f%%%s",
            news.mean_length,
            news.num_accepted / seconds,
            news.num_drafted / seconds,
            news.num_accepted,
            news.num_drafted,
            ", ".join(f"{rate:.3f}" for rate in news.rate_per_position or ()),
            100 * (news.rate or 0),
            "" if synthetic is None else f" (synthetic_acceptance_length: {synthetic:g}, the text is worthless)",
        )
