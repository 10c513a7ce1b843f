"""Calls as name and JSON between tags of their own, in a section: DeepSeek V3 and R1, V3.1, Kimi K2."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.parsers.arguments import Schemas
from serve.parsers.events import Sink
from serve.parsers.formats import call_name
from serve.parsers.grammar import CallGrammar, Frame
from serve.parsers.source import Parsing, Source, attempt

_KIMI_ID = re.compile(r"(?:functions\.)?(.+):(\d{1,9})")


@dataclass(frozen=True)
class Header:
    """Name and id of a call; the id is None where the format has none."""

    name: str
    id: str | None = None


@dataclass(frozen=True)
class Sections:
    """
    Attributes:
        section: the tags around all calls.
        call: the tags around one.
        middle: between header and arguments.
        fences: lines around the arguments.
        has_id: the header is an id, `functions.NAME:INDEX`.
        has_kind: the header is `function`, the middle tag and a line with the name.
    """

    section: tuple[str, str]
    call: tuple[str, str]
    middle: str
    fences: tuple[str, ...] = ()
    has_id: bool = False
    has_kind: bool = False
    ends_reasoning: bool = True
    bare: bool = False

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.section[0], self.call[0])

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*self.section, *self.call, self.middle)

    def frame(self, grammar: CallGrammar) -> Frame:
        return Frame(grammar.tag(self.section[0]), "", grammar.tag(self.section[1]))

    def write_call(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        return f"{grammar.tag(self.call[0])} {self._opened(grammar, name, parameters)}"

    def watch(self, grammar: CallGrammar, functions: Schemas) -> str:
        call = grammar.either(self._opened(grammar, name, each) for name, each in functions.items())
        opening, line = grammar.tag(self.call[0]), grammar.text("\n")
        section = f"{opening} {call} ({line}? {opening} {call})* {grammar.tag(self.section[1])}"
        return grammar.watched([(self.section[0], section), (self.call[0], call)])

    def _opened(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        """A call behind its opening tag."""
        tag, text, arguments = grammar.tag, grammar.text, grammar.value(parameters)
        if self.has_kind:
            head = f"{text('function')} {tag(self.middle)} {text(name + chr(10) + '```json' + chr(10))}"
            return f"{head} {arguments} {text(chr(10) + '```')} {tag(self.call[1])}"
        head = f"{text(f'functions.{name}:')} /[0-9]{{1,4}}/" if self.has_id else text(name)
        return f"{head} {tag(self.middle)} {arguments} {tag(self.call[1])}"

    def calls(self, source: Source, sink: Sink, tag: str, schemas: Schemas) -> Parsing[bool]:  # noqa: ARG002
        header = yield from attempt(source, self._first(source, tag))
        if header is None:
            return False
        while True:
            yield from self._arguments(source, sink, header)
            following = yield from attempt(source, self._next(source))
            if following is None or following == self.section[1]:
                return True
            found = yield from attempt(source, self._header(source))
            if found is None:
                sink.content(following)
                return True
            header = found

    def _first(self, source: Source, tag: str) -> Parsing[Header | None]:
        if tag == self.section[0]:
            yield from source.spaces()
            if (yield from source.literal(self.call[0])) is None:
                return None
        return (yield from self._header(source))

    def _next(self, source: Source) -> Parsing[str | None]:
        yield from source.spaces()
        return (yield from source.literal(self.call[0], self.section[1]))

    def _header(self, source: Source) -> Parsing[Header | None]:
        found = yield from source.short(self.middle)
        if found is None:
            return None
        if self.has_kind:
            found = yield from source.short("\n", "```", "{")
            if found is None or found[1] == "{":
                return None
            if found[1] == "\n":
                yield from source.literal("```json\n", "```json", "```\n", "```")
            else:
                yield from source.literal("json\n", "json", "\n")
        text = found[0].strip()
        if self.has_id:
            parts = _KIMI_ID.fullmatch(text)
            name = call_name(parts.group(1)) if parts else None
            return Header(name, text) if name else None
        name = call_name(text)
        return Header(name) if name else None

    def _arguments(self, source: Source, sink: Sink, header: Header) -> Parsing[None]:
        sink.call(header.name, header.id)
        yield from source.until(sink.arguments, *(fence + self.call[1] for fence in ("", *self.fences)))
        if not source.cut:
            sink.end_call()


_DEEPSEEK = {
    "section": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "call": ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "middle": "<｜tool▁sep｜>",
}
DEEPSEEK_V3 = Sections(**_DEEPSEEK, fences=("```", "\n```", "\n```\n", "```\n"), has_kind=True)  # type: ignore[arg-type]
DEEPSEEK_V31 = Sections(**_DEEPSEEK)  # type: ignore[arg-type]
KIMI_K2 = Sections(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    middle="<|tool_call_argument_begin|>",
    has_id=True,
)
