"""How the work of a call is cut whose experts are in FP8 (`fp8_matmul.py`), and which calls these are."""

from pallas_kernels.moe.config import (
    WIDE_ROWS,
    WIDEST_ROWS,
    Config,
    M,
    Tiles,
    blocks_of_a_kernel,
    configure,
    rows_of_all,
)
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.activations import GROUP
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL
from pallas_kernels.quant.values import Quantised, in_schemes

SCHEMES = (FP8_BLOCK, FP8_CHANNEL)
# Hidden and expert sizes are multiples of this: of a group of activations, and of a block of weights.
MULTIPLE = GROUP
# Shared memory of a block, less what barriers, alignment and reductions take; stages of a ring at most.
SHARED_BYTES, MOST_STAGES = 220 * 1024, 12
# Warpgroups that share the tokens of a slot of WIDEST_ROWS (`fp8_wide.py`).
TOKEN_WARPGROUPS = 2


def is_fp8(parameters: ExpertWeights) -> bool:
    """Whether the routed experts are in a scheme that `fp8_matmul.py` reads."""
    return in_schemes(SCHEMES, parameters.gate_up, parameters.down)


def pieces_beside(parameters: ExpertWeights, config: Config) -> int:
    """As how many more experts, of the size of a routed one, the routed ones' kernels compute the shared ones; 0 if not.

    Where every slot has all tokens, as each piece has.
    """
    if not config.all_tokens or parameters.shared is None or not is_fp8(parameters):
        return 0
    gate_up, inner = parameters.gate_up, parameters.gate_up.shape[2]
    assert isinstance(gate_up, Quantised)
    same = in_schemes((gate_up.scheme,), parameters.down, *parameters.shared)
    return parameters.shared_inner // inner if same and parameters.shared_inner % inner == 0 else 0


def padded_rows(rows: int) -> int:
    """How many scales of tokens lie together, of which `rows` are used: TMA copies them 128 bytes at a time."""
    return -(-rows // 32) * 32


def fp8_tiles(rows: int, columns: int, out_rows: int, *, gated: bool) -> Tiles:
    """Tiles of a matmul; the arguments are those of `config.tiles`.

    A tile of gate and up is GROUP columns of their product, which share a scale: two warpgroups have half of them each, or
    with WIDEST_ROWS half of the tokens.
    """
    if rows == WIDEST_ROWS:
        blocks = 2 if gated or out_rows % (2 * GROUP) == 0 else 1  # of GROUP rows of weights
        stage = (blocks * GROUP + rows) * GROUP + rows * 4
        staged = rows * (GROUP if gated else blocks * GROUP * 2)
        return Tiles(GROUP, (SHARED_BYTES - staged) // stage, TOKEN_WARPGROUPS, blocks)
    wide = rows >= WIDE_ROWS
    consumers = 2 if gated or (wide and out_rows % (4 * M) == 0) else 1
    depth = 2 * GROUP if not (gated or wide) and columns % (2 * GROUP) == 0 else GROUP
    # Of the down matmul twice as many rows where a stage is short.
    blocks = 2 if gated or wide or depth == GROUP else 1
    stage = (consumers * blocks * M + rows) * depth + depth // GROUP * padded_rows(rows) * 4
    staged = rows * (GROUP + M * 4) if gated else consumers * rows * M * 2
    return Tiles(depth, min((SHARED_BYTES - staged) // stage, MOST_STAGES), consumers, blocks)


def configure_fp8(T: int, E: int, k: int, H: int, inner: int) -> Config:
    """As `config.configure`; shared experts have no part in these kernels."""
    cut = configure(T, E, k, H, inner)
    up = fp8_tiles(cut.rows, H, inner, gated=True)
    down = fp8_tiles(cut.rows, inner, H, gated=False)
    return Config(cut.rows, cut.slots, cut.all_tokens, up, down, cut.grid)


# Pieces of an MLP at most: whoever adds them up holds one row of each in registers.
MOST_PIECES = 4


def configure_mlp(T: int, H: int, inner: int) -> Config:
    """Of an MLP of inner size `inner` as a few experts that every token visits, so that more blocks have work in `down`."""
    rows, grid = rows_of_all(T), blocks_of_a_kernel()
    slots = -(-T // rows)
    divisors = [n for n in range(1, MOST_PIECES + 1) if inner % (n * GROUP) == 0]
    pieces = next((n for n in divisors if n * slots * (H // GROUP) >= grid), divisors[-1])
    up = fp8_tiles(rows, H, inner // pieces, gated=True)
    down = fp8_tiles(rows, inner // pieces, H, gated=False)
    return Config(rows, slots * pieces, False, up, down, grid, pieces, slots * rows)
