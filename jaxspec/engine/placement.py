"""Which rank gets a new request."""

from collections.abc import Sequence

from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Scheduler

# A rank may have half as many requests more than the one with the fewest, and these, before prefix hits no longer count: a
# hit saves a prompt once, but every step lasts as long as the rank with the most rows needs.
MOST_AHEAD = 4


def rank_for(ranks: Sequence[Scheduler], request: Request) -> Scheduler:
    """Which rank a new request is for: of those that are not far ahead in requests the one that has most of its beginning,
    then the one with the shortest queue, the most free pages and the fewest requests. Only there its prefix is found later."""
    if len(ranks) == 1:
        return ranks[0]
    requests = [len(rank.running) + len(rank.waiting) for rank in ranks]
    most = min(requests) * 3 // 2 + MOST_AHEAD

    def worth(rank: int) -> tuple[int, int, int, int]:
        scheduler = ranks[rank]
        pages = scheduler.prefix_pages(request)
        return pages, -len(scheduler.waiting), scheduler.pages.num_free, -requests[rank]

    return ranks[max((rank for rank, number in enumerate(requests) if number <= most), key=worth)]
