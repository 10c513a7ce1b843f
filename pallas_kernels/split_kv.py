"""Split-KV: which runs of pages the thread blocks of one call attend to.

All layers of a step have the same lengths, so their calls have equal schedules, which XLA computes once. Kernels for Hopper
may have theirs made by a kernel (`split_schedule.py`), of which this is the reference.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tuning import current

PAGE = 64


class Schedule(NamedTuple):
    """Work items, and how their partial outputs are merged.

    Attributes:
        items: int32 [I, 5]: request, first page, end page, how many of its pages need no mask, and whether it is its
            request's only item. Items past the last one have no pages.
        splits: int32 [K, 3]: request, first item and number of items of each request with several; 0 where there are
            fewer such requests.
    """

    items: jax.Array
    splits: jax.Array


def num_items(requests: int, blocks: int, sms: int) -> int:
    """Items I of a schedule: one round of thread blocks or, with more requests than that, one each and a round more."""
    parts = max(sms // blocks, 1)
    return parts if requests <= parts else requests + parts


def page_limits(max_pages: int, least: int = 1) -> np.ndarray:
    """Candidates for the most pages of an item, `least` or more, about 9 % apart: int32, ascending."""
    powers = 2 ** np.arange(0, math.log2(max_pages) + 0.125, 0.125)
    return np.unique(np.clip(np.round(powers), min(least, max_pages), max_pages).astype(np.int32))


def make_schedule(bounds: jax.Array, max_pages: int, blocks: int, sms: int, least: int = 1) -> Schedule:
    """Splits long contexts so that the thread blocks end together.

    The cost of letting an item have up to c pages is taken as rounds of thread blocks times (c + overhead); the
    cheapest candidate is chosen, and each request's pages are spread evenly over its items.

    Args:
        bounds: int32 [B, n] exclusive causal bounds of each request's window, at least 1.
        max_pages: columns of the page table.
        blocks: thread blocks of an item, which share its pages but have different query rows.
        sms: thread blocks that run at once.
        least: candidates are as many pages or more: of a kernel to which fewer are no faster.
    """
    B = bounds.shape[0]
    items_count = num_items(B, blocks, sms)
    pages_B = -(-bounds.max(axis=1) // PAGE)
    limits_C = jnp.asarray(page_limits(max_pages, least))
    count_C = (-(-pages_B[None] // limits_C[:, None])).sum(axis=1)
    rounds_C = -(-count_C * blocks // sms)
    cost_C = jnp.where(
        count_C <= items_count, rounds_C * (limits_C + current().split_overhead_pages), jnp.iinfo(jnp.int32).max
    )
    # The largest candidate always fits, because it leaves every request whole.
    limit = limits_C[jnp.argmin(cost_C)]

    splits_B = -(-pages_B // limit)
    each_B = -(-pages_B // splits_B)
    before = jnp.arange(B)[:, None] > jnp.arange(B)
    first_B = jnp.where(before, splits_B[None], 0).sum(axis=1)
    item_I = jnp.arange(items_count, dtype=jnp.int32)
    request_I = jnp.minimum((item_I[:, None] >= (first_B + splits_B)[None]).sum(axis=1), B - 1)
    start_I = (item_I - first_B[request_I]) * each_B[request_I]
    end_I = jnp.minimum(start_I + each_B[request_I], pages_B[request_I])
    start_I = jnp.minimum(start_I, end_I)
    unmasked_I = jnp.clip(bounds.min(axis=1)[request_I] // PAGE - start_I, 0, end_I - start_I)
    items = jnp.stack([request_I, start_I, end_I, unmasked_I, splits_B[request_I] == 1], axis=1)

    K = min(B, items_count - B)
    several_B = splits_B > 1
    rank_B = jnp.where(before, several_B[None], 0).sum(axis=1)
    is_kth = several_B & (rank_B == jnp.arange(K)[:, None])
    splits = (is_kth[..., None] * jnp.stack([jnp.arange(B), first_B, splits_B], axis=1)).sum(axis=1)
    return Schedule(items.astype(jnp.int32), splits.astype(jnp.int32))
