"""Grammars of tool calls, in llguidance's variant of Lark: what an output must be where a call is required, and what a call
must be where there may be one.

Each format writes one call of a function (`CallWriter`); here are the pieces that it is made of.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from serve.parsers.arguments import Schemas, types_of

# Arguments of a function that are held to nothing but the format.
ANYTHING: Mapping[str, Any] = {"type": "object"}
# The name of any parameter.
ANY_NAME = r"/[A-Za-z0-9_.:-]{1,64}/"
# White space inside arguments: a space, or a line's end and indentation.
_WHITESPACE = r" |\r?\n( {0,32}|\t{0,8})"


class Frame(NamedTuple):
    """What stands before the first call, between two, and after the last; texts of the grammar.

    Attributes:
        instead: what stands before an answer that has no calls.
    """

    before: str = ""
    between: str = ""
    after: str = ""
    instead: str = ""


def pattern(text: str) -> str:
    """A regular expression of a text, to stand between slashes."""
    return re.escape(text).replace("/", "\\/")


class CallGrammar:
    """Builds the rules of one request.

    Args:
        token_id: of a tag that is a special token, which no text can spell; None for others.
        special_ids: of all special tokens: text that nothing holds may have them.
        tags: of the format, as far as they may be special tokens.
    """

    def __init__(
        self, token_id: Callable[[str], int | None], special_ids: Collection[int] = (), tags: Iterable[str] = ()
    ):
        self._token_id = token_id
        self._tag_ids = {token for tag in tags if (token := token_id(tag)) is not None}
        self._unnamed_ids = frozenset(special_ids) - self._tag_ids
        self._rules: list[str] = []

    def tag(self, text: str) -> str:
        """A tag: its special token, or its characters."""
        token = self._token_id(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    def text(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False) if text else ""

    def value(self, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> str:
        """JSON that a schema accepts. `root` has the definitions that it refers to."""
        whole = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
        for name in ("$defs", "definitions"):
            if root and name in root and name not in whole:
                whole[name] = root[name]
        return self._rule(f"%json {json.dumps(whole)}")

    def free(self, end: str) -> str:
        """Any text, up to and including `end`."""
        if self._token_id(end) is not None:
            return f"ANY_TEXT {self.tag(end)}"
        return self._rule(f"ANY_TEXT {self.text(end)}", lazy=True)

    def bare_value(self, schema: Any, root: Mapping[str, Any], end: str) -> str:
        """A value that a tagged format writes without quotes if it is a text, up to and including `end`."""
        schema = schema if isinstance(schema, Mapping) else {}
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices and all(isinstance(choice, str) for choice in choices):
            return f"{self._rule(' | '.join(self.text(choice) or chr(34) * 2 for choice in choices))} {self.tag(end)}"
        types = types_of(schema, root)
        if not types or "string" in types:
            return self.free(end)
        return f"{self.value(schema, root)} {self.tag(end)}"

    def parameters(
        self, schema: Mapping[str, Any], write: Callable[[str, Mapping[str, Any]], str], anything: Callable[[], str]
    ) -> str:
        """All properties in the schema's order, those that are not required optional.

        Args:
            write: one property's grammar, of its name and its schema.
            anything: writes that of any property, for `ANYTHING`.
        """
        if schema is ANYTHING:
            return f"({anything()})*"
        properties = schema.get("properties")
        required = schema.get("required") or ()
        if not isinstance(properties, Mapping):
            return ""
        parts = []
        for name, each in properties.items():
            rule = self._rule(write(name, each))
            parts.append(rule if name in required else f"{rule}?")
        return " ".join(parts)

    def either(self, bodies: Iterable[str]) -> str:
        return self._rule(" | ".join(bodies))

    def soon(self, regex: str) -> str:
        """The shortest text that a regular expression matches; it is nothing else where it may come."""
        return self._rule(f"/{regex}/", lazy=True)

    def others(self, *tags: str) -> str:
        """Any one special token but these tags; empty where there is none."""
        # Each tag by itself: llguidance takes a token for one symbol only, so that no two may hold it.
        named = sorted(self._tag_ids - {self._token_id(tag) for tag in tags})
        symbols = [f"<[{token}]>" for token in named]
        if self._unnamed_ids:
            symbols.append(f"<[{','.join(map(str, sorted(self._unnamed_ids)))}]>")
        return f"({' | '.join(symbols)})" if symbols else ""

    def watched(self, openings: Sequence[tuple[str, str]], *, first: str = "", last: Iterable[str] = ()) -> str:
        """Text that nothing holds, but for what follows some tags.

        Args:
            openings: each tag with the grammar of what has to follow it.
            first: a grammar of the beginning. last: grammars of the end, besides any text.
        """
        pieces = [f"{self.free(tag)} {rest}" for tag, rest in openings]
        if others := self.others(*(tag for tag, _ in openings)):
            pieces.append(f"ANY_TEXT {others}")
        return self._rule(f"{first} ({' | '.join(pieces)})* ({' | '.join(['ANY_TEXT', *last])})")

    def after_thought(self, tags: tuple[str, str], answer: str, *, inside: bool) -> str:
        """An answer, in front of which there may be a thought between tags: that one is held to nothing.

        Args:
            inside: the first tag has been written.
        """
        opening, close = tags
        others = self.others(close)
        text = f"(ANY_TEXT {others})*" if others else ""
        thought = f"{text} ({self.free(close)} {answer} | ANY_TEXT)"
        if inside:
            return thought
        is_token = self._token_id(opening) is not None
        begins = rf"/\s+/? {self.tag(opening)}" if is_token else self.soon(rf"\s*{pattern(opening)}")
        return f"{answer} | {begins} {thought}"

    def start(self, body: str) -> str:
        """The whole grammar of an output that is `body`."""
        rules = "\n".join(self._rules)
        return f"%llguidance {{}}\nstart: {body}\n{rules}\nANY_TEXT: /(.|\\n)*/\n"

    def whole(self, frame: Frame, calls: Sequence[str], *, parallel: bool, instead: str = "") -> str:
        """The grammar of an output: one call, or with `parallel` as many as the model likes.

        Args:
            calls: one call of each function.
            instead: an output without calls, where there may be one.
        """
        call = self.either(calls)
        more = f"({frame.between} {call})*" if parallel else ""
        start = " ".join(filter(None, (frame.before, call, more, frame.after)))
        if instead:
            start = f"{self._rule(start)} | {frame.instead} {instead}"
        return self.start(start)

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


class CallWriter(Protocol):
    """A format of calls, as far as their grammar goes."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Of its tags those that are special tokens in some vocabulary: the text must have them."""
        ...

    def frame(self, grammar: CallGrammar) -> Frame: ...

    def write_call(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        """One call of a function, whose parameters have this JSON schema."""
        ...

    def watch(self, grammar: CallGrammar, functions: Schemas) -> str:
        """Any output, but its calls are of these functions, with arguments that fit their schemas."""
        ...


def required_calls(
    form: CallWriter,
    schemas: Schemas,
    token_id: Callable[[str], int | None],
    *,
    parallel: bool,
    instead: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an output that calls one of the functions, or several of them.

    Args:
        instead: a schema: the output may also be JSON that it accepts, and no call.
    """
    grammar = CallGrammar(token_id)
    calls = [form.write_call(grammar, name, parameters) for name, parameters in schemas.items()]
    answer = "" if instead is None else grammar.value(instead)
    return grammar.whole(form.frame(grammar), calls, parallel=parallel, instead=answer)


def held_calls(
    form: CallWriter,
    schemas: Schemas,
    token_id: Callable[[str], int | None],
    special_ids: Collection[int],
    *,
    thought: tuple[str, str] | None = None,
    inside: bool = False,
) -> str:
    """The grammar of an output that may call functions: where a call begins it is one of these, and nothing holds the rest.

    Args:
        schemas: of a function whose arguments are held to none, `ANYTHING`.
        thought: the tags of a thought that may come first, in which nothing is a call. inside: the output begins in it.
    """
    grammar = CallGrammar(token_id, special_ids, (*form.tokens, *(thought or ())))
    answer = form.watch(grammar, schemas)
    return grammar.start(answer if thought is None else grammar.after_thought(thought, answer, inside=inside))
