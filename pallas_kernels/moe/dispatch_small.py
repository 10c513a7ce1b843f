"""Slot tables of few assignments, a decode step's, as one Mosaic GPU kernel (`moe_plan` in traces).

XLA makes a dozen kernels of them, 12 to 38 us a layer on an H200, where reading the weights of a one-token step takes
30 us. Here nothing is sorted or scattered across threads: each block counts all assignments and places 64 of them, by
comparing ids with ids.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    slots_needed,
    table_types,
    tile_columns,
    write_places,
    write_slot_ends,
    write_slots,
    write_token,
    zero_past,
    zero_rows,
    zero_tile,
)
from pallas_kernels.moe.packed_codes import copied_in_order
from pallas_kernels.moe.slots import SlotTables
from pallas_kernels.row import WARPGROUP, whole_row


class Copied(NamedTuple):
    """A kernel's x: its columns and type, and whether the slots' rows have their columns in `packed_codes.fragment_order`."""

    columns: int
    dtype: Any
    ordered: bool = False


def copies(chunks: int, k: int, H: int) -> bool:
    """Whether the kernel can copy rows of H columns to their slots: each block has assignments of one token."""
    return k % (BLOCK // blocks_per_chunk(chunks)) == 0 and H % WARPGROUP == 0


@dataclass(frozen=True)
class Plan:
    """The tables of `chunks` chunks of BLOCK ids, k of E experts for each token, and how blocks make them.

    Attributes:
        rows: token rows of a slot.
        slots: `max_slots` or more.
        all_tokens: every slot has all tokens.
        copied: the tokens that are copied to their slots, where `copies` holds.
    """

    chunks: int
    E: int
    k: int
    rows: int
    slots: int
    all_tokens: bool = False
    copied: Copied | None = None

    @property
    def experts(self) -> int:
        """E, padded."""
        return -(-self.E // BLOCK) * BLOCK

    @property
    def parts(self) -> int:
        """Blocks that share a chunk."""
        return 1 if self.all_tokens else blocks_per_chunk(self.chunks)

    @property
    def blocks(self) -> int:
        return max(self.chunks * self.parts, -(-self.slots // BLOCK))

    @property
    def out_type(self) -> list[jax.ShapeDtypeStruct]:
        """Of num_slots, expert, used, token, place [chunks, BLOCK]; with `copied` rows [slots * rows, H] stand for `token`."""
        types = table_types(self.chunks, self.slots, self.rows)
        if self.copied:
            types[3] = jax.ShapeDtypeStruct((self.slots * self.rows, self.copied.columns), self.copied.dtype)
        return types

    @property
    def scratch_types(self) -> dict[str, Any]:
        return {
            "ids_smem": plgpu.SMEM((self.chunks, BLOCK), jnp.int32),
            "counts_smem": plgpu.SMEM((self.experts,), jnp.int32),
            "blocks_smem": plgpu.SMEM((self.experts,), jnp.int32),
            "ends_smem": plgpu.SMEM((self.experts,), jnp.int32),
            "row_smem": plgpu.SMEM((BLOCK,), jnp.int32),
        }

    def tables(self, results: Sequence[jax.Array]) -> tuple[SlotTables, jax.Array | None]:
        """Of a kernel's results of `out_type`; with `copied` also the slots' rows, [slots, rows, H], and no `token`.

        `place` has a row for each token that the ids have room for.
        """
        num_slots, expert, used, filled, place = results
        place = place.reshape(-1)[: place.size // self.k * self.k].reshape(-1, self.k)
        if not self.copied:
            return SlotTables(num_slots, expert, used, filled, place), None
        token = jnp.zeros(self.slots * self.rows, jnp.int32)  # never read
        return SlotTables(num_slots, expert, used, token, place), filled.reshape(self.slots, self.rows, -1)


@functools.cache
def place_all(plan: Plan, interpret: Any) -> Any:
    """kernel(ids [chunks, BLOCK], E for no expert) -> `Plan.out_type`. With `copied` it is kernel(ids, x [T, H])."""

    def moe_plan(ids, *refs, arrived, **scratch):
        plgpu.copy_gmem_to_smem(ids, scratch["ids_smem"], arrived)
        block, emulated = lax.axis_index("block"), bool(interpret)
        make_tables(plan, block, lambda: plgpu.barrier_wait(arrived), *refs, emulated=emulated, **scratch)

    return plgpu.kernel(
        moe_plan,
        out_type=plan.out_type,
        scratch_types={**plan.scratch_types, "arrived": plgpu.Barrier()},
        grid=(plan.blocks,),
        grid_names=("block",),
        interpret=interpret,
        compiler_params=PARAMS,
    )


def make_tables(
    plan: Plan,
    block: Any,
    await_ids: Callable[[], None],
    *refs: Any,
    emulated: bool,
    ids_smem: Any,
    counts_smem: Any,
    blocks_smem: Any,
    ends_smem: Any,
    row_smem: Any,
) -> None:
    """The work of one of `Plan.blocks` blocks, inside a kernel.

    Args:
        await_ids: returns when ids_smem holds all ids.
        refs: x [T, H] with `copied`, then `Plan.out_type`. Rows of slots without a token stay uninitialised.
        emulated: by the interpreter.
    """
    int32 = jnp.int32
    chunks, E, rows, experts, parts, copied = plan.chunks, plan.E, plan.rows, plan.experts, plan.parts, plan.copied
    narrow = tile_columns(experts)
    num_slots, expert, used, filled, place = refs[-5:]
    here, part = lax.div(block, int32(parts)), lax.rem(block, int32(parts))
    if copied:
        x, columns = refs[0], pl.ds(0, copied.columns)
        mine = lax.div(here * BLOCK + part * (BLOCK // parts), int32(plan.k))
        # On its way while the tables are made. Blocks and assignments of no token read the last one.
        mine = lax.min(mine, int32(x.shape[0] - 1))
        if copied.ordered:
            put = copied_in_order(x.at[mine], emulated=emulated)
        else:
            value = load(x, (mine, columns), layout=whole_row(copied.columns))

        def fill(row, assignment):
            del assignment
            if copied.ordered:
                put(filled.at[row])
            else:
                filled[row, :] = value

    else:
        fill = write_token(filled, plan.k)
    await_ids()

    def count(chunk, counts):
        return count_experts(ids_smem, chunk, counts)

    # One sum across threads, after the loop.
    counts = lax.fori_loop(0, chunks, count, zero_tile((experts, narrow))).sum(axis=1)
    counts_smem[...] = counts
    if plan.all_tokens:
        blocks_smem[...] = zero_past(jnp.minimum(counts, jnp.full((experts,), 1, int32)), E)
    else:
        blocks_smem[...] = slots_needed(counts, E, rows)
    write_slot_ends(blocks_smem, ends_smem)
    write_slots(num_slots, expert, used, counts_smem, blocks_smem, ends_smem, block, rows)

    @pl.when(here < chunks)
    def _place():
        ids_row = load(ids_smem, (here,), layout=AS_ROWS)

        def preceding(tile, slot):
            col = load(blocks_smem, (pl.ds(tile * BLOCK, BLOCK),), layout=AS_COLUMNS)
            before = iota((BLOCK, BLOCK), 1) + tile * BLOCK < along_rows(ids_row, BLOCK)
            return slot + masked_row_sums(before, down_columns(col, BLOCK))

        row = lax.fori_loop(0, experts // BLOCK, preceding, zero_rows(BLOCK)) * rows
        chosen = ids_row < E
        if plan.all_tokens:
            place[here] = jnp.where(chosen, row, jnp.zeros((BLOCK,), int32))
            return

        def equal(chunk):
            col = load(ids_smem, (chunk,), layout=AS_COLUMNS)
            return down_columns(col, BLOCK) == along_rows(ids_row, BLOCK)

        ranks = lax.fori_loop(0, here, lambda chunk, ranks: increment(ranks, equal(chunk)), zero_tile((BLOCK, BLOCK)))
        earlier = iota((BLOCK, BLOCK), 1) < iota((BLOCK, BLOCK), 0)
        row = row + increment(ranks, equal(here) & earlier).sum(axis=1)
        write_places(place, fill, row_smem, row, chosen, here, part, parts)
