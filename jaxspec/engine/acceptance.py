"""Acceptance statistics of speculation: how many drafts the target agreed with, and every figure that follows from it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """Counts over verified windows. A prefill step is not one, nor is a decode step that had no drafts to verify.

    A window cut by a stop counts whole.

    Attributes:
        histogram: entry i, of k + 1: windows in which the target agreed with exactly i drafts.
        num_drafted: drafts that could have been accepted: k a window, or fewer where a request asked for fewer or a step
            had fewer.
    """

    histogram: tuple[int, ...]
    num_drafted: int

    @property
    def k(self) -> int:
        return len(self.histogram) - 1

    @property
    def num_steps(self) -> int:
        """Windows verified."""
        return sum(self.histogram)

    @property
    def num_accepted(self) -> int:
        return sum(i * windows for i, windows in enumerate(self.histogram))

    @property
    def mean_length(self) -> float | None:
        """Tokens that a window yields on average, the target's own one counted: 1 to k + 1; None without windows."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else None

    @property
    def rate(self) -> float | None:
        """Part of all drafts that was accepted, 0 to 1; (mean_length - 1) / k where all windows drafted k."""
        return self.num_accepted / self.num_drafted if self.num_steps else None

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Of the drafts at each of the k positions, how many were accepted: never more than one position earlier."""
        return tuple(sum(self.histogram[position + 1 :]) for position in range(self.k))

    @property
    def rate_per_position(self) -> tuple[float, ...] | None:
        """Part of all windows that accepted the draft at each position."""
        steps = self.num_steps
        return tuple(accepted / steps for accepted in self.accepted_per_position) if steps else None

    def since(self, earlier: "Acceptance") -> "Acceptance":
        """What was counted after `earlier`, a former state of the same counts."""
        histogram = tuple(now - then for now, then in zip(self.histogram, earlier.histogram, strict=True))
        return Acceptance(histogram, self.num_drafted - earlier.num_drafted)


def acceptance_of(histogram: Sequence[int], num_drafted: int) -> Acceptance | None:
    """None for an empty histogram, which is what there is without speculation."""
    return Acceptance(tuple(histogram), num_drafted) if histogram else None


def probability_for(length: float, k: int) -> float:
    """The probability p with which each of k drafts must be accepted, if those before it are, for windows of `length`
    tokens on average, the target's own included: length = 1 + p + p^2 + ... + p^k, from 1 to k + 1.
    """
    low, high = 0.0, 1.0
    for _ in range(60):  # beyond the precision of a float
        p = (low + high) / 2
        if sum(p**i for i in range(k + 1)) < length:
            low = p
        else:
            high = p
    return high if length > 1 else 0.0
