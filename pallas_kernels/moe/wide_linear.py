"""A linear map with very many outputs, the logits of a step: the experts' kernel of down, with one expert for all tokens.

Its blocks stream tiles of the weights one after another through a ring (`head_linear` in traces). XLA reads the 1.23 GB
of MiniMax-M2's head for 32 tokens in 288 us on an H200; a sum reads them in 270.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.moe.config import GRANULE, Config, M, blocks_of_a_kernel, tiles
from pallas_kernels.moe.grouped_matmul import down_matmul
from pallas_kernels.moe.slots import SlotTables

MOST_TOKENS = 128


def unsupported_reason(x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    T, (outputs, H) = x.shape[0], weight.shape
    if H % M or outputs % M:
        return f"it needs sizes that are multiples of {M}, not {outputs} and {H}"
    if outputs // M < 2 * blocks_of_a_kernel():
        return f"it needs at least {2 * blocks_of_a_kernel() * M} outputs, not {outputs}"
    if T > MOST_TOKENS or (T > GRANULE and T % GRANULE):
        return f"it supports up to {MOST_TOKENS} tokens, from {GRANULE} on in multiples of {GRANULE}, not {T}"
    return hopper_unsupported_reason(x.dtype, weight.dtype)


@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def wide_linear(x: jax.Array, weight: jax.Array, *, blocks: int | None = None, interpret: Any = False) -> jax.Array:
    """x weight^T: bfloat16 [T, outputs].

    Args:
        x: [T, H]. weight: [outputs, H].
        blocks: of the grid (default: one a multiprocessor).
        interpret: passed to Pallas.
    """
    T, H = x.shape
    rows = -(-T // GRANULE) * GRANULE
    cut = tiles(rows, H, weight.shape[0], gated=False)
    config = Config(rows, 1, True, cut, cut, blocks or blocks_of_a_kernel())
    tables = SlotTables(jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32), *[jnp.zeros(0, jnp.int32)] * 4)
    (y,) = down_matmul([x[None]], [weight[None]], tables, config, name="head_linear", interpret=interpret)
    return y[0, :T]
