"""The seam for rules that live on the host and see a request's tokens as they are read: stop strings, grammars."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np

from jaxspec.engine.output import FinishReason


class RuleResult(NamedTuple):
    """What a rule makes of the ids it was fed.

    Attributes:
        keep: how many of the ids to keep if the output ends inside them, else None.
        text: text that has become final; "" from a rule that knows no text.
        text_offsets: for each id kept, the number of characters of the output before it; empty where there is no text.
        error: what is wrong with the rule itself; ends the request with an error.
    """

    keep: int | None = None
    text: str = ""
    text_offsets: tuple[int, ...] = ()
    error: str | None = None


class HostRule(Protocol):
    """A rule of one request. It is fed each output id once, in order, until the output has ended.

    The engine itself has no notion of text: it asks the rule where to stop, and passes the rule's text on in `RequestOutput`.

    Attributes:
        needs_readback: the rule must see the tokens of each step before the request's next step is planned; with a
            constraint, before the request's next token is chosen.
    """

    needs_readback: bool

    @property
    def constraint(self) -> "Constraint | None":
        """Which ids may come next, from a rule that says so. Such a rule needs the readback."""
        ...

    def feed(self, ids: Sequence[int], ended: FinishReason | None) -> RuleResult:
        """
        Args:
            ids: the newest output ids.
            ended: why the output ends with the last of them, where something other than this rule ends it, else None.
                With STOP the last id is an end-of-text or stop id.
        """
        ...


class FilledMasks(NamedTuple):
    """What was filled of a row's n masks.

    Attributes:
        masks: how many, from the first on, 1 to n. What those after them say does not count.
        verified: how many of its drafts the row may verify: fewer than it has where masks that count were left out.
    """

    masks: int
    verified: int


class Constraint(Protocol):
    """Says which ids may come next, given all that its rule has been fed."""

    def fill_masks(self, drafts: Sequence[int], words: np.ndarray) -> None:
        """Writes which ids may come next, and which after each of the drafts that may come first.

        Args:
            drafts: the ids that the next step verifies, at most n - 1.
            words: int32 [n, ceil(V / 32)], to be written whole: bit i % 32 of word i // 32 says that id i may come. What
                row i says counts only if the first i drafts are all allowed.
        """
        ...

    @classmethod
    def fill_many(
        cls,
        rows: Sequence[tuple[Self, Sequence[int]]],
        words: np.ndarray,
        may_begin: Callable[[int], bool] = lambda _rows: True,  # noqa: ARG003
    ) -> list[FilledMasks]:
        """`fill_masks` of several constraints of this class with their drafts.

        Args:
            words: int32 [X, n, ceil(V / 32)], of which only the masks that count need to be written.
            may_begin: whether masks after drafts of so many rows may be begun: a class that takes long should ask.
        """
        for (constraint, drafts), words_nM in zip(rows, words, strict=True):
            constraint.fill_masks(drafts, words_nM)
        return [FilledMasks(words.shape[1], len(drafts)) for _, drafts in rows]
