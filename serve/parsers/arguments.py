"""Arguments that a model writes one by one, between tags and not as JSON, made into the text of a JSON object."""

import json
from collections.abc import Mapping
from typing import Any

from serve.parsers.events import Sink

# Of `anyOf` in `anyOf`, and of references to references.
_MAX_DEPTH = 8
_NULLS = ("null", "None")

Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters of each tool, by its name


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a parameter may have; empty where its schema names none."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    found: set[str] = set()
    named = schema.get("type")
    found |= {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
    if not found and isinstance(values := schema.get("enum"), list):
        found |= {_type_of(value) for value in values}
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(name), list):
            found |= {kind for part in parts for kind in types_of(part, root, depth + 1)}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        found |= types_of(target, root, depth + 1)
    return frozenset(found)


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON: as the schema has it where the text is such a value, and otherwise as a text."""
    plain = text.strip()
    if "string" in types:
        if plain in _NULLS and "null" in types:
            return "null"
        if not (plain[:1] in ("{", "[") and types & {"object", "array"}):
            return json.dumps(text, ensure_ascii=False)
    if plain in _NULLS:
        return "null"
    if plain.lower() in ("true", "false") and types <= {"boolean", "null"}:
        return plain.lower()
    return plain if is_json(plain) else json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class ArgumentsWriter:
    """Writes one call's arguments into a sink. A text goes out as it comes, any other value once it is there.

    Args:
        parameters: the JSON schema of the tool's parameters.
        trims: one line end at each side of a value belongs to the format.
    """

    def __init__(self, sink: Sink, parameters: Mapping[str, Any], *, trims: bool = False):
        self._sink = sink
        self._parameters = parameters
        self._trims = trims
        self._separator = "{"
        self._types: frozenset[str] = frozenset()
        self._streams = False
        self._first = True
        self._held = ""  # a line end of a text that streams
        self._value: list[str] = []  # of any other

    def begin(self, name: str, *, is_text: bool | None = None) -> None:
        """
        Args:
            is_text: whether the value is a text and no JSON, where the format says so; None: as the schema has it.
        """
        properties = self._parameters.get("properties")
        known = properties.get(name) if isinstance(properties, Mapping) else None
        if is_text is None:
            self._types = types_of(known, self._parameters) if known is not None else frozenset({"string"})
        else:
            self._types = frozenset({"string"} if is_text else ())
        self._streams = self._types == {"string"}
        self._first, self._held, self._value = True, "", []
        self._sink.arguments(self._separator + json.dumps(name, ensure_ascii=False) + ": " + '"' * self._streams)
        self._separator = ", "

    def piece(self, text: str) -> None:
        if not self._streams:
            self._value.append(text)
            return
        if self._trims and self._first:
            text, self._first = text.removeprefix("\n"), False
        text = self._held + text
        self._held = "\n" if self._trims and text.endswith("\n") else ""
        if ready := text[: len(text) - len(self._held)]:
            self._sink.arguments(json.dumps(ready, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        if self._streams:
            self._sink.arguments('"')
            return
        value = "".join(self._value)
        if self._trims:
            value = value.removeprefix("\n").removesuffix("\n")
        self._sink.arguments(as_json(value, self._types))

    def close(self) -> None:
        self._sink.arguments("{}" if self._separator == "{" else "}")
