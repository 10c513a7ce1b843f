"""How the work of one call with several tokens is cut: slots, tiles of the two matmuls, shared experts."""

from dataclasses import dataclass

import jax

from pallas_kernels.moe.selection import ROWS
from pallas_kernels.moe.slots import max_slots
from pallas_kernels.tuning import current

M = 64  # Rows of a wgmma, of which hidden and expert sizes are multiples.
GRANULE = 8  # Columns of a wgmma are multiples of this.

# Shared memory of a matmul's ring, and of the ring with the staged output; the rest of 227 KiB is for barriers.
RING_BYTES, STAGED_BYTES = 192 * 1024, 226 * 1024

# Up to this many tokens every slot has all of them, and one block of the routing kernel makes all tables.
ALL_TOKENS_ROWS = ROWS
# Rows of a slot beyond the last bound of `Tuning.slot_rows`.
WIDEST_ROWS = 128
# From this many rows on the tensor cores are the limit: wider tiles, two warpgroups.
WIDE_ROWS = 64


@dataclass(frozen=True)
class Tiles:
    """How one matmul is cut.

    Attributes:
        depth: columns of the weights in a stage of the ring.
        stages: of the ring.
        consumers: warpgroups that multiply.
        blocks: accumulators of M weight rows of each consumer; gate and up have one each.
        splits: teams of so many consumers, which take the stages in turn (`packed_matmul.py`).
    """

    depth: int
    stages: int
    consumers: int
    blocks: int
    splits: int = 1


@dataclass(frozen=True)
class Config:
    """How one call is cut.

    Attributes:
        rows: token rows of a slot, a multiple of GRANULE up to WIDE_ROWS, or WIDEST_ROWS.
        slots: the most slots there can be.
        all_tokens: every slot has all tokens.
        up, down: the tiles of the two matmuls.
        grid: blocks of a kernel, one a multiprocessor.
        pieces: the shared experts as a number of routed experts of the same total size; 0 if XLA computes them.
        piece_rows: token rows of a piece, which has all tokens.
    """

    rows: int
    slots: int
    all_tokens: bool
    up: Tiles
    down: Tiles
    grid: int
    pieces: int = 0
    piece_rows: int = 0


def tiles(rows: int, columns: int, out_rows: int, *, gated: bool, piece_rows: int = 0) -> Tiles:
    """Tiles of a matmul.

    Args:
        rows: token rows of a slot.
        columns, out_rows: of the weights [out_rows, columns], of which there are two if `gated`.
        piece_rows: token rows of a piece, 0 without pieces.
    """
    wide = rows >= WIDE_ROWS
    # For one accumulator a stage of one warpgroup is short: on an H200 two are 1 to 3 % faster.
    consumers = 2 if (wide or not gated) and out_rows % (2 * M) == 0 else 1
    blocks = 2 if gated or (wide and out_rows % (2 * consumers * M) == 0) else 1
    # What many rows of pieces, and what two warpgroups store, leave of the memory is two stages, or five short ones.
    crowded = consumers == 2 and piece_rows > WIDE_ROWS
    depth = 128 if not (wide or crowded) and columns % 128 == 0 else 64
    staged = consumers * M * (rows + piece_rows) * 2
    stages = min(RING_BYTES, STAGED_BYTES - staged) // ((consumers * blocks * M + max(rows, piece_rows)) * depth * 2)
    return Tiles(depth, stages, consumers, blocks)


def rows_of_all(T: int) -> int:
    """Token rows of a slot where an expert has all T tokens."""
    return next((rows for rows in (ALL_TOKENS_ROWS, 16, 32, 64) if rows >= T), WIDEST_ROWS)


def rows_by_load(T: int, E: int, k: int, bounds: tuple[tuple[float, int], ...]) -> int:
    """Token rows of a slot where T tokens have k of E experts each; bounds are as `Tuning.slot_rows`."""
    if T <= ALL_TOKENS_ROWS:
        return ALL_TOKENS_ROWS
    return next((rows for load, rows in bounds if T * k / E <= load), WIDEST_ROWS)


def blocks_of_a_kernel() -> int:
    """One a multiprocessor."""
    # The number of an H200, where there is no GPU to ask (lowering on a CPU).
    return getattr(jax.devices()[0], "core_count", None) or 132


def configure(T: int, E: int, k: int, H: int, inner: int, shared_inner: int = 0) -> Config:
    """The configuration for T tokens with k of E experts each.

    Args:
        H, inner: hidden size and an expert's inner size.
        shared_inner: joint inner size of the shared experts, 0 without any.
    """
    tuning, all_tokens = current(), T <= ALL_TOKENS_ROWS
    rows = rows_by_load(T, E, k, tuning.slot_rows)
    slots = max_slots(T, k, E, rows, all_tokens=all_tokens)
    grid = blocks_of_a_kernel()
    pieces = shared_inner // inner if tuning.most_piece_rows >= T and shared_inner % inner == 0 else 0
    piece_rows = -(-T // GRANULE) * GRANULE if pieces else 0
    up = tiles(rows, H, inner, gated=True, piece_rows=piece_rows)
    down = tiles(rows, inner, H, gated=False, piece_rows=piece_rows)
    return Config(rows, slots, all_tokens, up, down, grid, pieces, piece_rows)
