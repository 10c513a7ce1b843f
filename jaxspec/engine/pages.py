"""The pool of KV pages: who holds which page."""

from collections.abc import Sequence

from jaxspec.engine.prefix_cache import PrefixCache

PADDING_PAGE = 0


class PageAllocator:
    """Hands out page ids 1..num_pages-1; page 0 is the padding page and never belongs to a request.

    A page without a holder is free. While the prefix cache knows the text of a free page, the page keeps it until no other
    page is free; the page freed first is then reused first.
    """

    def __init__(self, num_pages: int, cache: PrefixCache | None = None):
        self.num_pages = num_pages
        self._cache = cache
        self._holders = [0] * num_pages
        # A stack: the page freed last is reused first, so a lightly used pool touches few pages.
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._kept: dict[int, None] = {}  # free pages that keep a text, in the order in which they were freed

    @property
    def usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    @property
    def free_pages(self) -> list[int]:
        return [*self._free, *self._kept]

    @property
    def blank_pages(self) -> list[int]:
        """The free pages that keep no text, which anything may be written to."""
        return sorted(self._free)

    def num_holders(self, page: int) -> int:
        return self._holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages for a single holder, or None if there are not that many."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page = next(iter(self._kept))
                del self._kept[page]
                assert self._cache is not None
                self._cache.forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to each of these pages of the prefix cache."""
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Removes a holder from each of a request's pages, the last page first: it is useless without those before it."""
        for page in reversed(pages):
            assert self._holders[page] > 0, "a page was freed twice"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._cache is not None and page in self._cache:
                self._kept[page] = None
            else:
                self._free.append(page)

    def forget_texts(self) -> None:
        """Empties the prefix cache. Pages that are held stay with their holders."""
        if self._cache is not None:
            self._cache.clear()
            self._free += self._kept
            self._kept.clear()
