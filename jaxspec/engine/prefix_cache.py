"""Which page holds which text: requests that begin alike share the pages of their beginning.

A page is known by its own ids and, through its parent, by all ids before them: the match is exact, no hash decides.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# The parent of a page: the page before it, or for a first page the salt of the requests that may share it.
Node = int | str


@dataclass(frozen=True)
class _Entry:
    page: int
    node: int  # never reused, so that no page is mistaken for the child of a page that has been overwritten


class Match(NamedTuple):
    """
    Attributes:
        pages: that a request can go on after; node: the parent of the page that comes then.
        known: pages whose text is known. Where states are needed, of the last of these none may have been kept.
    """

    pages: list[int]
    node: Node
    known: int


class KeptStates(Protocol):
    """Of which nodes a state is kept; see `snapshots.Snapshots`."""

    def __contains__(self, node: Node) -> bool: ...

    def drop(self, node: Node) -> None: ...

    def clear(self) -> None: ...


class PrefixCache:
    """
    Args:
        page_size: ids a page.
        lookahead: how many ids after a page belong to its key: one with a draft, whose KV at a position depends on the
            id that follows.
        states: of a model that needs more than pages to go on after them: pages are found up to one with a kept state.
    """

    def __init__(self, page_size: int, *, lookahead: int, states: KeptStates | None = None):
        self._page_size = page_size
        self._states = states
        self._lookahead = lookahead
        self._entries: dict[tuple[Node, tuple[int, ...]], _Entry] = {}
        self._keys: dict[int, tuple[Node, tuple[int, ...]]] = {}  # of each page that is in the cache
        self._nodes = itertools.count()

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def match(self, tokens: Sequence[int], most: int, salt: str) -> "Match":
        """What the cache knows of the beginning of `tokens`, at most `most` pages."""
        pages: list[int] = []
        node: Node = salt
        found, last = 0, node  # how many pages are of use, and the last one's node
        while len(pages) < most:
            entry = self._entries.get((node, self._ids(tokens, len(pages))))
            if entry is None:
                break
            pages.append(entry.page)
            node = entry.node
            if self._states is None or node in self._states:
                found, last = len(pages), node
        return Match(pages[:found], last, len(pages))

    def publish(self, node: Node, tokens: Sequence[int], column: int, page: int) -> Node:
        """Page number `column` of a request now holds its final KV. Returns the parent of the request's next page.

        A page that already holds the same text stays the shared one.
        """
        key = (node, self._ids(tokens, column))
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(page, next(self._nodes))
            self._keys[page] = key
        return entry.node

    def final_pages(self, known: int, written: int) -> int:
        """How many leading pages can be published: their KV is written, and all ids of their keys are known.

        Args:
            known: ids that are final.
            written: of these, how many have their KV written.
        """
        return max(min(written, known - self._lookahead), 0) // self._page_size

    def forget(self, page: int) -> None:
        """The page will be overwritten."""
        entry = self._entries.pop(self._keys.pop(page))
        if self._states is not None:
            self._states.drop(entry.node)

    def clear(self) -> None:
        self._entries.clear()
        self._keys.clear()
        if self._states is not None:
            self._states.clear()

    def _ids(self, tokens: Sequence[int], column: int) -> tuple[int, ...]:
        first = column * self._page_size
        return tuple(tokens[first : first + self._page_size + self._lookahead])
