"""Which texts share pages, against a table of every page's whole text."""

import itertools
import random

import pytest

from jaxspec.engine.prefix_cache import PrefixCache

PAGE_SIZE = 3
MAX_PAGES = 5


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_a_page_is_found_by_exactly_the_text_it_holds(lookahead, seed):
    """Publishes and overwrites pages of texts over two ids, so that equal pages after different beginnings abound."""
    draw = random.Random(seed)
    cache = PrefixCache(PAGE_SIZE, lookahead=lookahead)
    held: dict[int, tuple[str, tuple[int, ...]]] = {}  # of each page: its salt, and all ids to its end and lookahead
    hits = 0

    def text_to(tokens: list[int], column: int) -> tuple[int, ...]:
        return tuple(tokens[: (column + 1) * PAGE_SIZE + lookahead])

    for _ in range(400):
        tokens, salt = draw.choices([1, 2], k=MAX_PAGES * PAGE_SIZE + lookahead), draw.choice(["", "a"])
        for page in draw.sample(sorted(held), min(len(held), draw.choice([0, 0, 1, 4]))):
            cache.forget(page)
            del held[page]
        most = draw.randint(0, MAX_PAGES)
        pages, node, known = cache.match(tokens, most, salt)
        assert known == len(pages)
        assert [held[page] for page in pages] == [(salt, text_to(tokens, column)) for column in range(len(pages))]
        hits += len(pages)
        for column in range(len(pages), most):
            page = next(page for page in itertools.count() if page not in held)
            node = cache.publish(node, tokens, column, page)
            if page in cache:  # else another page holds the same text
                held[page] = (salt, text_to(tokens, column))
        assert len(cache.match(tokens, most, salt).pages) == most
        assert all(page in cache for page in held)
    assert hits > 100
    cache.clear()
    assert not cache.match([1] * 99, MAX_PAGES, "").pages


@pytest.mark.parametrize(
    ("known", "written", "lookahead", "pages"), [(6, 6, 0, 2), (6, 6, 1, 1), (7, 6, 1, 2), (9, 5, 1, 1), (0, 0, 1, 0)]
)
def test_pages_are_final_when_written_and_known_with_what_follows(known, written, lookahead, pages):
    assert PrefixCache(PAGE_SIZE, lookahead=lookahead).final_pages(known, written) == pages
