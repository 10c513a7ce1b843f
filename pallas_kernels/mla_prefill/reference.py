"""Plain XLA: request after request and block after block; each block of latents is decompressed once for all tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.latents import Latents, dequantise
from pallas_kernels.reference_attention import OnlineSoftmax, block_pages, block_positions, blocks_for, pad_tables


def mla_prefill(
    q_nope: jax.Array,
    q_rope: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    latent: Latents,
    page_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    ends: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    P, H, _ = q_nope.shape
    V, L = w_uv.shape[1:]
    page_size, C = latent.shape[1:]
    f32 = jnp.float32
    tables = pad_tables(page_tables)

    def row(e, state):
        in_row_P = token_rows == e

        def block(j, state):
            positions_S = block_positions(j, page_size)
            cache_SC = dequantise(latent[block_pages(tables[e], j)], q_nope.dtype).reshape(-1, C)
            cache_SC = jnp.where((positions_S < ends[e])[:, None], cache_SC, 0)
            latent_SL, k_rope_SR = cache_SC[:, :L], cache_SC[:, L:]
            k_nope_SHD = jnp.einsum("sl,hdl->shd", latent_SL, w_uk)
            v_SHV = jnp.einsum("sl,hvl->shv", latent_SL, w_uv)
            scores_PHS = jnp.einsum("phd,shd->phs", q_nope, k_nope_SHD, preferred_element_type=f32)
            scores_PHS += jnp.einsum("phr,sr->phs", q_rope, k_rope_SR, preferred_element_type=f32)
            mask = (in_row_P[:, None] & (positions_S <= positions[:, None]))[:, None]
            return OnlineSoftmax.update(
                state,
                scores_PHS * scale,
                mask,
                lambda w: jnp.einsum("phs,shv->phv", w.astype(q_nope.dtype), v_SHV, preferred_element_type=f32),
            )

        return lax.fori_loop(0, blocks_for(ends[e], page_size), block, state)

    state = lax.fori_loop(0, page_tables.shape[0], row, OnlineSoftmax.init((P, H), V))
    return OnlineSoftmax.finish(state).astype(q_nope.dtype)
