"""How long steps take beside what they were measured to: on this host, with these texts, as they run."""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

from jaxspec.engine.buckets import Bucket

# Steps of a bucket in a row that count, and the first of these, which show how it differs from the bucket before it.
LATEST, FIRST = 16, 3
# Visits of a bucket that count for its difference, of which the middle one is taken: before the first there have been so many
# that showed none. The most that one counts for, as a logarithm, and the part of what they show that is believed: buckets
# differ little from what was measured.
VISITS, MOST, BELIEVED = 5, 0.25, 0.8


class StepPace:
    """Of each bucket the factor by which its steps take longer than what was measured.

    What disturbs the host, and which experts tokens reach, change steps of every bucket alike, from one minute to the next;
    what was measured wrongly, or comes with windows only, changes one bucket's. So steps in a row in one bucket show what
    changes for all, and the first ones after another bucket's in what the two differ. Whatever disturbs a few steps makes
    them longer, never shorter: the shorter half of steps counts.

    Only differences are seen. If each were believed whole, small errors that have the same sign would add up visit by visit,
    to factors of two between buckets that are visited and those that are not. So buckets are drawn towards what was measured
    (`BELIEVED`), and a bucket that is returned to shows no difference if all that is known of the pace is its own.
    """

    def __init__(self) -> None:
        # Logarithms of a factor that all buckets share, of which one it is known, and of each one's own: what its latest
        # visits showed, and what is believed of it.
        self._shared, self._own = 0.0, dict[Bucket, float]()
        self._shown_by: Bucket | None = None
        self._visits = defaultdict[Bucket, deque[float]](lambda: deque([0.0] * VISITS, VISITS))
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
        """Counts a step that took `ratio` times what was measured, and came after another in the same bucket."""
        if bucket != self._bucket:
            self._bucket, self._count = bucket, 0
            self._latest.clear()
        self._count += 1
        self._latest.append(math.log(ratio))
        if self._count < FIRST:
            return
        level = _undisturbed(self._latest)
        if self._count == FIRST and self._shown_by not in (None, bucket):
            visits = self._visits[bucket]
            visits.append(min(max(level - self._shared, -MOST), MOST))
            self._own[bucket] = BELIEVED * statistics.median(visits)
        else:
            self._shared, self._shown_by = level - self._own.get(bucket, 0.0), bucket


def _undisturbed(values: Sequence[float]) -> float:
    """The mean of the lower half."""
    kept = sorted(values)[: (len(values) + 1) // 2]
    return sum(kept) / len(kept)
