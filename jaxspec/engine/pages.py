"""The pool of KV pages: who owns which page."""

from collections.abc import Iterable

PADDING_PAGE = 0


class PageAllocator:
    """Hands out page ids 1..num_pages-1; page 0 is the padding page and never belongs to a request."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        # A stack: the page freed last is reused first, so a lightly used pool touches few pages.
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))

    @property
    def usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and no page) where there are not that many."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        assert PADDING_PAGE not in pages
        assert not set(pages) & set(self._free), "a page was freed twice"
        self._free.extend(reversed(pages))
