"""Plain XLA: request after request and block after block of pages; scores and sums in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference_attention import (
    PAGES_PER_BLOCK,
    OnlineSoftmax,
    block_pages,
    block_positions,
    blocks_for,
    pad_tables,
)


def gqa_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    ends: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    P, K, G, D = q.shape
    page_size = k.shape[1]
    f32 = jnp.float32
    tables = pad_tables(page_tables)

    def row(e, state):
        in_row_P = token_rows == e
        # The first key that the chunk sees.
        low = jnp.int32(0)
        if window is not None:
            low = jnp.maximum(jnp.where(in_row_P, positions, ends[e]).min() - (window - 1), 0)

        def block(j, state):
            pages = block_pages(tables[e], j)
            positions_S = block_positions(j, page_size)
            owned = ((positions_S >= low) & (positions_S < ends[e]))[:, None, None]
            k_SKD = jnp.where(owned, k[pages].reshape(-1, K, D), 0)
            v_SKD = jnp.where(owned, v[pages].reshape(-1, K, D), 0)
            scores = scale * jnp.einsum("pkgd,skd->pkgs", q, k_SKD, preferred_element_type=f32)
            mask = in_row_P[:, None] & (positions_S <= positions[:, None])
            if window is not None:
                mask &= positions_S > positions[:, None] - window
            mask = mask[:, None, None]
            return OnlineSoftmax.update(
                state,
                scores,
                mask,
                lambda w: jnp.einsum("pkgs,skd->pkgd", w.astype(q.dtype), v_SKD, preferred_element_type=f32),
            )

        return lax.fori_loop(low // (PAGES_PER_BLOCK * page_size), blocks_for(ends[e], page_size), block, state)

    state = lax.fori_loop(0, page_tables.shape[0], row, OnlineSoftmax.init((P, K, G), D))
    return OnlineSoftmax.finish(state, sinks).astype(q.dtype)
