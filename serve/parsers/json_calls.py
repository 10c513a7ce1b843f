"""Calls as JSON objects of name and arguments: Hermes (Qwen 2.5 and 3) and Llama 3."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.parsers.arguments import Schemas
from serve.parsers.events import Sink
from serve.parsers.formats import call_name
from serve.parsers.grammar import CallGrammar, Frame, pattern
from serve.parsers.source import Parsing, Source, attempt


def _key(source: Source, *names: str) -> Parsing[str | None]:
    """A member's name and its colon, with white space around them."""
    yield from source.spaces()
    found = yield from source.literal(*(f'"{name}"' for name in names))
    yield from source.spaces()
    if found is None or (yield from source.literal(":")) is None:
        return None
    yield from source.spaces()
    return found[1:-1]


def _name(source: Source) -> Parsing[str | None]:
    """The value of `name`."""
    if (yield from source.literal('"')) is None:
        return None
    found = yield from source.short('"')
    return call_name(found[0]) if found else None


def _comma(source: Source) -> Parsing[bool]:
    yield from source.spaces()
    return (yield from source.literal(",")) is not None


@dataclass(frozen=True)
class JsonCalls:
    """
    Attributes:
        opens: see `ToolFormat`.
        close: the tag behind a call; empty: none.
        between: what separates several calls of one answer.
        arguments: the key of the arguments, as models write it; both are read.
        known_only: only names of tools make an object a call: without tags it may be any object.
    """

    opens: tuple[str, ...]
    close: str = ""
    between: str = ""
    arguments: str = "arguments"
    known_only: bool = False
    bare: bool = False
    ends_reasoning: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*self.opens, self.close) if self.close else self.opens

    def frame(self, grammar: CallGrammar) -> Frame:
        return Frame(between=f"/{self.between} ?/" if self.between else grammar.text("\n"))

    def write_call(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        if not self.close:
            return f"{grammar.text(self._head(name))} {grammar.value(parameters)} {grammar.text('}')}"
        return f"{grammar.tag(self.opens[0])} {self._tagged(grammar, name, parameters)}"

    def watch(self, grammar: CallGrammar, functions: Schemas) -> str:
        if self.close:
            calls = grammar.either(self._tagged(grammar, name, each) for name, each in functions.items())
            return grammar.watched([(tag, calls) for tag in self.opens])
        values = {name: grammar.value(each) for name, each in functions.items()}
        first, more = (self._bare_call(grammar, values, before) for before in ("", rf"\s*{self.between}"))
        calls = f"({first} {more}*)?"
        return grammar.watched([(tag, calls) for tag in self.opens], first=calls)

    def _head(self, name: str) -> str:
        return f'{{"name": "{name}", "{self.arguments}": '

    def _tagged(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        """A call behind its opening tag."""
        before, after = grammar.text("\n" + self._head(name)), grammar.text("}\n")
        return f"{before} {grammar.value(parameters)} {after} {grammar.tag(self.close)}"

    def _bare_call(self, grammar: CallGrammar, values: Mapping[str, str], before: str) -> str:
        """One call as `_one` tells it from other objects, which it does by its beginning, however that is spaced.

        Args:
            values: the arguments of each function.
            before: a regular expression of what stands in front.
        """
        bodies = []
        brace, keys = rf"{before}\s*\{{\s*", r'"(arguments|parameters)"\s*:'
        names = {name: pattern(name) for name in values}
        for name, value in values.items():
            head = grammar.soon(rf'{brace}"name"\s*:\s*"{names[name]}"\s*,\s*{keys}')
            bodies.append(f"{head} {grammar.text(' ')}? {value} {grammar.text('}')}")
        # Arguments first: whose they are turns out behind them. An object that is no call cannot begin so.
        named = [rf'{value} /\s*,\s*"name"\s*:\s*"{names[name]}"\s*\}}/' for name, value in values.items()]
        bodies.append(f"{grammar.soon(brace + keys)} {grammar.text(' ')}? {grammar.either(named)}")
        return grammar.either(bodies)

    def calls(self, source: Source, sink: Sink, tag: str, schemas: Schemas) -> Parsing[bool]:
        if not (yield from self._one(source, sink, tag, schemas)):
            return False
        while self.between and (yield from attempt(source, self._separated(source))):
            if not (yield from self._one(source, sink, self.between, schemas)):
                sink.content(self.between)
                break
        return True

    def _separated(self, source: Source) -> Parsing[str | None]:
        yield from source.spaces()
        return (yield from source.literal(self.between))

    def _one(self, source: Source, sink: Sink, tag: str, schemas: Schemas) -> Parsing[bool]:
        name = yield from attempt(source, self._header(source, schemas))
        if name is None:
            return (yield from self._arguments_first(source, sink, tag, schemas))
        sink.call(name)
        if (yield from source.balanced(sink.arguments)):
            yield from attempt(source, self._end(source))
        return True

    def _header(self, source: Source, schemas: Schemas) -> Parsing[str | None]:
        """Up to the arguments' brace."""
        yield from source.spaces()
        if (yield from source.literal("{")) is None or (yield from _key(source, "name")) is None:
            return None
        name = yield from _name(source)
        if name is None or (self.known_only and name not in schemas) or not (yield from _comma(source)):
            return None
        if (yield from _key(source, "arguments", "parameters")) is None:
            return None
        return name if (yield from source.peek()) == "{" else None

    def _end(self, source: Source) -> Parsing[str | None]:
        yield from source.spaces()
        brace = yield from source.literal("}")
        if not self.close:
            return brace
        yield from source.spaces()
        return (yield from source.literal(self.close))

    def _arguments_first(self, source: Source, sink: Sink, tag: str, schemas: Schemas) -> Parsing[bool]:
        """As Hermes 2 writes them. What turns out to be no call goes out as the text that it is, not to be read again."""
        opening = yield from attempt(source, self._reversed_header(source))
        if opening is None:
            return False
        written: list[str] = []
        name = None
        if (yield from source.balanced(written.append)):
            name = yield from attempt(source, self._reversed_end(source, schemas))
        if name is None:
            sink.content(tag + opening + "".join(written))
            return True
        sink.call(name)
        sink.arguments("".join(written))
        return True

    def _reversed_header(self, source: Source) -> Parsing[str | None]:
        yield from source.spaces()
        if (yield from source.literal("{")) is None:
            return None
        key = yield from _key(source, "arguments", "parameters")
        if key is None or (yield from source.peek()) != "{":
            return None
        return source.marked()

    def _reversed_end(self, source: Source, schemas: Schemas) -> Parsing[str | None]:
        if not (yield from _comma(source)) or (yield from _key(source, "name")) is None:
            return None
        name = yield from _name(source)
        if name is None or (self.known_only and name not in schemas):
            return None
        return name if (yield from self._end(source)) is not None else None


HERMES = JsonCalls(opens=("<tool_call>",), close="</tool_call>")
LLAMA3_JSON = JsonCalls(opens=("<|python_tag|>",), between=";", arguments="parameters", known_only=True, bare=True)
