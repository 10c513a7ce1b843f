"""How long the host may fill the masks of a split step: as long as the device does not wait for it."""

import math

from jaxspec.engine.buckets import Bucket

# Masks that were begun still take so long, in seconds: those of JSON with bounded strings do.
LONGEST = 0.002
# What steps take at least is the shortest time seen, and what the host does beside masks a mean: both forget so much a step.
FORGETS = 0.01


class MaskPace:
    """Follows how long the steps of a bucket take where masks are there in time, and how long the host works in them beside
    masks."""

    def __init__(self) -> None:
        self._seconds: dict[Bucket, tuple[float, float]] = {}

    def allowed(self, bucket: Bucket) -> float:
        """Seconds after which rows verify fewer drafts rather than wait for further masks.

        Args:
            bucket: of the split step.
        """
        if bucket not in self._seconds:
            return math.inf
        step, host = self._seconds[bucket]
        return step - host - LONGEST

    def observe(self, bucket: Bucket, step: float, host: float) -> None:
        """
        Args:
            bucket: of a split step that was read.
            step: seconds since the step before it was read.
            host: of these the seconds in which the host worked on something else than masks.
        """
        shortest, mean = self._seconds.get(bucket, (math.inf, host))
        self._seconds[bucket] = min(step, (1 + FORGETS) * shortest), mean + FORGETS * (host - mean)
