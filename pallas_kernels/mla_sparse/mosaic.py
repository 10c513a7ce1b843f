"""The Mosaic GPU kernel of `mla_decode` over bfloat16 latents that it gathers itself: what is chosen is read once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mla_decode import mosaic
from pallas_kernels.split_kv import PAGE
from pallas_kernels.unrolling import by_queries

# Tokens of a call: a decode step's, while the partial outputs of a prompt stay small.
TOKENS = 512


@functools.partial(jax.jit, static_argnames=("scale", "sms", "interpret"))
def mla_sparse(
    q: jax.Array,
    latent: jax.Array,
    page_tables: jax.Array,
    rows: jax.Array,
    chosen: jax.Array,
    numbers: jax.Array,
    w_uv: jax.Array,
    *,
    scale: float,
    sms: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See api.py; `sms` and `interpret` as in the kernel of `mla_decode`."""
    chosen = jnp.pad(chosen, ((0, 0), (0, -chosen.shape[1] % PAGE)))

    def attend(q_QHC: jax.Array, rows_Q: jax.Array, chosen_QK: jax.Array, number_Q: jax.Array) -> jax.Array:
        # What is gathered past the last one, no bound lets anybody see.
        at_QK = jnp.where(jnp.arange(chosen_QK.shape[1]) < number_Q[:, None], chosen_QK, 0)
        tokens_QK = page_tables[rows_Q[:, None], at_QK // PAGE] * PAGE + at_QK % PAGE
        bounds_Q1 = jnp.maximum(number_Q, 1)[:, None]
        out_Q1HV = mosaic.mla_decode(
            q_QHC[:, None], latent, tokens_QK, bounds_Q1, w_uv, scale=scale, gathered=True, sms=sms, interpret=interpret
        )
        return out_Q1HV[:, 0]

    return by_queries(attend, TOKENS, q, rows, chosen, numbers, straight=True)
