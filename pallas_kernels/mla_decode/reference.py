"""Plain XLA: gathers blocks of pages; scores and sums in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.latents import Latents, dequantise
from pallas_kernels.reference_attention import OnlineSoftmax, block_pages, block_positions, blocks_for, pad_tables


def mla_decode(
    q: jax.Array, latent: Latents, page_tables: jax.Array, bounds: jax.Array, *, scale: float, value_dim: int
) -> jax.Array:
    B, n, H, C = q.shape
    page_size = latent.shape[1]
    tables = pad_tables(page_tables)

    def body(block, state):
        keys_BSC = dequantise(latent[block_pages(tables, block)], q.dtype).reshape(B, -1, C)
        positions_S = block_positions(block, page_size)
        owned_BS = positions_S < bounds.max(axis=1)[:, None]
        keys_BSC = jnp.where(owned_BS[..., None], keys_BSC, 0)
        scores_BnHS = scale * jnp.einsum("bnhc,bsc->bnhs", q, keys_BSC, preferred_element_type=jnp.float32)
        mask = (positions_S < bounds[..., None])[:, :, None]
        values_BSV = keys_BSC[..., :value_dim]
        return OnlineSoftmax.update(
            state,
            scores_BnHS,
            mask,
            lambda w: jnp.einsum("bnhs,bsv->bnhv", w.astype(q.dtype), values_BSV, preferred_element_type=jnp.float32),
        )

    state = OnlineSoftmax.init((B, n, H), value_dim)
    state = lax.fori_loop(0, blocks_for(bounds.max(), page_size), body, state)
    return OnlineSoftmax.finish(state).astype(q.dtype)


def values(out: jax.Array, w_uv: jax.Array) -> jax.Array:
    """[B, n, H, L] and w_uv [H, V, L] -> [B, n, H, V]."""
    B, n, H, L = out.shape
    return jnp.einsum("thl,hvl->thv", out.reshape(B * n, H, L), w_uv).reshape(B, n, H, -1)
