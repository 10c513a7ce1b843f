"""The tables of `schedule` as one small Mosaic GPU kernel, or two for many assignments.

XLA makes a dozen kernels of them, at 12 to 38 microseconds a layer on an H200, where reading the weights of a one-token
step takes 30. Here nothing is sorted or scattered across threads: each block of the grid counts all assignments (they
are few) and places 64 of them, by comparing ids with ids.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.moe.plan_by_chunks import count_chunks, place_chunks
from pallas_kernels.moe.schedule import Schedule
from pallas_kernels.moe.tables import (
    AS_COLUMNS,
    AS_ROWS,
    BLOCK,
    PARAMS,
    add_one,
    along_rows,
    count_experts,
    down_columns,
    iota,
    nothing,
    of_experts,
    sharing,
    slot_ends,
    slots_needed,
    table_types,
    tile_columns,
    total,
    write_places,
    write_slots,
    zeros,
)

# With more chunks of assignments, blocks that count all of them take longer than a second launch.
MOST_CHUNKS = 16


def plan(
    ids: jax.Array, live: jax.Array, E: int, rows: int, slots: int, *, shared: bool, interpret: Any = False
) -> Schedule:
    """As `schedule`. What belongs to no slot or no token is not written."""
    T, k = ids.shape
    padded = -(-T * k // BLOCK) * BLOCK
    ids_N = jnp.where(live[:, None], ids, E).reshape(-1)
    ids_N = jnp.pad(ids_N, (0, padded - T * k), constant_values=E).reshape(-1, BLOCK)
    tables = plan_assigned(ids_N, T, k, E, rows, slots, shared=shared, interpret=interpret)
    if shared:
        place = jnp.where(live[:, None], tables.place + jnp.arange(T, dtype=jnp.int32)[:, None], 0)
        tables = tables._replace(place=place)
    return tables


def plan_assigned(
    ids_N: jax.Array, T: int, k: int, E: int, rows: int, slots: int, *, shared: bool, interpret: Any = False
) -> Schedule:
    """As `plan`, from ids [N / BLOCK, BLOCK]: k for each of T tokens, E where there is none.

    With shared slots, places are the first rows of slots, not yet those of the tokens in them.
    """
    chunks = ids_N.shape[0]
    if shared or chunks <= MOST_CHUNKS:
        num_slots, expert, token, place = _plan(chunks, E, k, rows, slots, shared, interpret)(ids_N)
    else:
        counts, rank = count_chunks(chunks, E, interpret)(ids_N)
        num_slots, expert, token, place = place_chunks(chunks, E, k, rows, slots, interpret)(ids_N, counts, rank)
    return Schedule(num_slots, expert, token, place.reshape(-1)[: T * k].reshape(T, k))


@functools.cache
def _plan(chunks: int, E: int, k: int, rows: int, slots: int, shared: bool, interpret: Any) -> Any:
    """kernel(ids [chunks, BLOCK], E where there is none) -> num_slots, expert, token, place [chunks, BLOCK]."""
    int32 = jnp.int32
    experts = -(-E // BLOCK) * BLOCK
    parts = 1 if shared else sharing(chunks)
    narrow = tile_columns(experts)

    def body(ids, num_slots, expert, token, place, ids_smem, blocks_smem, ends_smem, row_smem, arrived):
        block = lax.axis_index("block")
        here, part = lax.div(block, int32(parts)), lax.rem(block, int32(parts))
        plgpu.copy_gmem_to_smem(ids, ids_smem, arrived)
        plgpu.barrier_wait(arrived)

        def count(chunk, counts):
            return count_experts(ids_smem, chunk, counts)

        # One sum across threads, behind the loop.
        counts = lax.fori_loop(0, chunks, count, nothing((experts, narrow))).sum(axis=1)
        if shared:
            blocks_smem[...] = of_experts(jnp.minimum(counts, jnp.full((experts,), 1, int32)), E)
        else:
            blocks_smem[...] = slots_needed(counts, E, rows)
        ends_smem[...] = slot_ends(blocks_smem)
        write_slots(num_slots, expert, ends_smem, block)

        @pl.when(here < chunks)
        def _place():
            ids_row = load(ids_smem, (here,), layout=AS_ROWS)

            def preceding(tile, slot):
                col = load(blocks_smem, (pl.ds(tile * BLOCK, BLOCK),), layout=AS_COLUMNS)
                before = iota((BLOCK, BLOCK), 1) + tile * BLOCK < along_rows(ids_row, BLOCK)
                return slot + total(before, down_columns(col, BLOCK))

            row = lax.fori_loop(0, experts // BLOCK, preceding, zeros(BLOCK)) * rows
            chosen = ids_row < E
            if shared:
                place[here] = jnp.where(chosen, row, jnp.zeros((BLOCK,), int32))
                return

            def equal(chunk):
                col = load(ids_smem, (chunk,), layout=AS_COLUMNS)
                return down_columns(col, BLOCK) == along_rows(ids_row, BLOCK)

            ranks = lax.fori_loop(0, here, lambda chunk, ranks: add_one(ranks, equal(chunk)), nothing((BLOCK, BLOCK)))
            earlier = iota((BLOCK, BLOCK), 1) < iota((BLOCK, BLOCK), 0)
            row = row + add_one(ranks, equal(here) & earlier).sum(axis=1)
            write_places(place, token, row_smem, row, chosen, here, part, parts, k)

    body.__name__ = "moe_plan"
    return plgpu.kernel(
        body,
        out_type=table_types(chunks, slots, rows),
        scratch_types={
            "ids_smem": plgpu.SMEM((chunks, BLOCK), int32),
            "blocks_smem": plgpu.SMEM((experts,), int32),
            "ends_smem": plgpu.SMEM((experts,), int32),
            "row_smem": plgpu.SMEM((BLOCK,), int32),
            "arrived": plgpu.Barrier(),
        },
        grid=(max(chunks * parts, -(-slots // BLOCK)),),
        grid_names=("block",),
        interpret=interpret,
        compiler_params=PARAMS,
    )
