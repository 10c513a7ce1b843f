"""What the server's log says about speculation every few seconds."""

import logging
from typing import TYPE_CHECKING

from serve.metrics import EngineSnapshot
from serve.throughput import PeriodicLog

if TYPE_CHECKING:
    from jaxspec.engine.acceptance import Acceptance

logger = logging.getLogger("jaxspec.serve")


class AcceptanceLog(PeriodicLog):
    """A line with vLLM's fields for each interval in which something was drafted."""

    _last: "Acceptance | None" = None

    def _write(self, snapshot: EngineSnapshot, seconds: float) -> None:
        if (total := snapshot.stats.acceptance) is None:
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
