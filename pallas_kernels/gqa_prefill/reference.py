"""Plain XLA: request after request and block after block of pages; scores and sums in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference_attention import OnlineSoftmax, block_pages, block_positions, blocks_for, pad_tables


def gqa_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    ends: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    P, K, G, D = q.shape
    page_size = k.shape[1]
    f32 = jnp.float32
    tables = pad_tables(page_tables)

    def row(e, state):
        in_row_P = token_rows == e

        def block(j, state):
            pages = block_pages(tables[e], j)
            positions_S = block_positions(j, page_size)
            owned = (positions_S < ends[e])[:, None, None]
            k_SKD = jnp.where(owned, k[pages].reshape(-1, K, D), 0)
            v_SKD = jnp.where(owned, v[pages].reshape(-1, K, D), 0)
            scores = scale * jnp.einsum("pkgd,skd->pkgs", q, k_SKD, preferred_element_type=f32)
            mask = (in_row_P[:, None] & (positions_S <= positions[:, None]))[:, None, None]
            return OnlineSoftmax.update(
                state,
                scores,
                mask,
                lambda w: jnp.einsum("pkgs,skd->pkgd", w.astype(q.dtype), v_SKD, preferred_element_type=f32),
            )

        return lax.fori_loop(0, blocks_for(ends[e], page_size), block, state)

    state = lax.fori_loop(0, page_tables.shape[0], row, OnlineSoftmax.init((P, K, G), D))
    return OnlineSoftmax.finish(state).astype(q.dtype)
