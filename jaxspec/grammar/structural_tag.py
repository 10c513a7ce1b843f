"""Structural tags: a tree of formats, each a piece of the output, as a grammar of llguidance's Lark.

The tree is XGrammar's, which vLLM takes (`{"type": "structural_tag", "format": ...}`). What a format has that is not here is
an error that names it. Text that nothing bounds ends at the first of the texts that may follow it, so something has to.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]

_TEXT = "(.|\\n)*"
# Formats whose text ends only where something else begins.
_UNBOUNDED = ("any_text", "triggered_tags")


def structural_tag_grammar(root: Json, json_options: Json) -> str:
    """
    Args:
        root: has the tree in `format`.
        json_options: of all JSON, by llguidance's names.

    Raises:
        ValueError: it is no such tree, or has what is not supported; the message names the place and the keyword.
    """
    writer = _Writer(json_options)
    _only(root, "", "type", "format")
    try:
        start = writer.write(root.get("format"), "format", ())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules]) + "\n"


class _Writer:
    """Writes formats; each is followed by one of `ends`, which belongs to what is written, or by nothing if there is none."""

    def __init__(self, json_options: Json):
        self.rules: list[str] = []
        self._json_options = json_options
        self._formats: Mapping[str, Callable[[Json, str, Sequence[str]], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": lambda each, at, ends: self._repeated(each, at, ends, "?"),
            "star": lambda each, at, ends: self._repeated(each, at, ends, "*"),
            "plus": lambda each, at, ends: self._repeated(each, at, ends, "+"),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def write(self, value: Any, at: str, ends: Sequence[str]) -> str:
        each = _object(value, at)
        write = self._formats.get(kind := each.get("type", ""))
        if write is None:
            known = ", ".join(self._formats)
            raise ValueError(f"{at}.type {json.dumps(kind)[:80]} is not supported (supported: {known})")
        return self._rule(write(each, at, ends))

    def _const_string(self, each: Json, at: str, ends: Sequence[str]) -> str:
        _only(each, at, "type", "value")
        return f"{json.dumps(_text(each, 'value', at))} {_either(ends)}"

    def _json_schema(self, each: Json, at: str, ends: Sequence[str]) -> str:
        _only(each, at, "type", "json_schema", style="json", any_order=False)
        schema = {**_object(each.get("json_schema"), f"{at}.json_schema"), "x-guidance": self._json_options}
        return f"{self._rule(f'%json {json.dumps(schema)}')} {_either(ends)}"

    def _regex(self, each: Json, at: str, ends: Sequence[str]) -> str:
        _only(each, at, "type", "pattern")
        pattern = re.sub(r"(\\.)|/", lambda hit: hit.group(1) or r"\/", _text(each, "pattern", at), flags=re.DOTALL)
        return self._terminal(f"/{pattern}/ {_either(ends)}")

    def _any_text(self, each: Json, at: str, ends: Sequence[str]) -> str:
        _only(each, at, "type", excludes=[], max_tokens=None, max_chars=None)
        return self._text_before(ends) if ends else f"/{_TEXT}/"

    def _sequence(self, each: Json, at: str, ends: Sequence[str]) -> str:
        _only(each, at, "type", "elements")
        elements = [(e, f"{at}.elements[{i}]") for i, e in enumerate(_list(each, "elements", at))]
        parts, given = [], None
        for (element, here), following in zip(elements, [*elements[1:], None], strict=True):
            if given is not None:  # its first text has been written behind the text in front of it
                parts.append(self._after_first(_object(element, here), here, ends if following is None else ()))
                given = None
            elif following is None:
                parts.append(self.write(element, here, ends))
            elif self._is_unbounded(element, here):
                given = self._first_text(*following)
                parts.append(self.write(element, here, (given,)))
            else:
                parts.append(self.write(element, here, ()))
        return " ".join(parts)

    def _or(self, each: Json, at: str, ends: Sequence[str]) -> str:
        _only(each, at, "type", "elements")
        return " | ".join(self.write(e, f"{at}.elements[{i}]", ends) for i, e in enumerate(_list(each, "elements", at)))

    def _repeated(self, each: Json, at: str, ends: Sequence[str], sign: str) -> str:
        _only(each, at, "type", "content")
        content = each.get("content")
        if self._is_unbounded(content, f"{at}.content"):
            raise ValueError(f"{at}.content: text without a bound cannot be repeated")
        return f"({self.write(content, f'{at}.content', ())}){sign} {_either(ends)}"

    def _tag(self, each: Json, at: str, ends: Sequence[str]) -> str:
        begin = _text(each, "begin", at)
        return f"{json.dumps(begin)} {self._tag_rest(each, at)} {_either(ends)}"

    def _tag_rest(self, each: Json, at: str) -> str:
        """A tag without its begin."""
        _only(each, at, "type", "begin", "content", "end")
        if each.get("type", "tag") != "tag":
            raise ValueError(f"{at}.type must be tag")
        end = each.get("end")
        texts: list[Any] = end if isinstance(end, list) and end else [end]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{at}.end must be a text or a list of texts")
        if "" in texts and self._is_unbounded(each.get("content"), f"{at}.content"):
            raise ValueError(f"{at}.end must not be empty: nothing else ends its content")
        return self.write(each.get("content"), f"{at}.content", texts)

    def _triggered_tags(self, each: Json, at: str, ends: Sequence[str]) -> str:
        _only(
            each,
            at,
            "type",
            "triggers",
            "tags",
            excludes=[],
            at_least_one=(False, True),
            stop_after_first=(False, True),
        )
        triggers = _list(each, "triggers", at)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ValueError(f"{at}.triggers must be a list of texts that are not empty")
        tags: dict[str, list[tuple[str, str]]] = {trigger: [] for trigger in triggers}
        for i, value in enumerate(_list(each, "tags", at)):
            here = f"{at}.tags[{i}]"
            tag = _object(value, here)
            begin = _text(tag, "begin", here)
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"{here}.begin starts with none of the triggers")
            tags[trigger].append((begin.removeprefix(trigger), self._rule(self._tag_rest(tag, here))))
        following = {
            trigger: self._rule(" | ".join(f"{json.dumps(begin) if begin else ''} {rest}" for begin, rest in of))
            for trigger, of in tags.items()
            if of
        }
        called = " | ".join(f"{self._text_before([trigger])} {rest}" for trigger, rest in following.items())
        no_more = self._text_before(ends) if ends else f"/{_TEXT}/"
        last = _either(ends) if each.get("stop_after_first") else f"({called})* {no_more}"
        if each.get("at_least_one"):  # then no text comes before it
            first = " | ".join(f"{json.dumps(trigger)} {rest}" for trigger, rest in following.items())
            return f"({first}) {last}"
        return f"({called}) {last} | {no_more}" if each.get("stop_after_first") else last

    def _tags_with_separator(self, each: Json, at: str, ends: Sequence[str]) -> str:
        _only(each, at, "type", "tags", "separator", at_least_one=(False, True), stop_after_first=(False, True))
        separator = json.dumps(each.get("separator")) if _text(each, "separator", at, empty=True) else ""
        tags = " | ".join(
            self._rule(self._tag(_object(tag, f"{at}.tags[{i}]"), f"{at}.tags[{i}]", ()))
            for i, tag in enumerate(_list(each, "tags", at))
        )
        more = "" if each.get("stop_after_first") else f"({separator} ({tags}))*"
        some = f"({tags}) {more}"
        return f"{some if each.get('at_least_one') else f'({some})?'} {_either(ends)}"

    def _is_unbounded(self, value: Any, at: str) -> bool:
        """Whether it may end with text that nothing bounds."""
        each = _object(value, at)
        match each.get("type"):
            case "sequence":
                elements = _list(each, "elements", at)
                return self._is_unbounded(elements[-1], f"{at}.elements[{len(elements) - 1}]")
            case "or":
                elements = _list(each, "elements", at)
                return any(self._is_unbounded(e, f"{at}.elements[{i}]") for i, e in enumerate(elements))
            case "triggered_tags":
                return not (each.get("at_least_one") and each.get("stop_after_first"))
            case kind:
                return kind in _UNBOUNDED

    def _first_text(self, value: Any, at: str) -> str:
        """What a format begins with, behind text without a bound."""
        each = _object(value, at)
        match each.get("type"):
            case "const_string":
                return _text(each, "value", at)
            case "tag":
                return _text(each, "begin", at)
        raise ValueError(f"{at}.type must be const_string or tag: only these can follow text without a bound")

    def _after_first(self, each: Json, at: str, ends: Sequence[str]) -> str:
        """The rest of a format whose `_first_text` has been written."""
        if each["type"] == "tag":
            return f"{self._rule(self._tag_rest(each, at))} {_either(ends)}"
        _only(each, at, "type", "value")
        return _either(ends)

    def _text_before(self, ends: Sequence[str]) -> str:
        """Any text up to the first of the ends, and this one."""
        return self._rule(f"/{_TEXT}/ {_either(ends)}", lazy=True)

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body.strip() or json.dumps('')}")
        return name

    def _terminal(self, body: str) -> str:
        """One lexeme, so that an expression may hold what its end begins with."""
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body.strip()}")
        return name


def _either(texts: Iterable[str]) -> str:
    written = [json.dumps(text) for text in texts]
    return f"({' | '.join(written)})" if len(written) > 1 else "".join(each for each in written if each != '""')


def _only(each: Json, at: str, *names: str, **defaults: Any) -> None:
    """Refuses what is not supported: other fields than these, and other values than the defaults (a tuple: than all of it)."""
    for name, value in each.items():
        wanted = defaults.get(name)
        if name not in names and name not in defaults:
            raise ValueError(f"{'.'.join(filter(None, (at, name)))[:200]} is not supported")
        if name in defaults and value is not None and value not in (wanted if isinstance(wanted, tuple) else (wanted,)):
            raise ValueError(f"{at}.{name} is not supported with this value")


def _object(value: Any, at: str) -> Json:
    if not isinstance(value, Mapping):
        raise ValueError(f"{at} must be an object")
    return value


def _list(each: Json, name: str, at: str) -> list[Any]:
    value = each.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{at}.{name} must be a list that is not empty")
    return value


def _text(each: Json, name: str, at: str, *, empty: bool = False) -> str:
    value = each.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"{at}.{name} must be a text{'' if empty else ' that is not empty'}")
    return value
