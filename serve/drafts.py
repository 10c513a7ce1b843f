"""Which parts of an answer's text are accepted drafts, for clients that show it."""

from collections.abc import Sequence

from typing_extensions import TypedDict


class DraftRun(TypedDict):
    text: str
    accepted: bool


class DraftRuns:
    """Cuts the text of one growing output into runs, by the tokens that it is of.

    Text may come later than its tokens: what may become a stop string is held back, and so is half a character.
    """

    def __init__(self) -> None:
        self._given = 0  # characters of the text that have been cut
        self._marks: list[tuple[int, bool]] = []  # where tokens begin that text may still come of

    def add(self, text: str, offsets: Sequence[int], accepted: Sequence[bool]) -> list[DraftRun]:
        """The runs of the newest text; joined they are that text.

        Args:
            offsets: of each new token, the number of characters of the whole text before it.
            accepted: of each new token, whether it is a draft that the target agreed with.
        """
        self._marks += zip(offsets, accepted, strict=True)
        start, self._given = self._given, self._given + len(text)
        runs: list[DraftRun] = []
        for index, (offset, is_draft) in enumerate(self._marks):
            following = self._marks[index + 1][0] if index + 1 < len(self._marks) else self._given
            piece = text[max(offset - start, 0) : max(min(following, self._given) - start, 0)]
            if piece and runs and runs[-1]["accepted"] == is_draft:
                runs[-1]["text"] += piece
            elif piece:
                runs.append({"text": piece, "accepted": is_draft})
        # The last token that has begun, and all that begin where the text ends now.
        begun = [i for i, (offset, _) in enumerate(self._marks) if offset < self._given]
        self._marks = self._marks[begun[-1] if begun else 0 :]
        return runs
