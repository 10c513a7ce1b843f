"""Where a matmul of FP8 experts finds its work, weights and tokens; `fp8_matmul.py` and `fp8_wide.py` ask the same."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.moe.config import Config, Tiles
from pallas_kernels.quant.activations import GROUP

i32 = jnp.int32


@dataclass(frozen=True)
class Work:
    """Of a weight [E, parts, out_rows, columns] over a call's slots. An item of work is a slot and a tile of output columns.

    Attributes:
        gated: whether there are two parts, gate and up.
        out_rows, columns: of an expert's weight, or of a piece of a weight that is cut into pieces.
        width: output columns of a tile.
    """

    config: Config
    gated: bool
    out_rows: int
    columns: int
    width: int

    @property
    def tiles(self) -> Tiles:
        return self.config.up if self.gated else self.config.down

    @property
    def num_tiles(self) -> int:
        return self.out_rows // self.width

    @property
    def depths(self) -> int:
        """Steps of an item."""
        return self.columns // self.tiles.depth

    def items(self, num_slots: Any, block: Any) -> Any:
        """How many items a block of the kernel has."""
        grid = self.config.grid
        return lax.div(num_slots * self.num_tiles - block + (grid - 1), i32(grid))

    def item(self, block: Any, j: Any) -> tuple[Any, Any]:
        """Slot and tile of a block's j-th item."""
        place = block + j * self.config.grid
        return lax.div(place, i32(self.num_tiles)), lax.rem(place, i32(self.num_tiles))

    def stage(self, step: Any) -> Any:
        """Of the ring, where a step's operands are."""
        return lax.rem(step, i32(self.tiles.stages))

    def expert(self, table: Any, slot: Any) -> Any:
        """Whose a slot is. Pieces have the slots in turn, without a table."""
        return lax.div(slot, i32(self._slots_of_a_piece)) if self.config.pieces else table[slot]

    def origin(self, e: Any) -> tuple[Any, Any, Any]:
        """Where the weights of an expert begin: its index, row and column."""
        if not self.config.pieces:
            return e, 0, 0
        return (0, e * self.out_rows, 0) if self.gated else (0, 0, e * self.columns)

    def tokens(self, slot: Any) -> Any:
        """Which of the tokens' first axis a slot multiplies."""
        if not self.gated:
            return slot
        if self.config.pieces:
            return lax.rem(slot, i32(self._slots_of_a_piece))
        return 0 if self.config.all_tokens else slot

    def scale(self, scale: Any, e: Any, part: Any, row: Any, group: Any) -> Any:
        """That of a block of an expert's weights.

        Args:
            scale: reference to float32 [E, parts, blocks of rows, blocks of columns].
            row: any of the block. group: of GROUP columns.
        """
        e, top, left = self.origin(e)
        return scale[e, part, lax.div(top + row, i32(GROUP)), left // GROUP + group]

    @property
    def _slots_of_a_piece(self) -> int:
        return self.config.slots // self.config.pieces
