"""Reserved strings in what clients write: they go through a template as private-use characters.

A content that spells a role token must not become one. Each reserved string that occurs in a chat is replaced by a
character of the private-use area before the template sees it; whoever encodes the rendered text puts the spelling back
as plain characters.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxspec.errors import InvalidRequestError

_MARKS = range(0xE000, 0xF900)
# Characters that are searched at once: a search holds up all other threads.
_WINDOW = 2**16


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, names of fields included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """The same value of JSON with all its texts changed, names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): replaced(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(each, change) for each in value]
    return value


class ReservedStrings:
    """The strings that only a template may write."""

    def __init__(self, strings: Iterable[str]):
        found = sorted(strings, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, found)) or r"(?!)")
        self._longest = len(found[0]) if found else 0

    def marked(self, value: Any) -> tuple[Any, dict[str, str]]:
        """The value with each reserved string in it replaced by one character, and what each character stands for.

        Raises:
            InvalidRequestError: the value uses up the private-use characters itself.
        """
        texts = list(texts_in(value))
        found = {hit.group() for text in texts for hit in self._hits(text)}
        if not found:
            return value, {}
        used = {c for text in texts for window in _windows(text) for c in set(window) if ord(c) in _MARKS}
        free = (chr(c) for c in _MARKS if chr(c) not in used)
        mark_of = dict(zip(sorted(found), free, strict=False))
        if len(mark_of) < len(found):
            raise InvalidRequestError("the messages use too many private-use characters", param="messages")

        def change(text: str) -> str:
            pieces, end = [], 0
            for hit in self._hits(text):
                pieces += [text[end : hit.start()], mark_of[hit.group()]]
                end = hit.end()
            return "".join([*pieces, text[end:]])

        return replaced(value, change), {mark: string for string, mark in mark_of.items()}

    def _hits(self, text: str) -> Iterator[re.Match[str]]:
        """The reserved strings of a text, one window after the other."""
        position = 0
        while position < len(text):
            border = position + _WINDOW
            for hit in self._pattern.finditer(text, position, border + self._longest):
                if hit.start() >= border:
                    break
                position = hit.end()
                yield hit
            position = max(position, border)


def _windows(text: str) -> Iterator[str]:
    return (text[start : start + _WINDOW] for start in range(0, len(text), _WINDOW))
