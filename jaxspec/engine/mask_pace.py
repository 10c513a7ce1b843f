"""How long the host may fill the masks of a split step: no longer than what they bring is worth to its rows."""

import math
import time
from collections.abc import Callable

from jaxspec.engine.buckets import Bucket

# Masks that were begun still take so long, in seconds: those of JSON with bounded strings do.
LONGEST = 0.002
# What a mask after a draft is worth, in tokens: the draft may be accepted, and others after it.
WORTH = 0.5
# What steps take at least is the shortest time seen, and what the host does beside masks a mean: both forget so much a step.
FORGETS = 0.01


class MaskPace:
    """Follows how long the steps of a bucket take where masks are there in time, and how long the host works in them beside
    masks. Up to the difference masks cost no time."""

    def __init__(self) -> None:
        self._seconds: dict[Bucket, tuple[float, float]] = {}

    def from_now(self, bucket: Bucket, rows: int) -> Callable[[int], bool]:
        """Whether the masks after drafts of so many rows may be begun, at the time when it is asked.

        Their rows verify fewer drafts where all rows would wait so long for them that they lose more tokens.

        Args:
            bucket, rows: of the split step whose masks are filled from now on.
        """
        step, host = self._seconds.get(bucket, (math.inf, 0.0))
        latest = time.monotonic() + step - host - LONGEST
        return lambda waiting: time.monotonic() <= latest + WORTH * waiting / rows * step

    def observe(self, bucket: Bucket, step: float, host: float) -> None:
        """
        Args:
            bucket: of a split step that was read.
            step: seconds since the step before it was read.
            host: of these the seconds in which the host worked on something else than masks.
        """
        shortest, mean = self._seconds.get(bucket, (math.inf, host))
        self._seconds[bucket] = min(step, (1 + FORGETS) * shortest), mean + FORGETS * (host - mean)
