"""Slot tables of few assignments, a decode step's, as one Mosaic GPU kernel (`moe_plan` in traces).

XLA makes a dozen kernels of them, 12 to 38 us a layer on an H200, where reading the weights of a one-token step takes
30 us. Here nothing is sorted or scattered across threads: each block counts all assignments and places 64 of them, by
comparing ids with ids.
"""

import functools
from typing import Any, NamedTuple

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
    increment,
    iota,
    masked_row_sums,
    slot_ends,
    slots_needed,
    table_types,
    tile_columns,
    write_places,
    write_slots,
    write_token,
    zero_past,
    zero_rows,
    zero_tile,
)
from pallas_kernels.moe.packed_codes import copied_in_order
from pallas_kernels.row import WARPGROUP, whole_row


class Copied(NamedTuple):
    """A kernel's x: its columns and type, and whether the slots' rows have their columns in `packed_codes.fragment_order`."""

    columns: int
    dtype: Any
    ordered: bool = False


def copies(chunks: int, k: int, H: int) -> bool:
    """Whether the kernel can copy rows of H columns to their slots: each block has assignments of one token."""
    return k % (BLOCK // blocks_per_chunk(chunks)) == 0 and H % WARPGROUP == 0


@functools.cache
def place_all(
    chunks: int, E: int, k: int, rows: int, slots: int, all_tokens: bool, interpret: Any, copied: Copied | None = None
) -> Any:
    """kernel(ids [chunks, BLOCK], E for no expert) -> num_slots, expert, token, place [chunks, BLOCK]; all int32.

    With `copied`, where `copies` holds, it is kernel(ids, x [T, H]), and instead of `token` gives the slots' rows of x,
    [slots * rows, H]; rows without a token are uninitialised.
    """
    int32 = jnp.int32
    experts = -(-E // BLOCK) * BLOCK
    parts = 1 if all_tokens else blocks_per_chunk(chunks)
    narrow = tile_columns(experts)

    def body(ids, *refs, ids_smem, blocks_smem, ends_smem, row_smem, arrived):
        num_slots, expert, filled, place = refs[-4:]
        block = lax.axis_index("block")
        here, part = lax.div(block, int32(parts)), lax.rem(block, int32(parts))
        plgpu.copy_gmem_to_smem(ids, ids_smem, arrived)
        if copied:
            x, columns = refs[0], pl.ds(0, copied.columns)
            mine = lax.div(here * BLOCK + part * (BLOCK // parts), int32(k))
            # On its way while the tables are made. Blocks and assignments of no token read the last one.
            mine = lax.min(mine, int32(x.shape[0] - 1))
            if copied.ordered:
                put = copied_in_order(x.at[mine], emulated=bool(interpret))
            else:
                value = load(x, (mine, columns), layout=whole_row(copied.columns))

            def fill(row, assignment):
                del assignment
                if copied.ordered:
                    put(filled.at[row])
                else:
                    filled[row, :] = value

        else:
            fill = write_token(filled, k)
        plgpu.barrier_wait(arrived)

        def count(chunk, counts):
            return count_experts(ids_smem, chunk, counts)

        # One sum across threads, after the loop.
        counts = lax.fori_loop(0, chunks, count, zero_tile((experts, narrow))).sum(axis=1)
        if all_tokens:
            blocks_smem[...] = zero_past(jnp.minimum(counts, jnp.full((experts,), 1, int32)), E)
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
                return slot + masked_row_sums(before, down_columns(col, BLOCK))

            row = lax.fori_loop(0, experts // BLOCK, preceding, zero_rows(BLOCK)) * rows
            chosen = ids_row < E
            if all_tokens:
                place[here] = jnp.where(chosen, row, jnp.zeros((BLOCK,), int32))
                return

            def equal(chunk):
                col = load(ids_smem, (chunk,), layout=AS_COLUMNS)
                return down_columns(col, BLOCK) == along_rows(ids_row, BLOCK)

            ranks = lax.fori_loop(
                0, here, lambda chunk, ranks: increment(ranks, equal(chunk)), zero_tile((BLOCK, BLOCK))
            )
            earlier = iota((BLOCK, BLOCK), 1) < iota((BLOCK, BLOCK), 0)
            row = row + increment(ranks, equal(here) & earlier).sum(axis=1)
            write_places(place, fill, row_smem, row, chosen, here, part, parts)

    body.__name__ = "moe_plan"
    out_type = table_types(chunks, slots, rows)
    if copied:
        out_type[2] = jax.ShapeDtypeStruct((slots * rows, copied.columns), copied.dtype)
    return plgpu.kernel(
        body,
        out_type=out_type,
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
