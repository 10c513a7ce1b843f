"""Slot tables of many assignments, a prefill's, as two small Mosaic GPU kernels (`moe_count`, `moe_place` in traces).

In the one kernel of `dispatch_small` each block counts all assignments, so that its work grows with their square. Here
each block of the first kernel counts a chunk of 64 and ranks them, and each block of the second adds up the counts of
the chunks before its own.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.moe.dispatch_tiles import (
    AS_COLUMNS,
    AS_ROWS,
    BLOCK,
    PARAMS,
    along_rows,
    blocks_per_chunk,
    count_experts,
    down_columns,
    iota,
    masked_row_sums,
    slots_needed,
    table_types,
    tile_columns,
    write_places,
    write_slot_ends,
    write_slots,
    write_token,
    zero_rows,
    zero_tile,
)

int32 = jnp.int32


@functools.cache
def count_chunks(chunks: int, E: int, interpret: Any) -> Any:
    """kernel(ids [chunks, BLOCK]) -> counts [experts, columns], rank [chunks, BLOCK]; all int32.

    counts[e, c]: assignments of expert e in chunk c, padded with zeros to multiples of BLOCK experts and of `tile_columns`
    chunks. rank: how many assignments of the same expert precede an assignment in its chunk.
    """
    experts = -(-E // BLOCK) * BLOCK
    narrow = tile_columns(experts)
    columns = -(-chunks // narrow) * narrow

    def body(ids, counts, rank):
        chunk = lax.axis_index("chunk")

        @pl.when(chunk >= chunks)
        def _pad():
            counts[:, chunk] = zero_rows(experts)

        @pl.when(chunk < chunks)
        def _count():
            counts[:, chunk] = count_experts(ids, chunk, zero_tile((experts, narrow))).sum(axis=1)
            row, col = (load(ids, (chunk,), layout=layout) for layout in (AS_ROWS, AS_COLUMNS))
            earlier = iota((BLOCK, BLOCK), 1) < iota((BLOCK, BLOCK), 0)
            rank[chunk] = masked_row_sums((down_columns(col, BLOCK) == along_rows(row, BLOCK)) & earlier, 1)

    body.__name__ = "moe_count"
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, int32) for shape in ((experts, columns), (chunks, BLOCK))],
        grid=(columns,),
        grid_names=("chunk",),
        interpret=interpret,
        compiler_params=PARAMS,
    )


@functools.cache
def place_chunks(chunks: int, E: int, k: int, rows: int, slots: int, interpret: Any) -> Any:
    """kernel(ids, counts, rank) -> num_slots, expert, used, token, place [chunks, BLOCK]; all int32."""
    experts = -(-E // BLOCK) * BLOCK
    parts, narrow = blocks_per_chunk(chunks), tile_columns(experts)

    def body(
        ids,
        counts,
        rank,
        num_slots,
        expert,
        used,
        token,
        place,
        counts_smem,
        blocks_smem,
        ends_smem,
        before_smem,
        row_smem,
    ):
        block = lax.axis_index("block")
        here, part = lax.div(block, int32(parts)), lax.rem(block, int32(parts))

        def add(tile, sums):
            every, before = sums
            start = tile * narrow
            of_tile = load(counts, (slice(None), pl.ds(start, narrow)), layout=plgpu.Layout.WGMMA)
            ahead = iota((experts, narrow), 1) + start < here
            return every + of_tile, jnp.where(ahead, before + of_tile, before)

        # Sums across threads after the loop.
        empty = zero_tile((experts, narrow))
        every, before = lax.fori_loop(0, counts.shape[1] // narrow, add, (empty, empty))
        assigned = every.sum(axis=1)
        counts_smem[...] = assigned
        blocks_smem[...] = slots_needed(assigned, E, rows)
        before_smem[...] = before.sum(axis=1)
        write_slot_ends(blocks_smem, ends_smem)
        write_slots(num_slots, expert, used, counts_smem, blocks_smem, ends_smem, block, rows)

        @pl.when(here < chunks)
        def _place():
            ids_row = load(ids, (here,), layout=AS_ROWS)

            def look_up(tile, sums):
                slot, earlier = sums
                number, mine = iota((BLOCK, BLOCK), 1) + tile * BLOCK, along_rows(ids_row, BLOCK)
                of_blocks, of_before = (
                    down_columns(load(smem, (pl.ds(tile * BLOCK, BLOCK),), layout=AS_COLUMNS), BLOCK)
                    for smem in (blocks_smem, before_smem)
                )
                return slot + masked_row_sums(number < mine, of_blocks), earlier + masked_row_sums(
                    number == mine, of_before
                )

            slot, earlier = lax.fori_loop(0, experts // BLOCK, look_up, (zero_rows(BLOCK), zero_rows(BLOCK)))
            row = slot * rows + earlier + load(rank, (here,), layout=AS_ROWS)
            write_places(place, write_token(token, k), row_smem, row, ids_row < E, here, part, parts)

    body.__name__ = "moe_place"
    return plgpu.kernel(
        body,
        out_type=table_types(chunks, slots, rows),
        scratch_types={
            "counts_smem": plgpu.SMEM((experts,), int32),
            "blocks_smem": plgpu.SMEM((experts,), int32),
            "ends_smem": plgpu.SMEM((experts,), int32),
            "before_smem": plgpu.SMEM((experts,), int32),
            "row_smem": plgpu.SMEM((BLOCK,), int32),
        },
        grid=(max(chunks * parts, -(-slots // BLOCK)),),
        grid_names=("block",),
        interpret=interpret,
        compiler_params=PARAMS,
    )
