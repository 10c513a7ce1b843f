"""What a format of tool calls is, and what several families share."""

import re
from typing import Protocol

from serve.parsers.arguments import Schemas
from serve.parsers.events import Sink
from serve.parsers.source import Parsing, Source

_NAME = re.compile(r"[^\s<>{}\[\]\"']{1,256}")


class ToolFormat(Protocol):
    """
    Attributes:
        opens: tags that open a call, or several.
        tokens: of its tags those that are special tokens in some vocabulary; the text must have them.
        ends_reasoning: the tags are no text that a thought could hold, so they also end one that was not closed.
        bare: calls may come without a tag, at the beginning of the answer.
    """

    opens: tuple[str, ...]
    tokens: tuple[str, ...]
    ends_reasoning: bool
    bare: bool

    def calls(self, source: Source, sink: Sink, tag: str, schemas: Schemas) -> Parsing[bool]:
        """Reads what follows an opening tag. False, with nothing read, if that is no call: then the tag is a text."""
        ...


def call_name(text: str) -> str | None:
    """A tool's name, or None for what cannot be one."""
    text = text.strip()
    return text if _NAME.fullmatch(text) else None
