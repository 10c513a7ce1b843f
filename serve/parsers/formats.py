"""What a format of tool calls is, and what several families share."""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from serve.parsers.arguments import Schemas
from serve.parsers.events import Sink
from serve.parsers.grammar import CallGrammar, Frame
from serve.parsers.source import Parsing, Source

_NAME = re.compile(r"[^\s<>{}\[\]\"']{1,256}")


class ToolFormat(Protocol):
    @property
    def opens(self) -> tuple[str, ...]:
        """Tags that open a call, or several."""
        ...

    @property
    def tokens(self) -> tuple[str, ...]:
        """See `CallWriter`."""
        ...

    @property
    def ends_reasoning(self) -> bool:
        """The tags are no text that a thought could hold, so they also end one that was not closed."""
        ...

    @property
    def bare(self) -> bool:
        """Calls may come without a tag, at the beginning of the answer."""
        ...

    def frame(self, grammar: CallGrammar) -> Frame:
        """What stands around calls, where they are required."""
        ...

    def write_call(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        """The grammar of one call of a function, whose parameters have this JSON schema."""
        ...

    def watch(self, grammar: CallGrammar, functions: Schemas) -> str:
        """See `CallWriter`."""
        ...

    def calls(self, source: Source, sink: Sink, tag: str, schemas: Schemas) -> Parsing[bool]:
        """Reads what follows an opening tag. False, with nothing read, if that is no call: then the tag is a text."""
        ...


def call_name(text: str) -> str | None:
    """A tool's name, or None for what cannot be one."""
    text = text.strip()
    return text if _NAME.fullmatch(text) else None
