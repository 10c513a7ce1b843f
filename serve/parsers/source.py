"""Text that arrives in pieces, read as if it were there at once.

A parser is a generator: it asks the source, and where the answer needs text that has not arrived, it waits in a
`yield`. What comes of it is decided by the text and its end, and only the time of it by the pieces. All reading is
linear: what may be read again (after `mark`) is bounded.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Parsing = Generator[None, None, T]

# Of names and the white space around them: what is longer is no tag.
MAX_NAME = 256
_MAX_SPACES = 64
_STRUCTURE = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_SPACES = re.compile(r"\s*")


@lru_cache(maxsize=256)
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(tag) for tag in sorted(tags, key=len, reverse=True)) or r"(?!)")


@lru_cache(maxsize=256)
def _longest(tags: tuple[str, ...]) -> int:
    return max(map(len, tags), default=0)


@lru_cache(maxsize=256)
def _first_characters(tags: tuple[str, ...]) -> str:
    return "".join({tag[0] for tag in tags})


class Source:
    """
    Attributes:
        cut: the text has ended where its writer would have gone on.
    """

    def __init__(self) -> None:
        self.cut = False
        self._text = ""
        self._at = 0
        self._dropped = 0  # characters in front of _text
        self._marks: list[int] = []
        self._ended = False

    # --- whoever has the text ---

    def add(self, text: str) -> None:
        if self._at == len(self._text) and not self._marks:  # as it is with most pieces
            self._dropped, self._text, self._at = self._dropped + self._at, text, 0
            return
        start = min([self._at, *self._marks])
        self._text = self._text[start:] + text
        self._at -= start
        self._dropped += start
        self._marks = [mark - start for mark in self._marks]

    def end(self, *, cut: bool) -> None:
        self._ended, self.cut = True, cut

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def consumed(self) -> int:
        """Characters that have been read."""
        return self._dropped + self._at

    # --- the parser ---

    def mark(self) -> None:
        """From here on the text may be read again. Keep the stretch short: it is kept, and read twice."""
        self._marks.append(self._at)

    def marked(self) -> str:
        """What has been read since the last mark."""
        return self._text[self._marks[-1] : self._at]

    def rewind(self) -> None:
        """Goes back to the last mark, and drops it."""
        self._at = self._marks.pop()

    def commit(self) -> None:
        """Drops the last mark."""
        self._marks.pop()

    def until(self, emit: Callable[[str], None], *tags: str) -> Parsing[str | None]:
        """Passes text on up to the first of the tags, which it consumes and returns; None at the end of the text."""
        firsts = _first_characters(tags)
        while True:
            if not any(character in self._text for character in firsts):  # as it is with most pieces
                if self._at < len(self._text):
                    emit(self._text[self._at :])
                    self._at = len(self._text)
                if self._ended:
                    return None
                yield
                continue
            hit = self._first(tags)
            open_from = self._open_from(tags)
            end = min(hit.start() if hit else len(self._text), open_from)
            if end > self._at:
                emit(self._text[self._at : end])
                self._at = end
            if hit and hit.start() < open_from:
                self._at = hit.end()
                return hit.group()
            if self._ended:
                return None
            yield

    def short(self, *tags: str) -> Parsing[tuple[str, str] | None]:
        """At most `MAX_NAME` characters and the tag that ends them; None, and nothing read, if they are more."""
        while True:
            hit = self._first(tags)
            if hit and hit.start() < self._open_from(tags):
                if hit.start() - self._at > MAX_NAME:
                    return None
                text, self._at = self._text[self._at : hit.start()], hit.end()
                return text, hit.group()
            if self._ended or len(self._text) - self._at > MAX_NAME + _longest(tags):
                return None
            yield

    def literal(self, *choices: str) -> Parsing[str | None]:
        """The longest of the choices that comes next; None, and nothing read, if none does."""
        longest = max(map(len, choices))
        while True:
            rest = self._text[self._at : self._at + longest]
            if self._ended or not any(len(c) > len(rest) and c.startswith(rest) for c in choices):
                found = max((c for c in choices if rest.startswith(c)), key=len, default=None)
                self._at += len(found or "")
                return found
            yield

    def spaces(self) -> Parsing[str]:
        """White space that comes next, up to a few dozen characters."""
        while True:
            hit = _SPACES.match(self._text, self._at, self._at + _MAX_SPACES)
            assert hit is not None
            if self._ended or hit.end() < len(self._text) or len(hit.group()) == _MAX_SPACES:
                self._at = hit.end()
                return hit.group()
            yield

    def peek(self) -> Parsing[str]:
        """The next character, which stays; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def balanced(self, emit: Callable[[str], None]) -> Parsing[bool]:
        """Passes on a JSON object or list, from its first bracket to the one that closes it, whatever is inside.

        False: the text has ended before.
        """
        depth, quoted = 0, False
        while True:
            end = len(self._text)
            for hit in _STRUCTURE.finditer(self._text, self._at):
                character = hit.group()
                if character == "\\" and not self._ended:  # what it escapes is still to come
                    end = hit.start()
                    break
                if character == '"':
                    quoted = not quoted
                elif not quoted and character[0] != "\\":
                    depth += 1 if character in "{[" else -1
                    if depth <= 0:
                        emit(self._text[self._at : hit.end()])
                        self._at = hit.end()
                        return True
            if end > self._at:
                emit(self._text[self._at : end])
                self._at = end
            if self._ended:
                return False
            yield

    def _first(self, tags: tuple[str, ...]) -> re.Match[str] | None:
        return _any_of(tags).search(self._text, self._at)

    def _open_from(self, tags: tuple[str, ...]) -> int:
        """Where the text's end may be the beginning of a tag; beyond the text if it is not."""
        size = len(self._text)
        if not self._ended:
            for start in range(max(self._at, size - _longest(tags) + 1), size):
                tail = self._text[start:]
                if any(tag.startswith(tail) and len(tag) > len(tail) for tag in tags):
                    return start
        return size + 1


def attempt(source: Source, parse: Parsing[T | None]) -> Parsing[T | None]:
    """What `parse` returns; if that is None, nothing has been read."""
    source.mark()
    found = yield from parse
    if found is None:
        source.rewind()
    else:
        source.commit()
    return found
