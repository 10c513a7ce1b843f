"""The keys that sparse attention reads: those that an indexer scores highest."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.key_choice import mosaic, reference


def unsupported_reason(q: jax.Array | jax.ShapeDtypeStruct, keys: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why no kernel supports calls with such queries and index keys, or None if one does."""
    return mosaic.unsupported_reason(q, keys)


def choose_keys(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    page_tables: jax.Array,
    rows: jax.Array,
    bounds: jax.Array,
    *,
    count: int,
) -> jax.Array:
    """For each query token the `count` keys with the largest scores (DeepSeek-V3.2, equation 1: the lightning indexer).

    The score of the key at position s is sum_n weights[n] * max(q[n] . keys[s], 0), in float32. Of equal scores the lowest
    positions win, so a choice depends on nothing but the scores: not on pages, nor on what else is in the batch. A score that
    is not a number counts as the largest. With at most `count` keys all are chosen.

    Args:
        q: [T, N, D] queries of the indexer's heads, rotated. weights: float32 [T, N]; a factor of all of a token's changes no
            choice, so published ones may be left out.
        keys: [pages, page_size, D] the layer's cached index keys, rotated.
        page_tables: int32 [X, max_pages]; entries past a request's length may name any page.
        rows: int32 [T] the page table of each token.
        bounds: int32 [T], exclusive: token t chooses among the keys at positions < bounds[t]; 0: it chooses none.

    Returns:
        Positions int32 [T, K], ascending, and -1 after the last; K is `count` or, if that is less, what a page table holds.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    unsupported_reasons = {"mosaic": unsupported_reason(q, keys)}
    # "triton" selects a decode kernel only; this operation then runs on the fastest implementation it has.
    chosen = choose("key_choice", current().attention, unsupported_reasons, same_as_auto=("triton",))
    way = mosaic if chosen == "mosaic" else reference
    return way.choose_keys(q, weights, keys, page_tables, rows, bounds, count=count)
