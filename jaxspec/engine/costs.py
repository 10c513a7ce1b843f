"""What a step costs, by the shape that it runs in."""

import bisect
from collections.abc import Mapping

from jaxspec.engine.buckets import Bucket


class StepCosts:
    """Seconds of a step by decode rows and drafts.

    Args:
        seconds: of a step in each bucket.
    """

    def __init__(self, seconds: Mapping[Bucket, float]):
        assert all(value > 0 for value in seconds.values())
        # (prompts, full, drafts) -> decode rows, ascending, and seconds.
        self._steps: dict[tuple[bool, bool, int], tuple[list[int], list[float]]] = {}
        for prompts in (False, True):
            # Of buckets for prompts the largest: what windows add beside prompts hardly depends on the prompts.
            tokens = max((b.prefill_tokens for b in seconds), default=0) if prompts else 0
            for full in (False, True):
                for drafts in {b.drafts for b in seconds}:
                    fitting = sorted(
                        (b.decode_rows, b.prefill_tokens, b.variant == "full", value)
                        for b, value in seconds.items()
                        if b.drafts == drafts and b.prefill_tokens >= tokens and (b.variant == "full" or not full)
                    )
                    first = {rows: value for rows, _, _, value in reversed(fitting)}
                    rows = sorted(first)
                    self._steps[prompts, full, drafts] = rows, [first[n] for n in rows]

    def seconds(self, rows: int, drafts: int, *, prompts: bool = False, full: bool = False) -> float | None:
        """Of a step with so many decode rows; None where no bucket that was measured has these drafts.

        Args:
            prompts: prompt tokens run beside them.
            full: with the full sampler.
        """
        sizes, values = self._steps.get((prompts, full, drafts), ([], []))
        if not sizes:
            return None
        # Without mixed steps the buckets for prompts have no decode rows at all.
        return values[min(bisect.bisect_left(sizes, rows), len(sizes) - 1)]
