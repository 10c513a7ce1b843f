"""Whether a text that a model is still writing can become a JSON object."""

import math
import re

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_SURROGATES = r"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}}|{_SURROGATES})')
_BEGUN_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?"
)
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r'[^ \t\n\r{}\[\],:"]*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BEGUN_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][+-]?[0-9]*)?)?|[eE][+-]?[0-9]*)?)?")
_WORDS = ("true", "false", "null")
# Clients refuse longer numbers and deeper nesting.
_MOST_DIGITS = 4000
_MOST_DEPTH = 128

# What may come next: a value, the first value of a list or its end, a name, the first name of an object or its end, a colon,
# a comma or the end, nothing.
_VALUE, _FIRST_VALUE, _NAME, _FIRST_NAME, _COLON, _AFTER, _NOTHING = range(7)


class JsonPrefix:
    """Reads the text piece by piece, each character once: RFC 8259, without surrogates that stand alone and numbers that are
    no floats.

    Attributes:
        complete: the object has ended.
    """

    def __init__(self) -> None:
        self._rest = ""  # an escape, a number or a word that has not ended
        self._quoted = False
        self._next = _VALUE
        self._closers: list[str] = []

    @property
    def complete(self) -> bool:
        return self._next == _NOTHING

    def feed(self, piece: str) -> bool:
        """Whether the text can still become an object. It is not to be asked again after a False."""
        text, at = self._rest + piece, 0
        self._rest = ""
        while at < len(text):
            end = self._string(text, at) if self._quoted else self._outside(text, at)
            if end is None:
                return False
            at = end
        return True

    def _string(self, text: str, at: int) -> int | None:
        """The place after the next part of a string; None: it is wrong."""
        at = _end(_IN_STRING, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            self._quoted = False
            self._next = _COLON if self._next in (_NAME, _FIRST_NAME) else _AFTER
            return at + 1
        if escape := _ESCAPE.match(text, at):
            return escape.end()
        return self._keep(text, at) if _BEGUN_ESCAPE.fullmatch(text, at) else None

    def _outside(self, text: str, at: int) -> int | None:
        at = _end(_SPACE, text, at)
        end = _end(_SCALAR, text, at)
        if end > at:
            return self._scalar(text, at, end)
        if at == len(text):
            return at
        return at + 1 if self._mark(text[at]) else None

    def _scalar(self, text: str, at: int, end: int) -> int | None:
        word = text[at:end]
        if self._next not in (_VALUE, _FIRST_VALUE) or not self._closers or len(word) > _MOST_DIGITS:
            return None
        if end == len(text):
            begun = _BEGUN_NUMBER.fullmatch(word) or any(each.startswith(word) for each in _WORDS)
            return self._keep(text, at) if begun else None
        self._next = _AFTER
        return end if word in _WORDS or (_NUMBER.fullmatch(word) and math.isfinite(float(word))) else None

    def _keep(self, text: str, at: int) -> int:
        self._rest = text[at:]
        return len(text)

    def _mark(self, mark: str) -> bool:
        """Takes a character of the structure; False where it may not be."""
        wants_value = self._next in (_VALUE, _FIRST_VALUE)
        if mark == "{" or (mark == "[" and self._closers):
            self._closers.append("}" if mark == "{" else "]")
            self._next = _FIRST_NAME if mark == "{" else _FIRST_VALUE
            return wants_value and len(self._closers) <= _MOST_DEPTH
        if mark == '"':
            self._quoted = True
            return self._next in (_NAME, _FIRST_NAME) or (wants_value and bool(self._closers))
        if mark == ":":
            allowed, self._next = self._next == _COLON, _VALUE
            return allowed
        if mark == "," and self._closers:
            allowed, self._next = self._next == _AFTER, _NAME if self._closers[-1] == "}" else _VALUE
            return allowed
        if not self._closers or mark != self._closers.pop():
            return False
        allowed = self._next in (_AFTER, _FIRST_NAME if mark == "}" else _FIRST_VALUE)
        self._next = _AFTER if self._closers else _NOTHING
        return allowed


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None  # it matches nothing at least
    return match.end()
