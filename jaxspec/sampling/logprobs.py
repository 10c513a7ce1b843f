"""Log-probabilities of the model's raw distribution: of chosen ids, and of the likeliest ones."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Ids in a block. Only a block's maximum is read until the block is known to hold a winner.
_BLOCK = 512


class TopLogprobs(NamedTuple):
    """The N likeliest ids, likeliest first, of equal ones the lowest first: ids int32 and values float32 [..., N]."""

    ids: jax.Array
    values: jax.Array


def logprobs_of(logits: jax.Array, ids: jax.Array, log_z: jax.Array) -> jax.Array:
    """Log-probabilities float32 [R, n] of ids [R, n] under softmax of logits [R, V], whose log-sum-exp is log_z [R]."""
    return jnp.take_along_axis(logits, ids, axis=1).astype(jnp.float32) - log_z[:, None]


def top_logprobs(logits_RV: jax.Array, count: int) -> TopLogprobs:
    """The `count` likeliest ids of each row of finite logits [R, V], and their log-probabilities; count <= V.

    Unrolled selection without a sort, which would keep a decode step from being one CUDA graph. The logits are read
    once for the maxima of blocks; each round then reads these and the one block that holds the winner. A block's ids
    are taken in the order (value falling, column rising), so its last winner tells which are left.
    """
    R, V = logits_RV.shape
    num_blocks = -(-V // _BLOCK)
    padded = jnp.pad(logits_RV, ((0, 0), (0, num_blocks * _BLOCK - V)), constant_values=-jnp.inf)
    blocks = padded.reshape(R, num_blocks, _BLOCK)
    best = blocks.max(axis=2)  # of the ids that are left
    last_value = jnp.full((R, num_blocks), jnp.inf)
    last_column = jnp.full((R, num_blocks), -1, jnp.int32)
    block_ids, columns = jnp.arange(num_blocks), jnp.arange(_BLOCK)
    ids, values = [], []
    for _ in range(count):
        winner_R1 = jnp.argmax(best, axis=1)[:, None]
        block = jnp.take_along_axis(blocks, winner_R1[..., None], axis=1)[:, 0]
        before = jnp.take_along_axis(last_value, winner_R1, axis=1)
        free = (block < before) | ((block == before) & (columns > jnp.take_along_axis(last_column, winner_R1, axis=1)))
        column_R1 = jnp.argmax(jnp.where(free, block, -jnp.inf), axis=1)[:, None].astype(jnp.int32)
        value_R1 = jnp.take_along_axis(block, column_R1, axis=1)
        rest_R1 = jnp.where(free & (columns != column_R1), block, -jnp.inf).max(axis=1, keepdims=True)
        here = block_ids == winner_R1
        best = jnp.where(here, rest_R1, best)
        last_value = jnp.where(here, value_R1, last_value)
        last_column = jnp.where(here, column_R1, last_column)
        ids.append(winner_R1[:, 0].astype(jnp.int32) * _BLOCK + column_R1[:, 0])
        values.append(value_R1[:, 0])
    normalizer = jax.nn.logsumexp(logits_RV, axis=1, keepdims=True)
    return TopLogprobs(jnp.stack(ids, axis=1), jnp.stack(values, axis=1) - normalizer)
