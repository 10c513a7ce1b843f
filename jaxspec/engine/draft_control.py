"""The seam between the scheduler and what chooses the number of drafts of each step. Nothing here needs jax."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Load:
    """What the next step is going to do, as far as the scheduler knows before it plans it.

    Attributes:
        slots: of the requests that may decode.
        wanted: for each, the most drafts that its request allows.
        most: the most drafts that any request of the step allows, those whose prompts run included.
        prompts: the step has prompt tokens.
        full: a request of the step needs the full sampler.
        choices: the numbers of drafts that the step may have, fewest first.
        ranks: of the requests that may decode, how many each rank has; () where there is one.
        tokens: of their contexts, of the rank with the most.
    """

    slots: Sequence[int]
    wanted: Sequence[int]
    most: int
    prompts: bool
    full: bool
    choices: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    tokens: int = 0

    @property
    def rows(self) -> int:
        """Decode rows of the step's shape, which is that of the rank with the most."""
        return max(self.ranks) if self.ranks else len(self.slots)


class DraftControl(Protocol):
    """Chooses the number of drafts of each step. What it is told of accepted drafts comes some steps late."""

    def choose(self, load: Load) -> int:
        """One of `load.choices`."""
        ...

    def admitted(self, slot: int) -> None:
        """From now on the slot serves another request."""
        ...

    def observe(self, windows: Sequence[tuple[int, int, int]]) -> None:
        """The windows of a step that has been read: slot, drafts that were to be verified (at least one), and accepted."""
        ...


class FixedDrafts:
    """Always so many drafts, but no more than some request allows."""

    def __init__(self, drafts: int):
        self.drafts = drafts

    def choose(self, load: Load) -> int:
        return at_least(min(self.drafts, load.most), load.choices)

    def admitted(self, slot: int) -> None:
        pass

    def observe(self, windows: Sequence[tuple[int, int, int]]) -> None:
        pass


def at_least(drafts: int, choices: tuple[int, ...]) -> int:
    """The fewest of the choices that is not under `drafts`; the most if all are."""
    return min((k for k in choices if k >= drafts), default=choices[-1])
