"""Whether what drafts are accepted has changed, by what was expected of the latest windows."""

import math

import numpy as np

# Windows after which what was seen counts for 1/e.
LATELY = 64.0
# By how many standard deviations, and one draft, more or fewer must have been accepted than was expected.
SURPRISE = 4.0


class Change:
    """Counts the latest windows of all requests.

    Args:
        most: drafts of a window at most.

    Attributes:
        reached, hits: float [most] how often the draft at each position was verified, those before it being accepted, and how
            often it was accepted too.
    """

    def __init__(self, most: int):
        self.reached, self.hits = np.zeros(most), np.zeros(most)
        self._excess, self._variance = 0.0, 0.0

    def add(self, reached: np.ndarray, hits: np.ndarray, expected: np.ndarray) -> None:
        """Counts one step.

        Args:
            reached, hits: bool [windows, most].
            expected: probability [windows] that the first draft of each window would be accepted.
        """
        first = reached[:, 0]
        p = expected[first]
        kept = math.exp(-len(p) / LATELY)
        self.reached, self.hits = kept * self.reached + reached.sum(axis=0), kept * self.hits + hits.sum(axis=0)
        self._excess = kept * self._excess + float((hits[first, 0] - p).sum())
        self._variance = kept**2 * self._variance + float((p * (1 - p)).sum())

    @property
    def is_evident(self) -> bool:
        """The first drafts were accepted so often, or so seldom, that chance does not explain it."""
        return abs(self._excess) > SURPRISE * math.sqrt(self._variance) + 1

    def accept(self) -> None:
        """What was seen is expected from now on."""
        self._excess = self._variance = 0.0
