"""The tables of `schedule` as one small Mosaic GPU kernel.

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
from pallas_kernels.moe.schedule import Schedule

# A block places this many assignments and names the experts of this many slots: the rows of a register tile.
BLOCK = 64
# Registers of the tile that is compared at once: 32 a thread.
TILE = 4096
# All ids lie in shared memory.
MAX_ASSIGNMENTS = 32768
# The most rows of a TMA copy.
COPY_ROWS = 256
# Rows of slots learn their tokens one after the other, a store and two barriers each. Up to this many blocks, one
# multiprocessor each, several share a chunk of assignments: all place it, each tells a part of the rows.
SHARING_BLOCKS = 128

# Layouts of a tile's rows and of its columns as vectors.
AS_ROWS, AS_COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def plan(
    ids: jax.Array, live: jax.Array, E: int, rows: int, slots: int, *, shared: bool, interpret: Any = False
) -> Schedule:
    """As `schedule`, for at most MAX_ASSIGNMENTS. What belongs to no slot or no token is not written."""
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
    num_slots, expert, token, place = _plan(ids_N.size, E, k, rows, slots, shared, interpret)(ids_N)
    return Schedule(num_slots, expert, token, place.reshape(-1)[: T * k].reshape(T, k))


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def down_columns(vector: jax.Array, size: int) -> jax.Array:
    """[columns] as [size, columns]."""
    return lax.broadcast_in_dim(vector, (size, vector.shape[0]), (1,))


def along_rows(vector: jax.Array, size: int) -> jax.Array:
    """[rows] as [rows, size]."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], size), (0,))


def total(mask: jax.Array, values: jax.Array | int) -> jax.Array:
    """Row sums of the values, a tile or a number, where the mask holds."""
    values = values if isinstance(values, jax.Array) else jnp.full(mask.shape, values, jnp.int32)
    return jnp.where(mask, values, jnp.zeros(mask.shape, jnp.int32)).sum(axis=1)


def nothing(shape: tuple[int, int]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.int32), plgpu.Layout.WGMMA)


def add_one(counts: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, counts + 1, counts)


def zeros(size: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((size,), jnp.int32), AS_ROWS)


def tile_columns(experts: int) -> int:
    """Columns of a tile with a row for each expert."""
    return int(max(8, 1 << (TILE // experts).bit_length() - 1))


def slot_ends(blocks_smem: Any) -> jax.Array:
    """How many slots each expert and those before it have: [experts], from blocks_smem [experts]."""
    experts = blocks_smem.shape[0]
    narrow = tile_columns(experts)

    def accumulate(chunk, ends):
        start = chunk * narrow
        col = load(blocks_smem, (pl.ds(start, narrow),), layout=AS_COLUMNS)
        before = iota((experts, narrow), 1) + start <= iota((experts, narrow), 0)
        return ends + total(before, down_columns(col, experts))

    return lax.fori_loop(0, experts // narrow, accumulate, zeros(experts))


def slot_experts(ends_smem: Any, first: jax.Array | int) -> jax.Array:
    """The experts of BLOCK slots from `first` on, from ends_smem [experts]."""
    slot = iota((BLOCK, BLOCK), 0) + first

    def passed(chunk, found):
        col = load(ends_smem, (pl.ds(chunk * BLOCK, BLOCK),), layout=AS_COLUMNS)
        return found + total(down_columns(col, BLOCK) <= slot, 1)

    return lax.fori_loop(0, ends_smem.shape[0] // BLOCK, passed, zeros(BLOCK))


@functools.cache
def _plan(N: int, E: int, k: int, rows: int, slots: int, shared: bool, interpret: Any) -> Any:
    """kernel(ids [N / BLOCK, BLOCK], E where there is none) -> num_slots, expert, token, place [N / BLOCK, BLOCK]."""
    int32 = jnp.int32
    experts = -(-E // BLOCK) * BLOCK
    chunks, slot_blocks = N // BLOCK, -(-slots // BLOCK)
    parts = 1 if shared else next((p for p in (8, 4, 2) if p * chunks <= SHARING_BLOCKS), 1)
    narrow = tile_columns(experts)
    copies = [(start, min(COPY_ROWS, chunks - start)) for start in range(0, chunks, COPY_ROWS)]

    def body(ids, num_slots, expert, token, place, ids_smem, blocks_smem, ends_smem, row_smem, arrived):
        block = lax.axis_index("block")
        here, turn = lax.div(block, int32(parts)), lax.rem(block, int32(parts))
        for start, size in copies:
            part = pl.ds(start, size)
            plgpu.copy_gmem_to_smem(ids.at[part], ids_smem.at[part], arrived)
        plgpu.barrier_wait(arrived)

        def count(chunk, counts):
            for part in range(0, BLOCK, narrow):
                ids_col = load(ids_smem, (chunk, pl.ds(part, narrow)), layout=AS_COLUMNS)
                counts = add_one(counts, down_columns(ids_col, experts) == iota((experts, narrow), 0))
            return counts

        # One sum across threads, behind the loop.
        counts = lax.fori_loop(0, chunks, count, nothing((experts, narrow))).sum(axis=1)
        if shared:
            blocks = jnp.minimum(counts, jnp.full((experts,), 1, int32))
        else:
            # rows is a power of two: what is not live counts as expert E, which has no slots.
            blocks = lax.shift_right_logical(counts + (rows - 1), jnp.full((experts,), rows.bit_length() - 1, int32))
        if experts > E:
            number = plgpu.broadcasted_iota(int32, (experts,), 0, layout=AS_ROWS)
            blocks = jnp.where(number < E, blocks, jnp.zeros((experts,), int32))
        blocks_smem[...] = blocks

        ends_smem[...] = slot_ends(blocks_smem)

        @pl.when(block == 0)
        def _count_slots():
            num_slots[0] = ends_smem[experts - 1]

        @pl.when(block < slot_blocks)
        def _name_slots():
            expert[pl.ds(block * BLOCK, BLOCK)] = slot_experts(ends_smem, block * BLOCK)

        @pl.when(here < chunks)
        def _place():
            ids_row = load(ids_smem, (here,), layout=AS_ROWS)

            def preceding(chunk, slot):
                col = load(blocks_smem, (pl.ds(chunk * BLOCK, BLOCK),), layout=AS_COLUMNS)
                before = iota((BLOCK, BLOCK), 1) + chunk * BLOCK < along_rows(ids_row, BLOCK)
                return slot + total(before, down_columns(col, BLOCK))

            row = lax.fori_loop(0, experts // BLOCK, preceding, zeros(BLOCK)) * rows
            if not shared:

                def equal(chunk):
                    col = load(ids_smem, (chunk,), layout=AS_COLUMNS)
                    return down_columns(col, BLOCK) == along_rows(ids_row, BLOCK)

                ranks = lax.fori_loop(
                    0, here, lambda chunk, ranks: add_one(ranks, equal(chunk)), nothing((BLOCK, BLOCK))
                )
                earlier = iota((BLOCK, BLOCK), 1) < iota((BLOCK, BLOCK), 0)
                row = row + add_one(ranks, equal(here) & earlier).sum(axis=1)
            chosen = ids_row < E

            @pl.when(turn == 0)
            def _write():
                place[here] = jnp.where(chosen, row, jnp.zeros((BLOCK,), int32))

            if not shared:
                row_smem[...] = jnp.where(chosen, row, jnp.full((BLOCK,), -1, int32))

                @pl.loop(0, BLOCK // parts)
                def _own(step):
                    i = turn * (BLOCK // parts) + step
                    to = row_smem[i]

                    @pl.when(to >= 0)
                    def _():
                        token[to] = lax.div(here * BLOCK + i, int32(k))

    body.__name__ = "moe_plan"
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(shape, int32)
            for shape in ((1,), (slot_blocks * BLOCK,), (slots * rows,), (chunks, BLOCK))
        ],
        scratch_types={
            "ids_smem": plgpu.SMEM((chunks, BLOCK), int32),
            "blocks_smem": plgpu.SMEM((experts,), int32),
            "ends_smem": plgpu.SMEM((experts,), int32),
            "row_smem": plgpu.SMEM((BLOCK,), int32),
            "arrived": plgpu.Barrier(num_arrivals=len(copies)),
        },
        grid=(max(chunks * parts, slot_blocks),),
        grid_names=("block",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )
