"""How the work of a call is cut whose experts have codes of four bits (`packed_matmul.py`), and which calls these are."""

from pallas_kernels.moe.config import (
    ALL_TOKENS_ROWS,
    WIDE_ROWS,
    Config,
    M,
    Tiles,
    blocks_of_a_kernel,
    rows_by_load,
    rows_of_all,
)
from pallas_kernels.moe.packed_codes import SCHEMES
from pallas_kernels.moe.slots import max_slots
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.values import in_schemes
from pallas_kernels.tuning import current

# Shared memory of a block, less what barriers and alignment take; stages of a ring at most.
SHARED_BYTES, MOST_STAGES = 224 * 1024, 12
# Up to this many rows the longest stages are two for each of three teams, beside the sums of two teams.
THREE_TEAMS_ROWS = 24


def is_packed(parameters: ExpertWeights) -> bool:
    """Whether the routed experts have codes of four bits that `packed_matmul.py` reads."""
    return in_schemes(SCHEMES, parameters.gate_up, parameters.down)


def packed_tiles(rows: int, columns: int, out_rows: int, *, gated: bool, most_blocks: int = 2) -> Tiles:
    """Tiles of a matmul; the other arguments are those of `config.tiles`.

    Args:
        most_blocks: accumulators of a consumer where it is not gated.
    """
    wide = rows >= WIDE_ROWS
    pairs = out_rows % (2 * M) == 0
    consumers = 2 if wide and pairs else 1
    blocks = 2 if gated or (pairs and out_rows % (2 * consumers * M) == 0 and most_blocks > 1) else 1
    # Rows of 128 bytes of codes are read faster than shorter ones, where they divide a matrix and its stages are many.
    depth = next(depth for depth in ((128, 64) if wide else (256, 128, 64)) if columns % depth == 0)
    splits = 1 if wide else 3 if depth == 256 and rows <= THREE_TEAMS_ROWS else 2
    # In bytes, and so many a column: codes half a one, scales a byte of 16 columns or two of 32.
    stage = (consumers * blocks * M * 9 // 16 + rows * 2) * depth
    others = (splits - 1) * consumers * blocks * M * rows * 4 + consumers * rows * M * 2
    stages = min((SHARED_BYTES - others) // stage, MOST_STAGES)
    return Tiles(depth, stages // splits * splits, consumers, blocks, splits)


def configure_packed(T: int, E: int, k: int, H: int, inner: int) -> Config:
    """As `config.configure`; shared experts have no part in these kernels."""
    all_tokens = T <= ALL_TOKENS_ROWS
    rows = rows_by_load(T, E, k, current().packed_slot_rows)
    slots = max_slots(T, k, E, rows, all_tokens=all_tokens)
    up = packed_tiles(rows, H, inner, gated=True)
    down = packed_tiles(rows, inner, H, gated=False)
    return Config(rows, slots, all_tokens, up, down, blocks_of_a_kernel())


def configure_packed_mlp(T: int, H: int, inner: int) -> Config:
    """Of an MLP of inner size `inner` as one expert that every token visits."""
    rows, grid = rows_of_all(T), blocks_of_a_kernel()
    slots = -(-T // rows)
    up = packed_tiles(rows, H, inner, gated=True)
    down = packed_tiles(rows, inner, H, gated=False)
    if slots * H // (down.consumers * down.blocks * M) < grid:  # halves them, so that more blocks have work
        down = packed_tiles(rows, inner, H, gated=False, most_blocks=1)
    return Config(rows, slots, False, up, down, grid)
