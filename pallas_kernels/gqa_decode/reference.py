"""Plain XLA: gathers blocks of pages; scores and sums in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference_attention import OnlineSoftmax, block_pages, block_positions, blocks_for, pad_tables


def gqa_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_tables: jax.Array,
    bounds: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    B, n, K, G, D = q.shape
    page_size = k.shape[1]
    tables = pad_tables(page_tables)

    def body(block, state):
        pages = block_pages(tables, block)
        positions_S = block_positions(block, page_size)
        owned = (positions_S < bounds.max(axis=1)[:, None])[..., None, None]
        k_BSKD = jnp.where(owned, k[pages].reshape(B, -1, K, D), 0)
        v_BSKD = jnp.where(owned, v[pages].reshape(B, -1, K, D), 0)
        scores = scale * jnp.einsum("bnkgd,bskd->bnkgs", q, k_BSKD, preferred_element_type=jnp.float32)
        mask = positions_S < bounds[..., None]
        if window is not None:
            mask &= positions_S >= bounds[..., None] - window
        mask = mask[:, :, None, None]
        return OnlineSoftmax.update(
            state,
            scores,
            mask,
            lambda w: jnp.einsum("bnkgs,bskd->bnkgd", w.astype(q.dtype), v_BSKD, preferred_element_type=jnp.float32),
        )

    state = OnlineSoftmax.init((B, n, K, G), D)
    state = lax.fori_loop(0, blocks_for(bounds.max(), page_size), body, state)
    return OnlineSoftmax.finish(state, sinks).astype(q.dtype)
