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
        token_seconds: what each further one adds to a step, by the number of its drafts: it is read once, but every token of
            a window attends to it. Where that is not known yet it is the most of those that are.

    Attributes:
        measured: the seconds that it was given.
    """

    def __init__(
        self,
        seconds: Mapping[tuple[Bucket, int], float],
        context: int = 0,
        token_seconds: Mapping[int, float] | None = None,
    ):
        self._context, token_seconds = context, token_seconds or {}
        assert all(value > 0 for value in seconds.values())
        assert all(value >= 0 for value in token_seconds.values())
        self.measured = seconds
        measured: dict[Bucket, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        for (bucket, rows), value in sorted(seconds.items()):
            measured[bucket][0].append(rows)
            measured[bucket][1].append(value)
        # Every step asks: of each bucket the seconds by its busy rows, from none on, and what a token adds.
        self._seconds: dict[Bucket, list[float]] = {
            bucket: np.interp(np.arange(max(bucket.decode_rows, rows[-1]) + 1), rows, values).tolist()
            for bucket, (rows, values) in measured.items()
        }
        unknown = max(token_seconds.values(), default=0.0)
        self._token_seconds = {b.drafts: token_seconds.get(b.drafts, unknown) for b in measured}
        # (full, drafts) -> by decode rows, from one on: the bucket of the cheapest step that holds them.
        self._cheapest: dict[tuple[bool, int], list[Bucket]] = {}
        for full in (False, True):
            for drafts in {b.drafts for b in measured}:
                fitting = [b for b in measured if b.drafts == drafts and (b.variant == "full" or not full)]
                # Without mixed steps the buckets for prompts have no decode rows at all.
                most = max((b.decode_rows for b in fitting), default=0)
                self._cheapest[full, drafts] = [
                    min((b for b in fitting if b.decode_rows >= n), key=lambda b: self._seconds_in(b, n))
                    for n in (range(1, most + 1) if most else [0] * bool(fitting))
                ]

    def seconds(self, rows: int, drafts: int, *, tokens: int = 0, full: bool = False) -> float | None:
        """Of a step with so many decode rows; None where no bucket that was measured has these drafts.

        Args:
            tokens: of all these rows' contexts together.
            full: with the full sampler.
        """
        bucket = self.bucket(rows, drafts, full=full)
        return None if bucket is None else self.seconds_in(bucket, rows, tokens)

    def bucket(self, rows: int, drafts: int, *, full: bool = False) -> Bucket | None:
        """That such a step runs in."""
        buckets = self._cheapest.get((full, drafts))
        return buckets[min(rows, len(buckets)) - 1] if buckets else None

    def seconds_in(self, bucket: Bucket, rows: int, tokens: int = 0) -> float | None:
        """Of a step in this bucket, if it was measured."""
        if bucket not in self._seconds:
            return None
        further = max(tokens - rows * self._context, 0)
        return self._seconds_in(bucket, rows) + self._token_seconds[bucket.drafts] * further

    def _seconds_in(self, bucket: Bucket, rows: int) -> float:
        by_rows = self._seconds[bucket]
        return by_rows[min(rows, len(by_rows) - 1)]
