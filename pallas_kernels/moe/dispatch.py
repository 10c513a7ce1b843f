"""From chosen experts to slot tables. Four sets of kernels do this, by the number of assignments (tokens times k):

- `dispatch_fused`: up to 8 tokens; the tables come out of the routing kernel itself.
- `dispatch_meet`: up to `Tuning.route_plan_tokens`; so they do here, from blocks that wait for those that route.
- `dispatch_small`: one kernel, in which every block counts all assignments.
- `dispatch_large`: two kernels, a prefill's; each block counts its own assignments, the second adds the counts up.

This module chooses between the last two. The oracle is `reference.slot_tables`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.moe.dispatch_large import count_chunks, place_chunks
from pallas_kernels.moe.dispatch_small import Copied, Plan, copies, place_all
from pallas_kernels.moe.dispatch_tiles import BLOCK
from pallas_kernels.moe.slots import SlotTables

# With more chunks of BLOCK assignments, blocks that count all of them are slower than a second launch.
MOST_CHUNKS = 16


def dispatch(
    ids: jax.Array, live: jax.Array, E: int, rows: int, slots: int, *, all_tokens: bool, interpret: Any = False
) -> SlotTables:
    """As `reference.slot_tables`, but undefined entries stay unwritten.

    Args:
        ids: int32 [T, k], in [0, E] where the token is live; E for no expert, whose place is undefined.
        live: bool [T].
        rows: token rows of a slot.
        slots: `max_slots` or more.
        all_tokens: every slot has all T <= rows tokens.
    """
    T, k = ids.shape
    ids_N = assigned_blocks(ids, live, E)
    tables = dispatch_assigned(ids_N, k, E, rows, slots, all_tokens=all_tokens, interpret=interpret)
    place = tables.place[:T]
    if all_tokens:
        place = jnp.where(live[:, None], place + jnp.arange(T, dtype=jnp.int32)[:, None], 0)
    return tables._replace(place=place)


def assigned_blocks(ids: jax.Array, live: jax.Array, E: int) -> jax.Array:
    """Ids [T, k] of live tokens as `routing.assign` gives them, [chunks, BLOCK]; E for no expert."""
    flat = jnp.where(live[:, None], ids, E).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % BLOCK), constant_values=E).reshape(-1, BLOCK)


def dispatch_assigned(
    ids_N: jax.Array, k: int, E: int, rows: int, slots: int, *, all_tokens: bool, interpret: Any = False
) -> SlotTables:
    """As `dispatch`, for ids [N / BLOCK, BLOCK] as `routing.assign` gives them: k for each token, E for no expert.

    `place` has a row for each token that the ids have room for. With `all_tokens` it holds the first row of each slot; the
    token's own row has still to be added.
    """
    plan = Plan(ids_N.shape[0], E, k, rows, slots, all_tokens)
    if all_tokens or plan.chunks <= MOST_CHUNKS:
        results = place_all(plan, interpret)(ids_N)
    else:
        counts, rank = count_chunks(plan.chunks, E, interpret)(ids_N)
        results = place_chunks(plan.chunks, E, k, rows, slots, interpret)(ids_N, counts, rank)
    return plan.tables(results)[0]


def copies_tokens(chunks: int, k: int, H: int) -> bool:
    """Whether `dispatch_and_copy` supports so many chunks of ids, k for each token, and tokens of H columns."""
    return chunks <= MOST_CHUNKS and copies(chunks, k, H)


def dispatch_and_copy(
    ids_N: jax.Array,
    x: jax.Array,
    k: int,
    E: int,
    rows: int,
    slots: int,
    *,
    ordered: bool = False,
    interpret: Any = False,
) -> tuple[SlotTables, jax.Array]:
    """`dispatch_assigned`, and the slots' rows of x [T, H] in the same launch, [slots, rows, H].

    Rows without a token are uninitialised, and so is `token`.

    Args:
        ordered: the rows have their columns in `packed_codes.fragment_order`.
    """
    plan = Plan(ids_N.shape[0], E, k, rows, slots, copied=Copied(x.shape[1], x.dtype, ordered))
    tables, copied = plan.tables(place_all(plan, interpret)(ids_N, x))
    assert copied is not None
    return tables, copied
