"""How the experts' matmuls store a tile: whole, or where a slot is short only its rows that have a token.

With 32 tokens and 256 experts a slot of 8 rows has 1.6 tokens. Rows without one are never read, but to write them takes 10 of
350 us of a down projection of MiniMax-M2 on an H200.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.compat import transpose_ref
from pallas_kernels.moe.config import Config
from pallas_kernels.moe.slots import SlotTables

# Up to this many rows of a slot each used row is stored by itself.
SHORT_SLOT_ROWS = 16


def is_short(config: Config) -> bool:
    """Whether of the slots only rows with a token are stored."""
    return config.rows <= SHORT_SLOT_ROWS and not config.all_tokens


def short_slots(tables: SlotTables, config: Config) -> list[jax.Array]:
    """`SlotTables.used` for a kernel that needs it."""
    return [tables.used] if is_short(config) else []


def staging(consumers: int, rows: int, columns: int, dtype: Any, *, short: bool) -> Any:
    """Scratch of `store_tile`, [consumers, rows, columns]; not swizzled where rows are stored one by one."""
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((consumers, rows, columns), dtype, transforms=() if short else swizzled)


def store_tile(tile: jax.Array, staged: Any, out: Any, used: jax.Array | None) -> None:
    """Stores a tile of one warpgroup; returns when the one before it, but perhaps not this one, is in global memory.

    Args:
        tile: [columns, rows], transposed as wgmma leaves it.
        staged: ref [rows, columns], this warpgroup's part of `staging`.
        out: ref [rows, columns] of global memory.
        used: int32 [], how many of the rows are stored; None for all. With it `staged` is `short`.
    """
    plgpu.wait_smem_to_gmem(0)  # until the store before this one has read the staging buffer
    transpose_ref(staged, (1, 0))[...] = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    if used is None:
        plgpu.copy_smem_to_gmem(staged, out)
        return

    @pl.loop(0, used)
    def _row(row: jax.Array) -> None:
        plgpu.copy_smem_to_gmem(staged.at[row], out.at[row], commit_group=False)

    plgpu.commit_smem_to_gmem_group()
