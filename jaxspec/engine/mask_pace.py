"""How long the host may fill the masks of a split step: as long as the device computes what their rows wait for."""

import math

from jaxspec.engine.buckets import Bucket

# Of the time from one step's output to the next one's. The rest is for masks that were begun, their upload and the launch of
# what chooses, which also has to be there before the forward pass ends, and for what follows that pass on the device.
SHARE = 0.5
# What a bucket's steps take at least: the shortest time seen, which so many parts of itself later steps may take longer.
FORGETS = 0.01


class MaskPace:
    """Follows how long steps take where masks are there in time."""

    def __init__(self) -> None:
        self._seconds: dict[Bucket, float] = {}

    def until(self, bucket: Bucket, read: float) -> float:
        """The `time.monotonic()` from which rows verify fewer drafts rather than wait for further masks.

        Args:
            bucket: of the split step.
            read: when the step before it was read: its forward pass has begun since.
        """
        return read + SHARE * self._seconds.get(bucket, math.inf)

    def observe(self, bucket: Bucket, seconds: float) -> None:
        """A split step was read so many seconds after the one before it."""
        self._seconds[bucket] = min(seconds, (1 + FORGETS) * self._seconds.get(bucket, math.inf))
