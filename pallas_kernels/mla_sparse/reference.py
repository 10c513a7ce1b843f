"""Plain XLA: gathers the chosen latents of a few query tokens at a time; scores and sums in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.latents import Latents, dequantise
from pallas_kernels.reference_attention import PAGES_PER_BLOCK, QUERIES, OnlineSoftmax
from pallas_kernels.unrolling import by_queries


@functools.partial(jax.jit, static_argnames="scale")
def mla_sparse(
    q: jax.Array,
    latent: Latents,
    page_tables: jax.Array,
    rows: jax.Array,
    chosen: jax.Array,
    numbers: jax.Array,
    w_uv: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    page_size, L = latent.shape[1], w_uv.shape[2]
    size = PAGES_PER_BLOCK * page_size
    chosen = jnp.pad(chosen, ((0, 0), (0, -chosen.shape[1] % size)))

    def attend(q_QHC: jax.Array, rows_Q: jax.Array, chosen_QK: jax.Array, number_Q: jax.Array) -> jax.Array:
        def block(j: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            at_QB = lax.dynamic_slice_in_dim(chosen_QK, j * size, size, axis=1)
            mask_QB = j * size + jnp.arange(size) < number_Q[:, None]
            at_QB = jnp.where(mask_QB, at_QB, 0)
            pages_QB = page_tables[rows_Q[:, None], at_QB // page_size]
            keys_QBC = dequantise(latent[pages_QB, at_QB % page_size], q.dtype)
            keys_QBC = jnp.where(mask_QB[..., None], keys_QBC, 0)
            scores_QHB = scale * jnp.einsum("qhc,qbc->qhb", q_QHC, keys_QBC, preferred_element_type=jnp.float32)
            return OnlineSoftmax.update(
                state,
                scores_QHB,
                mask_QB[:, None],
                lambda w: jnp.einsum(
                    "qhb,qbl->qhl", w.astype(q.dtype), keys_QBC[..., :L], preferred_element_type=jnp.float32
                ),
            )

        most = number_Q.max()
        state = OnlineSoftmax.init(q_QHC.shape[:2], L)
        out_QHL = OnlineSoftmax.finish(lax.fori_loop(0, -(-most // size), block, state)).astype(q.dtype)
        # Kernels leave what they happen to read to tokens without keys, so nobody may come to need a number there.
        return jnp.where(number_Q[:, None, None] > 0, jnp.einsum("qhl,hvl->qhv", out_QHL, w_uv), jnp.nan)

    return by_queries(attend, QUERIES, q, rows, chosen, numbers)
