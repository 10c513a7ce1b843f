"""Grammars of tool calls, in llguidance's variant of Lark: what an output must be where a call is required.

Each format writes one call of a function (`CallWriter`); here are the pieces that it is made of.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from serve.parsers.arguments import Schemas, types_of

# White space inside arguments: a space, or a line's end and indentation.
_WHITESPACE = r" |\r?\n( {0,32}|\t{0,8})"


class Frame(NamedTuple):
    """What stands before the first call, between two, and after the last; texts of the grammar."""

    before: str = ""
    between: str = ""
    after: str = ""


class CallGrammar:
    """Builds the rules of one request.

    Args:
        token_id: of a tag that is a special token, which no text can spell; None for others.
    """

    def __init__(self, token_id: Callable[[str], int | None]):
        self._token_id = token_id
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

    def parameters(self, schema: Mapping[str, Any], write: Callable[[str, Mapping[str, Any]], str]) -> str:
        """All properties in the schema's order, those that are not required optional.

        Args:
            write: one property's grammar, of its name and its schema.
        """
        properties = schema.get("properties")
        required = schema.get("required") or ()
        if not isinstance(properties, Mapping):
            return ""
        parts = []
        for name, each in properties.items():
            rule = self._rule(write(name, each))
            parts.append(rule if name in required else f"{rule}?")
        return " ".join(parts)

    def whole(self, frame: Frame, calls: Sequence[str], *, parallel: bool, instead: str = "") -> str:
        """The grammar of an output: one call, or with `parallel` as many as the model likes.

        Args:
            calls: one call of each function.
            instead: an output without calls, where there may be one.
        """
        call = self._rule(" | ".join(calls))
        more = f"({frame.between} {call})*" if parallel else ""
        start = " ".join(filter(None, (frame.before, call, more, frame.after)))
        if instead:
            start = f"{self._rule(start)} | {instead}"
        rules = "\n".join(self._rules)
        return f"%llguidance {{}}\nstart: {start}\n{rules}\nANY_TEXT: /(.|\\n)*/\n"

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


class CallWriter(Protocol):
    """A format of calls, as far as their grammar goes."""

    def frame(self, grammar: CallGrammar) -> Frame: ...

    def write_call(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        """One call of a function, whose parameters have this JSON schema."""
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
