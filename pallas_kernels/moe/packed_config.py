"""How the work of a call is cut whose experts have codes of four bits (`packed_matmul.py`), and which calls these are."""

from pallas_kernels.moe.config import WIDE_ROWS, Config, M, Tiles, configure
from pallas_kernels.moe.packed_codes import SCHEMES
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.values import Quantised

# Shared memory of a block, less what barriers and alignment take; stages of a ring at most.
SHARED_BYTES, MOST_STAGES = 224 * 1024, 12


def is_packed(parameters: ExpertWeights) -> bool:
    """Whether the routed experts have codes of four bits that `packed_matmul.py` reads."""
    pair = parameters.gate_up, parameters.down
    return all(isinstance(weight, Quantised) and weight.scheme in SCHEMES for weight in pair)


def packed_tiles(rows: int, columns: int, out_rows: int, *, gated: bool) -> Tiles:
    """Tiles of a matmul; the arguments are those of `config.tiles`."""
    wide = rows >= WIDE_ROWS
    pairs = out_rows % (2 * M) == 0
    consumers = 2 if wide and pairs else 1
    blocks = 2 if gated or (pairs and out_rows % (2 * consumers * M) == 0) else 1
    # Rows of 128 bytes of codes are read faster than shorter ones, where they divide a matrix and its stages are many.
    depth = next(depth for depth in ((128, 64) if wide else (256, 128, 64)) if columns % depth == 0)
    splits = 1 if wide else 3 if depth == 256 and rows <= 16 else 2
    # In bytes, and so many a column: codes half a one, scales a byte of 16 columns or two of 32.
    stage = (consumers * blocks * M * 9 // 16 + rows * 2) * depth
    others = (splits - 1) * consumers * blocks * M * rows * 4 + consumers * rows * M * 2
    stages = min((SHARED_BYTES - others) // stage, MOST_STAGES)
    return Tiles(depth, stages // splits * splits, consumers, blocks, splits)


def configure_packed(T: int, E: int, k: int, H: int, inner: int) -> Config:
    """As `config.configure`; shared experts are left to XLA."""
    cut = configure(T, E, k, H, inner)
    up = packed_tiles(cut.rows, H, inner, gated=True)
    down = packed_tiles(cut.rows, inner, H, gated=False)
    return Config(cut.rows, cut.slots, cut.all_tokens, up, down, cut.grid)
