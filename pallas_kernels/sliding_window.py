"""Sliding windows: which pages the queries of a decode window see at all."""

import jax
import jax.numpy as jnp


def window_pages(
    page_tables: jax.Array, bounds: jax.Array, *, page_size: int, window: int
) -> tuple[jax.Array, jax.Array]:
    """Page tables of the pages that a window of the last keys touches, and the bounds counted from the first of them.

    What attends with them reads no page before the window, whatever the context, and needs no more than a mask: query
    (b, r) sees the keys at positions from bounds[b, r] - window to bounds[b, r] - 1. Layers of equal windows cut the same
    tables, which XLA does once.

    Args:
        page_tables: int32 [B, max_pages].
        bounds: int32 [B, n] exclusive, at least 1, those of a request at most n - 1 apart.
        window: keys that a query sees, its own included.

    Returns:
        int32 [B, pages of a window] and int32 [B, n].
    """
    most = min(-(-(page_size - 1 + window + bounds.shape[1] - 1) // page_size), page_tables.shape[1])
    first_B = jnp.maximum(bounds.min(axis=1) - window, 0) // page_size
    columns = jnp.minimum(first_B[:, None] + jnp.arange(most, dtype=jnp.int32), page_tables.shape[1] - 1)
    return jnp.take_along_axis(page_tables, columns, axis=1), bounds - first_B[:, None] * page_size
