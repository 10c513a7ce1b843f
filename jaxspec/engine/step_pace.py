"""How long steps take beside what they were measured to: on this host, with these texts, as they run."""

import math
from collections import Counter, deque

from jaxspec.engine.buckets import Bucket

# Steps of a bucket in a row that count, and the first of these, which show how it differs from the bucket before it.
LATEST, FIRST = 16, 4
# The part of what is known of a bucket's difference that the steps of a later visit replace, at least.
REPLACED = 0.2


class StepPace:
    """Of each bucket the factor by which its steps take longer than what was measured.

    What disturbs the host, and which experts tokens reach, change steps of every bucket alike, from one minute to the next;
    what was measured wrongly, or comes with windows only, changes one bucket's. So steps in a row in one bucket show what
    changes for all, and the first ones after another bucket's in what the two differ.
    """

    def __init__(self) -> None:
        # Logarithms of a factor that all buckets share, and of each one's own.
        self._shared, self._own = 0.0, dict[Bucket, float]()
        self._visits = Counter[Bucket]()
        self._bucket: Bucket | None = None
        self._count = 0  # of steps in a row in this bucket
        self._latest = deque[float](maxlen=LATEST)

    @property
    def is_steady(self) -> bool:
        """The latest steps were enough in one bucket that another one's can be compared with them."""
        return self._count >= FIRST

    def factor(self, bucket: Bucket) -> float:
        return math.exp(self._shared + self._own.get(bucket, 0.0))

    def observe(self, bucket: Bucket, ratio: float) -> None:
        """Counts a step that took `ratio` times what was measured."""
        if bucket != self._bucket:
            self._bucket, self._count = bucket, 0
            self._latest.clear()
        self._count += 1
        self._latest.append(math.log(ratio))
        if self._count < FIRST:
            return
        level = _middle(self._latest)
        if self._count == FIRST and self._own:
            self._visits[bucket] += 1
            known = self._own.get(bucket, 0.0)
            replaced = max(1 / self._visits[bucket], REPLACED)
            self._own[bucket] = known + replaced * (level - self._shared - known)
        else:
            self._shared = level - self._own.setdefault(bucket, 0.0)


def _middle(values: deque[float]) -> float:
    """The mean without the lowest and the highest quarter: single steps may be disturbed."""
    cut = len(values) // 4
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)
