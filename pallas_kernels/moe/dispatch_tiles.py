"""Parts of the dispatch kernels: register tiles of expert ids that are compared with vectors along their axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load

# Assignments of a chunk, and slots whose experts a block writes: the rows of a register tile.
BLOCK = 64
# Elements of the tile that is compared at once: 32 registers a thread.
TILE = 4096
# The tokens of a slot's rows are written one after another, at a store and two barriers each. Up to this many blocks, one
# a multiprocessor, several blocks share a chunk of assignments: all compute its places, each writes a part of the tokens.
MOST_SHARING_BLOCKS = 128
# Bits of an expert's number where the rows that a slot uses stand above it.
USED_BITS = 20

# Layouts of a tile's rows and of its columns as vectors.
AS_ROWS, AS_COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0)


def table_types(chunks: int, slots: int, rows: int) -> list[jax.ShapeDtypeStruct]:
    """Types of the results num_slots, expert, used, token and place."""
    named = (-(-slots // BLOCK) * BLOCK,)
    shapes = (1,), named, named, (slots * rows,), (chunks, BLOCK)
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


def blocks_per_chunk(chunks: int) -> int:
    """How many blocks share a chunk."""
    return next((parts for parts in (8, 4, 2) if parts * chunks <= MOST_SHARING_BLOCKS), 1)


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def down_columns(vector: jax.Array, size: int) -> jax.Array:
    """[columns] as [size, columns]."""
    return lax.broadcast_in_dim(vector, (size, vector.shape[0]), (1,))


def along_rows(vector: jax.Array, size: int) -> jax.Array:
    """[rows] as [rows, size]."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], size), (0,))


def masked_row_sums(mask: jax.Array, values: jax.Array | int) -> jax.Array:
    """Row sums of the values, a tile or a number, where the mask is set."""
    values = values if isinstance(values, jax.Array) else jnp.full(mask.shape, values, jnp.int32)
    return jnp.where(mask, values, jnp.zeros(mask.shape, jnp.int32)).sum(axis=1)


def zero_tile(shape: tuple[int, int]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.int32), plgpu.Layout.WGMMA)


def increment(counts: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, counts + 1, counts)


def zero_rows(size: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((size,), jnp.int32), AS_ROWS)


def tile_columns(experts: int) -> int:
    """Columns of a tile with a row for each expert."""
    return int(max(8, 1 << (TILE // experts).bit_length() - 1))


def count_experts(ids: Any, chunk: Any, counts: jax.Array) -> jax.Array:
    """Adds a chunk of ids [chunks, BLOCK] to counts [experts, columns], whose row sums are the assignments per expert."""
    experts, columns = counts.shape
    for start in range(0, BLOCK, columns):
        col = load(ids, (chunk, pl.ds(start, columns)), layout=AS_COLUMNS)
        counts = increment(counts, down_columns(col, experts) == iota((experts, columns), 0))
    return counts


def write_slot_ends(blocks_smem: Any, ends_smem: Any) -> None:
    """Writes inclusive prefix sums of the experts' numbers of slots, both [experts]."""
    within = iota((BLOCK, BLOCK), 1) <= iota((BLOCK, BLOCK), 0)

    def accumulate(tile: Any, before: jax.Array) -> jax.Array:
        of_tile = pl.ds(tile * BLOCK, BLOCK)
        counts = down_columns(load(blocks_smem, (of_tile,), layout=AS_COLUMNS), BLOCK)
        # Of earlier tiles all columns count. They are added in registers, so that a tile needs one sum across threads.
        ends_smem[of_tile] = (before + jnp.where(within, counts, jnp.zeros(counts.shape, jnp.int32))).sum(axis=1)
        return before + counts

    lax.fori_loop(0, blocks_smem.shape[0] // BLOCK, accumulate, zero_tile((BLOCK, BLOCK)))


def slot_experts(ends_smem: Any, first: jax.Array | int) -> jax.Array:
    """The experts of BLOCK slots from `first` on, from ends_smem [experts]."""
    slot = iota((BLOCK, BLOCK), 0) + first

    def passed(chunk, found):
        col = load(ends_smem, (pl.ds(chunk * BLOCK, BLOCK),), layout=AS_COLUMNS)
        return found + masked_row_sums(down_columns(col, BLOCK) <= slot, 1)

    return lax.fori_loop(0, ends_smem.shape[0] // BLOCK, passed, zero_rows(BLOCK))


def used_slots(
    counts_smem: Any, blocks_smem: Any, ends_smem: Any, first: Any, rows: int
) -> tuple[jax.Array, jax.Array]:
    """The experts of BLOCK slots from `first` on, and how many of their `rows` rows have a token; 0 past the last slot.

    counts_smem, blocks_smem and ends_smem, all [experts], have assignments, slots and the slots up to an expert's last.
    """
    slot = iota((BLOCK, BLOCK), 0) + first

    def look(tile: Any, found: jax.Array) -> jax.Array:
        of_tile = pl.ds(tile * BLOCK, BLOCK)
        counts, blocks, ends = (
            load(smem, (of_tile,), layout=AS_COLUMNS) for smem in (counts_smem, blocks_smem, ends_smem)
        )
        number = iota((BLOCK, BLOCK), 1) + tile * BLOCK
        before = slot - down_columns(ends - blocks, BLOCK)  # of the same expert's slots
        used = jnp.minimum(down_columns(counts, BLOCK) - before * rows, jnp.full((BLOCK, BLOCK), rows, jnp.int32))
        mine = (before >= 0) & (slot < down_columns(ends, BLOCK))
        return jnp.where(mine, number + lax.shift_left(used, jnp.full(used.shape, USED_BITS, jnp.int32)), found)

    # Each slot has one expert. With both numbers in one, there is one sum across threads.
    both = lax.fori_loop(0, ends_smem.shape[0] // BLOCK, look, zero_tile((BLOCK, BLOCK))).sum(axis=1)
    bits = jnp.full(both.shape, USED_BITS, jnp.int32)
    used = lax.shift_right_logical(both, bits)
    return both - lax.shift_left(used, bits), used


def write_slots(
    num_slots: Any, expert: Any, used: Any, counts_smem: Any, blocks_smem: Any, ends_smem: Any, block: Any, rows: int
) -> None:
    """Writes the number of slots, in the first block, and what `used_slots` gives of this block's BLOCK slots, if any."""

    @pl.when(block == 0)
    def _count() -> None:
        num_slots[0] = ends_smem[ends_smem.shape[0] - 1]

    @pl.when(block < expert.shape[0] // BLOCK)
    def _name() -> None:
        mine = pl.ds(block * BLOCK, BLOCK)
        expert[mine], used[mine] = used_slots(counts_smem, blocks_smem, ends_smem, block * BLOCK, rows)


def slots_needed(counts: jax.Array, E: int, rows: int) -> jax.Array:
    """Slots [experts] of `rows` rows that each expert's assignments fill; 0 from E on.

    Assignments of tokens that are not live count as expert E, which has no slots.
    """
    return zero_past(lax.div(counts + (rows - 1), jnp.full(counts.shape, rows, jnp.int32)), E)


def zero_past(values: jax.Array, E: int) -> jax.Array:
    """Values [experts] with 0 from E on."""
    if values.shape[0] == E:
        return values
    number = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=AS_ROWS)
    return jnp.where(number < E, values, jnp.zeros(values.shape, jnp.int32))


def write_places(
    place: Any,
    fill: Callable[[Any, Any], None],
    row_smem: Any,
    row: jax.Array,
    chosen: jax.Array,
    chunk: Any,
    part: Any,
    parts: int,
) -> None:
    """Writes the places of a chunk of assignments, and fills one part of the rows that they take.

    Args:
        place: ref int32 [chunks, BLOCK].
        fill: fill(row, assignment) fills a row.
        row_smem: scratch [BLOCK].
        row, chosen: [BLOCK] the row of each assignment, and whether it has an expert; if not, its place is 0.
        part: which of the `parts` blocks that share the chunk this is.
    """

    @pl.when(part == 0)
    def _write() -> None:
        place[chunk] = jnp.where(chosen, row, jnp.zeros((BLOCK,), jnp.int32))

    row_smem[...] = jnp.where(chosen, row, jnp.full((BLOCK,), -1, jnp.int32))

    @pl.loop(0, BLOCK // parts)
    def _own(step: Any) -> None:
        i = part * (BLOCK // parts) + step
        to = row_smem[i]

        @pl.when(to >= 0)
        def _() -> None:
            fill(to, chunk * BLOCK + i)


def write_token(token: Any, k: int) -> Callable[[Any, Any], None]:
    """For `write_places`: writes which token a row holds to a ref int32 [slots * rows]."""

    def fill(row: Any, assignment: Any) -> None:
        token[row] = lax.div(assignment, jnp.int32(k))

    return fill
