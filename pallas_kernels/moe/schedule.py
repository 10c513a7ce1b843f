"""Which expert works on which tokens: the tables between routing and the routed experts' matmuls.

A slot is one expert and a block of token rows. An expert with n tokens has ceil(n / rows) slots, one without tokens has
none, so that its weights are never read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Schedule(NamedTuple):
    """Slots in the order of their experts; only the first `num_slots` exist. What belongs to no slot may be anything.

    num_slots: int32 [1].
    expert: int32 [at least slots].
    token: int32 [slots * rows]: whose row of x a slot's row is, unless slots are shared.
    place: int32 [T, k]: the row, among all slots' rows, of each assignment; 0 for tokens that are not live.
    """

    num_slots: jax.Array
    expert: jax.Array
    token: jax.Array
    place: jax.Array


def max_slots(T: int, k: int, E: int, rows: int, *, shared: bool) -> int:
    """How many slots T tokens may need at most: one for each expert they reach, and one for each full block."""
    return min(E, T * k) + (0 if shared else T * k // rows)


def schedule(ids: jax.Array, live: jax.Array, E: int, rows: int, *, shared: bool) -> Schedule:
    """The tables of one layer, in plain XLA.

    Args:
        ids: int32 [T, k], each in [0, E) where the token is live.
        live: bool [T].
        rows: token rows in a slot.
        shared: every slot sees all T <= rows tokens, token t in row t: nothing has to be gathered.
    """
    T, k = ids.shape
    slots = max_slots(T, k, E, rows, shared=shared)
    hot_NE = ((ids[:, :, None] == jnp.arange(E)) & live[:, None, None]).reshape(T * k, E).astype(jnp.int32)
    count_E = hot_NE.sum(axis=0)
    blocks_E = jnp.minimum(count_E, 1) if shared else -(-count_E // rows)
    ends_E = jnp.cumsum(blocks_E)
    token_N = jnp.arange(T * k, dtype=jnp.int32) // k
    rank_N = token_N if shared else ((jnp.cumsum(hot_NE, axis=0) - hot_NE) * hot_NE).sum(axis=1)
    first_N = ((ends_E - blocks_E) * hot_NE).sum(axis=1)
    place_N = jnp.where(jnp.repeat(live, k), first_N * rows + rank_N, 0)
    expert = jnp.minimum((ends_E[None] <= jnp.arange(slots)[:, None]).sum(axis=1), E - 1)
    owned_N = jnp.where(jnp.repeat(live, k), place_N, slots * rows)
    token = jnp.zeros(slots * rows, jnp.int32).at[owned_N].set(token_N, mode="drop")
    tables = Schedule(ends_E[-1:], expert.astype(jnp.int32), token, place_N.reshape(T, k))
    # Without the barrier XLA fuses the sums into the gather and the combine and computes them anew for each element.
    return jax.lax.optimization_barrier(tables)
