"""Calls whose arguments stand one by one between tags: Qwen3-Coder, MiniMax-M2, GLM-4.5, DeepSeek V3.2."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.parsers.arguments import ArgumentsWriter, Schemas, types_of
from serve.parsers.events import Sink
from serve.parsers.formats import call_name
from serve.parsers.grammar import ANY_NAME, CallGrammar, Frame
from serve.parsers.source import Parsing, Source, attempt


@dataclass(frozen=True)
class TaggedCalls:
    """
    Attributes:
        wraps: pairs of tags around the calls; an answer uses one pair.
        call: what begins a call, what ends its name, and what ends the call.
        parameter: what begins a parameter, and what ends its value.
        names: what may end a parameter's name; a format that tells texts from JSON has the texts' one first.
        tells_texts: it does.
        trims: one line end at each side of a value belongs to the format.
        wrap_is_optional: a call may come without tags around it.
    """

    wraps: tuple[tuple[str, str], ...]
    call: tuple[str, str, str]
    parameter: tuple[str, str]
    names: tuple[str, ...]
    tells_texts: bool = False
    trims: bool = False
    wrap_is_optional: bool = False
    ends_reasoning: bool = False
    bare: bool = False

    @property
    def opens(self) -> tuple[str, ...]:
        return tuple(wrap[0] for wrap in self.wraps) + ((self.call[0],) if self.wrap_is_optional else ())

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(tag for wrap in self.wraps for tag in wrap)

    def frame(self, grammar: CallGrammar) -> Frame:
        before, after = map(grammar.tag, self.wraps[0])
        line = grammar.text("\n")
        if self.wrap_is_optional:  # each call has its own
            return Frame(f"{before} {line}", f"{line} {after} {line} {before} {line}", f"{line} {after}")
        return Frame(f"{before} {line}", line, f"{line} {after}")

    def write_call(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        return f"{grammar.text(self.call[0])} {self._opened(grammar, name, parameters)}"

    def watch(self, grammar: CallGrammar, functions: Schemas) -> str:
        opened = grammar.either(self._opened(grammar, name, each) for name, each in functions.items())
        line = grammar.text("\n")
        call = f"{grammar.text(self.call[0])} {opened} {line}"
        calls = f"{line} {call}" if self.wrap_is_optional else f"{line} ({call})+"  # each has its own wrap, or not
        openings = [(before, f"{calls} {grammar.tag(after)}") for before, after in self.wraps]
        return grammar.watched([*openings, *([(self.call[0], opened)] if self.wrap_is_optional else [])])

    def _opened(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        """A call behind what begins it."""
        text = grammar.text
        edge = "\n" if self.trims else ""

        def parameter(key: str, schema: Mapping[str, Any]) -> str:
            is_text = "string" in types_of(schema, parameters) or not types_of(schema, parameters)
            end = self.names[0] if is_text else self.names[-1]
            value = grammar.bare_value(schema, parameters, edge + self.parameter[1])
            return f"{text(self.parameter[0] + key + end + edge)} {value} {text(chr(10))}"

        def anything() -> str:
            begin, end = text(self.parameter[0]), edge + self.parameter[1]
            values = (
                [grammar.free(end), f"{grammar.value({})} {grammar.tag(end)}"]
                if self.tells_texts
                else [grammar.free(end)]
            )
            written = (f"{text(name + edge)} {value}" for name, value in zip(self.names, values, strict=True))
            return f"{begin} {ANY_NAME} {grammar.either(written)} {text(chr(10))}"

        written = grammar.parameters(parameters, parameter, anything)
        return f"{text(f'{name}{self.call[1]}' + chr(10))} {written} {text(self.call[2])}"

    def calls(self, source: Source, sink: Sink, tag: str, schemas: Schemas) -> Parsing[bool]:
        wrapped = tag != self.call[0]
        close = dict(self.wraps).get(tag, self.wraps[0][1])
        name = yield from attempt(source, self._name(source, begun=not wrapped))
        while name is not None:
            sink.call(name)
            writer = ArgumentsWriter(sink, schemas.get(name, {}), trims=self.trims)
            if (yield from self._parameters(source, sink, writer, close)):
                return True
            name = yield from attempt(source, self._name(source, begun=False))
            if name is None:
                yield from attempt(source, _after_spaces(source, close))
                return True
        return False

    def _name(self, source: Source, *, begun: bool) -> Parsing[str | None]:
        if not begun and (yield from _after_spaces(source, self.call[0])) is None:
            return None
        found = yield from source.short(self.call[1])
        return call_name(found[0]) if found else None

    def _parameters(self, source: Source, sink: Sink, writer: ArgumentsWriter, close: str) -> Parsing[bool]:
        """True if nothing of the calls is left."""
        while True:
            tag = yield from attempt(source, _after_spaces(source, self.parameter[0], self.call[2], close))
            if tag != self.parameter[0]:
                if tag is not None or not source.cut:
                    writer.close()
                return tag != self.call[2]
            found = yield from attempt(source, source.short(*self.names))
            if found is None:  # what follows is a text
                if not source.cut:
                    writer.close()
                sink.content(tag)
                return True
            is_text = found[1] == self.names[0] if self.tells_texts else None
            writer.begin(found[0].strip(), is_text=is_text)
            if (yield from source.until(writer.piece, self.parameter[1])) is None and source.cut:
                return True
            writer.end()


def _after_spaces(source: Source, *tags: str) -> Parsing[str | None]:
    yield from source.spaces()
    return (yield from source.literal(*tags))


@dataclass(frozen=True)
class GlmCalls:
    """`<tool_call>NAME`, pairs of key and value, `</tool_call>`."""

    opens: tuple[str, ...] = ("<tool_call>",)
    tokens: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    ends_reasoning: bool = False
    bare: bool = False

    def frame(self, grammar: CallGrammar) -> Frame:
        return Frame(between=grammar.text("\n"))

    def write_call(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        return f"{grammar.tag('<tool_call>')} {self._opened(grammar, name, parameters)}"

    def watch(self, grammar: CallGrammar, functions: Schemas) -> str:
        calls = grammar.either(self._opened(grammar, name, each) for name, each in functions.items())
        return grammar.watched([("<tool_call>", calls)])

    def _opened(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        """A call behind its opening tag."""
        tag, text = grammar.tag, grammar.text

        def parameter(key: str, schema: Mapping[str, Any]) -> str:
            value = grammar.bare_value(schema, parameters, "</arg_value>")
            head = f"{tag('<arg_key>')} {text(key)} {tag('</arg_key>')} {text(chr(10))} {tag('<arg_value>')}"
            return f"{head} {value} {text(chr(10))}"

        def anything() -> str:
            head = f"{tag('<arg_key>')} {ANY_NAME} {tag('</arg_key>')} {text(chr(10))} {tag('<arg_value>')}"
            return f"{head} {grammar.free('</arg_value>')} {text(chr(10))}"

        return f"{text(name + chr(10))} {grammar.parameters(parameters, parameter, anything)} {tag('</tool_call>')}"

    def calls(self, source: Source, sink: Sink, tag: str, schemas: Schemas) -> Parsing[bool]:  # noqa: ARG002
        found = yield from attempt(source, self._header(source))
        if found is None:
            return False
        name, following = found
        sink.call(name)
        writer = ArgumentsWriter(sink, schemas.get(name, {}))
        tag_found: str | None = following
        while tag_found == "<arg_key>":
            key = yield from attempt(source, self._key(source))
            if key is None:  # what follows is a text
                if not source.cut:
                    writer.close()
                sink.content(tag_found)
                return True
            writer.begin(key)
            if (yield from source.until(writer.piece, "</arg_value>")) is None and source.cut:
                return True
            writer.end()
            tag_found = yield from attempt(source, _after_spaces(source, "<arg_key>", "</tool_call>"))
        if tag_found is not None or not source.cut:
            writer.close()
        return True

    def _header(self, source: Source) -> Parsing[tuple[str, str] | None]:
        found = yield from source.short("\n<arg_key>", "<arg_key>", "\n</tool_call>", "</tool_call>")
        name = call_name(found[0]) if found else None
        return (name, found[1].strip()) if found and name else None

    def _key(self, source: Source) -> Parsing[str | None]:
        found = yield from source.short("</arg_key>")
        if found is None or (yield from _after_spaces(source, "<arg_value>")) is None:
            return None
        return found[0].strip()


QWEN3_CODER = TaggedCalls(
    wraps=(("<tool_call>", "</tool_call>"),),
    call=("<function=", ">", "</function>"),
    parameter=("<parameter=", "</parameter>"),
    names=(">",),
    trims=True,
    wrap_is_optional=True,
)
MINIMAX_M2 = TaggedCalls(
    wraps=(("<minimax:tool_call>", "</minimax:tool_call>"),),
    call=('<invoke name="', '">', "</invoke>"),
    parameter=('<parameter name="', "</parameter>"),
    names=('">',),
)
DEEPSEEK_V32 = TaggedCalls(
    wraps=(
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    call=('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    parameter=('<｜DSML｜parameter name="', "</｜DSML｜parameter>"),
    names=('" string="true">', '" string="false">'),
    tells_texts=True,
    ends_reasoning=True,
)
GLM45 = GlmCalls()
