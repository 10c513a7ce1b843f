"""Memory that many requests share: a number of bytes, taken and given back on the event loop."""

from collections.abc import Callable


class ByteBudget:
    """
    Attributes:
        held: bytes that are taken now.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self.held = 0

    def take(self, count: int, refusal: Callable[[], Exception]) -> None:
        """Takes so many bytes, or raises the refusal."""
        if self.held + count > self._limit:
            raise refusal()
        self.held += count

    def give_back(self, count: int) -> None:
        self.held -= count
