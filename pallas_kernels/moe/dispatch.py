"""From chosen experts to slot tables. Three sets of kernels do this, by the number of assignments (tokens times k):

- `dispatch_fused`: up to 8 tokens; the tables come out of the routing kernel itself.
- `dispatch_small`: one kernel, in which every block counts all assignments.
- `dispatch_large`: two kernels, a prefill's; each block counts its own assignments, the second adds the counts up.

This module chooses between the last two. The oracle is `reference.slot_tables`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.moe.dispatch_large import count_chunks, place_chunks
from pallas_kernels.moe.dispatch_small import place_all
from pallas_kernels.moe.dispatch_tiles import BLOCK
from pallas_kernels.moe.slots import SlotTables

# With more chunks of BLOCK assignments, blocks that count all of them are slower than a second launch.
MOST_CHUNKS = 16


def dispatch(
    ids: jax.Array, live: jax.Array, E: int, rows: int, slots: int, *, all_tokens: bool, interpret: Any = False
) -> SlotTables:
    """As `reference.slot_tables`, but undefined entries stay unwritten.

    Args:
        ids: int32 [T, k], in [0, E) where the token is live.
        live: bool [T].
        rows: token rows of a slot, a power of two.
        slots: `max_slots` or more.
        all_tokens: every slot has all T <= rows tokens.
    """
    T, k = ids.shape
    padded = -(-T * k // BLOCK) * BLOCK
    ids_N = jnp.where(live[:, None], ids, E).reshape(-1)
    ids_N = jnp.pad(ids_N, (0, padded - T * k), constant_values=E).reshape(-1, BLOCK)
    tables = dispatch_assigned(ids_N, T, k, E, rows, slots, all_tokens=all_tokens, interpret=interpret)
    if all_tokens:
        place = jnp.where(live[:, None], tables.place + jnp.arange(T, dtype=jnp.int32)[:, None], 0)
        tables = tables._replace(place=place)
    return tables


def dispatch_assigned(
    ids_N: jax.Array, T: int, k: int, E: int, rows: int, slots: int, *, all_tokens: bool, interpret: Any = False
) -> SlotTables:
    """As `dispatch`, for ids [N / BLOCK, BLOCK] as `routing.assign` gives them: k for each of T tokens, E for no expert.

    With `all_tokens`, `place` holds the first row of each slot; the token's own row has still to be added.
    """
    chunks = ids_N.shape[0]
    if all_tokens or chunks <= MOST_CHUNKS:
        num_slots, expert, token, place = place_all(chunks, E, k, rows, slots, all_tokens, interpret)(ids_N)
    else:
        counts, rank = count_chunks(chunks, E, interpret)(ids_N)
        num_slots, expert, token, place = place_chunks(chunks, E, k, rows, slots, interpret)(ids_N, counts, rank)
    return SlotTables(num_slots, expert, token, place.reshape(-1)[: T * k].reshape(T, k))
