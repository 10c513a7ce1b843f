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
        beside: pieces of shared experts, which come after the slots that exist and have weights of their own.
        out_rows, columns: of an expert's weight, or of a piece of a weight that is cut into pieces.
        width: output columns of a tile.
    """

    config: Config
    gated: bool
    out_rows: int
    columns: int
    width: int
    beside: int = 0

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
        return lax.div((num_slots + self.beside) * self.num_tiles - block + (grid - 1), i32(grid))

    def item(self, block: Any, j: Any) -> tuple[Any, Any]:
        """Slot and tile of a block's j-th item."""
        place = block + j * self.config.grid
        return lax.div(place, i32(self.num_tiles)), lax.rem(place, i32(self.num_tiles))

    def stage(self, step: Any) -> Any:
        """Of the ring, where a step's operands are."""
        return lax.rem(step, i32(self.tiles.stages))

    def place(self, num_slots: Any, slot: Any) -> Any:
        """Which of the results' first axis a slot has: pieces beside the slots have the last ones."""
        if not self.beside:
            return slot
        return jnp.where(slot < num_slots, slot, slot - num_slots + self.config.slots)

    def expert(self, table: Any, num_slots: Any, slot: Any) -> Any:
        """Whose a slot is, or which piece. Pieces have the slots in turn, without a table."""
        if self.config.pieces:
            return lax.div(slot, i32(self._slots_of_a_piece))
        if not self.beside:
            return table[slot]
        return jnp.where(slot < num_slots, table[lax.min(slot, i32(self.config.slots - 1))], slot - num_slots)

    def origin(self, e: Any, *, piece: bool = False) -> tuple[Any, Any, Any]:
        """Where the weights of an expert, or of a piece, begin: index, row and column."""
        if not (piece or self.config.pieces):
            return e, 0, 0
        return (0, e * self.out_rows, 0) if self.gated else (0, 0, e * self.columns)

    def tokens(self, place: Any) -> Any:
        """Which of the tokens' first axis a slot multiplies that has this place in the results."""
        if not self.gated:
            return place
        if self.config.pieces:
            return lax.rem(place, i32(self._slots_of_a_piece))
        return 0 if self.config.all_tokens else place

    def scale(self, scale: Any, e: Any, part: Any, row: Any, group: Any, *, piece: bool = False) -> Any:
        """That of a block of an expert's weights, or of a piece's.

        Args:
            scale: reference to float32 [E, parts, blocks of rows, blocks of columns].
            row: any of the block. group: of GROUP columns.
        """
        e, top, left = self.origin(e, piece=piece)
        return scale[e, part, lax.div(top + row, i32(GROUP)), lax.div(left, i32(GROUP)) + group]

    @property
    def _slots_of_a_piece(self) -> int:
        return self.config.slots // self.config.pieces
