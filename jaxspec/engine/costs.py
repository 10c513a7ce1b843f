"""What a step costs, by the shape that it runs in."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from jaxspec.engine.buckets import Bucket


class StepCosts:
    """Seconds of a step by decode rows and drafts.

    Args:
        seconds: of a step in each bucket that so many of its decode rows are busy in. Between what was measured they are on
            a straight line; with fewer rows than the fewest they are as with these.
        context: tokens of each decode row in these steps.
        token_seconds: what each further one adds to a step. It is read once however many drafts its row has.
    """

    def __init__(self, seconds: Mapping[tuple[Bucket, int], float], context: int = 0, token_seconds: float = 0.0):
        assert all(value > 0 for value in seconds.values())
        assert token_seconds >= 0
        self._context, self._token_seconds = context, token_seconds
        # Of each bucket: numbers of rows, ascending, and seconds.
        measured: dict[Bucket, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        for (bucket, rows), value in sorted(seconds.items()):
            measured[bucket][0].append(rows)
            measured[bucket][1].append(value)
        # (prompts, full, drafts) -> seconds by decode rows, from one on: in the cheapest step that holds them.
        self._steps: dict[tuple[bool, bool, int], list[float]] = {}
        for prompts in (False, True):
            # Of buckets for prompts the largest: what windows add beside prompts hardly depends on the prompts.
            tokens = max((b.prefill_tokens for b in measured), default=0) if prompts else 0
            for full in (False, True):
                for drafts in {b.drafts for b in measured}:
                    fitting = [
                        b
                        for b in measured
                        if b.drafts == drafts and b.prefill_tokens >= tokens and (b.variant == "full" or not full)
                    ]
                    # Without mixed steps the buckets for prompts have no decode rows at all.
                    most = max((b.decode_rows for b in fitting), default=0)
                    self._steps[prompts, full, drafts] = [
                        min(float(np.interp(n, *measured[b])) for b in fitting if b.decode_rows >= n)
                        for n in (range(1, most + 1) if most else [0] * bool(fitting))
                    ]

    def seconds(
        self, rows: int, drafts: int, *, tokens: int = 0, prompts: bool = False, full: bool = False
    ) -> float | None:
        """Of a step with so many decode rows; None where no bucket that was measured has these drafts.

        Args:
            tokens: of all these rows' contexts together.
            prompts: prompt tokens run beside them.
            full: with the full sampler.
        """
        values = self._steps.get((prompts, full, drafts))
        if not values:
            return None
        return values[min(rows, len(values)) - 1] + self._token_seconds * max(tokens - rows * self._context, 0)
