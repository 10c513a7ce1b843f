"""The seam for rules that live on the host and see a request's tokens as they are read: stop strings, say."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxspec.engine.output import FinishReason


class RuleResult(NamedTuple):
    """What a rule makes of the ids it was fed.

    Attributes:
        keep: how many of the ids to keep if the output ends inside them, else None.
        text: text that has become final; "" from a rule that knows no text.
        text_offsets: for each id kept, the number of characters of the output before it; empty where there is no text.
    """

    keep: int | None = None
    text: str = ""
    text_offsets: tuple[int, ...] = ()


class HostRule(Protocol):
    """A rule of one request. It is fed each output id once, in order, until the output has ended.

    The engine itself has no notion of text: it asks the rule where to stop, and passes the rule's text on in `RequestOutput`.

    Attributes:
        needs_readback: the rule must see the tokens of each step before the request's next step is planned.
    """

    needs_readback: bool

    def feed(self, ids: Sequence[int], ended: FinishReason | None) -> RuleResult:
        """
        Args:
            ids: the newest output ids.
            ended: why the output ends with the last of them, where something other than this rule ends it, else None.
                With STOP the last id is an end-of-text or stop id.
        """
        ...
