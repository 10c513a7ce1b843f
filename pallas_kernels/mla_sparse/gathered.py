"""Chosen latents put into pages of their own, which the kernels of `mla_decode` then read as a short context.

So are FP8 latents read, and all by the Triton kernel.

A token's 2048 latents are read, written and read again: of a context of 32768 that is a fifth of what dense attention reads.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.latents import Latents
from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.unrolling import by_queries

# Tokens whose latents are in memory at a time, 2.25 MiB each.
TOKENS = 128


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
    chosen = jnp.pad(chosen, ((0, 0), (0, -chosen.shape[1] % page_size)))

    def attend(q_QHC: jax.Array, rows_Q: jax.Array, chosen_QK: jax.Array, number_Q: jax.Array) -> jax.Array:
        Q, K = chosen_QK.shape
        # What is gathered past the last one, no bound lets anybody see.
        at_QK = jnp.where(jnp.arange(chosen_QK.shape[1]) < number_Q[:, None], chosen_QK, 0)
        gathered = latent[page_tables[rows_Q[:, None], at_QK // page_size], at_QK % page_size]
        pages = jax.tree.map(lambda array: array.reshape(-1, page_size, array.shape[-1]), gathered)
        tables = jnp.arange(Q * K // page_size, dtype=jnp.int32).reshape(Q, -1)
        bounds_Q1 = jnp.maximum(number_Q, 1)[:, None]
        out_Q1HV = mla_decode(q_QHC[:, None], pages, tables, bounds_Q1, w_uv, scale=scale, value_dim=L)
        return out_Q1HV[:, 0]

    return by_queries(attend, TOKENS, q, rows, chosen, numbers, straight=True)
