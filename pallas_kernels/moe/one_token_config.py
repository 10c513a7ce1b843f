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


def cut(length: int, rows: int, stage_bytes: int, ring_bytes: int, *, fp8: bool, unit: int = 1) -> Cut:
    """The deepest stages of `rows` rows, of `length` columns each, that fit, in multiples of `unit` loads."""
    columns = GROUP if fp8 else math.gcd(length, 256)
    of_a_load = (1 if fp8 else 2) * rows * columns
    loads, most = length // columns, max(stage_bytes // of_a_load, unit)
    parts = max(n for n in range(unit, min(loads, most) + 1, unit) if loads % n == 0)
    return Cut(columns, parts, min(ring_bytes // (of_a_load * parts), MOST_STAGES))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call: k of E experts, hidden and inner size, joint inner size S of the shared experts, blocks; or in FP8."""

    E: int
    k: int
    H: int
    inner: int
    S: int
    grid: int
    fp8: bool

    @property
    def up_cut(self) -> Cut:
        """TMA copies four scales at a time."""
        ring = FP8_UP_BYTES if self.fp8 else UP_BYTES
        return cut(self.H, 2 * ROWS, UP_STAGE, ring, fp8=self.fp8, unit=WARPS if self.fp8 else 1)

    @property
    def down_cut(self) -> Cut:
        """A stage lies within one expert."""
        ring = FP8_DOWN_BYTES if self.fp8 else DOWN_BYTES
        return cut(math.gcd(self.inner, self.S), ROWS, DOWN_STAGE, ring, fp8=self.fp8)

    @property
    def products(self) -> int:
        """Of gate and up, of all experts; in FP8 with what whole sets of groups have more."""
        count = self.S + self.k * self.inner
        return values_of(0, count) if self.fp8 else count


def values_of(H: int, products: int) -> int:
    """How many values of the token lie in shared memory at once, those of whole sets of WARPS groups."""
    return -(-max(H, products) // (WARPS * GROUP)) * WARPS * GROUP
