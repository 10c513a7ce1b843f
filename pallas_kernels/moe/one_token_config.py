"""How the work of a single token's experts is cut (`one_token.py`)."""

import math
from dataclasses import dataclass

from pallas_kernels.matvec import WARPS
from pallas_kernels.quant.activations import GROUP

# Warpgroups that multiply; each has its own rows of a stage.
CONSUMERS = 2
ROWS = CONSUMERS * WARPS
# Shared memory of the two rings, of 227 KiB, and of a stage at most.
UP_BYTES, UP_STAGE = 96 * 1024, 16 * 1024
DOWN_BYTES, DOWN_STAGE = 112 * 1024, 24 * 1024
MOST_STAGES = 16
# In FP8, beside the token's values as their codes stand for them.
FP8_UP_BYTES, FP8_DOWN_BYTES, VALUES_BYTES = 64 * 1024, 80 * 1024, 76 * 1024


@dataclass(frozen=True)
class Cut:
    """How rows of weights are cut.

    Attributes:
        columns: of one load, 16 bytes a lane or less.
        parts: loads of a stage.
        stages: of the ring.
    """

    columns: int
    parts: int
    stages: int

    @property
    def depth(self) -> int:
        """Columns of a stage."""
        return self.parts * self.columns


def cut(columns: int, load_bytes: int, length: int, stage_bytes: int, ring_bytes: int, unit: int = 1) -> Cut:
    """The deepest stages, of a multiple of `unit` loads of so many columns and bytes, that divide `length` columns and fit."""
    loads, most = length // columns, max(stage_bytes // load_bytes, unit)
    parts = max(n for n in range(unit, min(loads, most) + 1, unit) if loads % n == 0)
    return Cut(columns, parts, min(ring_bytes // (load_bytes * parts), MOST_STAGES))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call: k of E experts, hidden and inner size, joint inner size S of the shared experts, blocks of the grid.

    Attributes:
        fp8: whether the weights are codes of FP8.
    """

    E: int
    k: int
    H: int
    inner: int
    S: int
    grid: int
    fp8: bool

    @property
    def up_cut(self) -> Cut:
        if self.fp8:  # TMA copies four scales at a time
            return cut(GROUP, 2 * ROWS * GROUP, self.H, UP_STAGE, FP8_UP_BYTES, unit=4)
        columns = math.gcd(self.H, 256)
        return cut(columns, 2 * 2 * ROWS * columns, self.H, UP_STAGE, UP_BYTES)

    @property
    def down_cut(self) -> Cut:
        """A stage lies within one expert."""
        length = math.gcd(self.inner, self.S)
        if self.fp8:
            return cut(GROUP, ROWS * GROUP, length, DOWN_STAGE, FP8_DOWN_BYTES)
        columns = math.gcd(length, 256)
        return cut(columns, 2 * ROWS * columns, length, DOWN_STAGE, DOWN_BYTES)

    @property
    def products(self) -> int:
        """Of gate and up, of all experts; in FP8 with what whole sets of groups have more."""
        count = self.S + self.k * self.inner
        return values_of(0, count) if self.fp8 else count


def values_of(H: int, products: int) -> int:
    """How many values of the token lie in shared memory at once, those of whole sets of WARPS groups."""
    return -(-max(H, products) // (WARPS * GROUP)) * WARPS * GROUP
