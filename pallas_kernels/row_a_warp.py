"""Products of few rows of weights with a vector, without tensor cores: each warp of a warpgroup has a row of its own.

For one token the bytes of the weights are the limit, and a wgmma's 64 rows are a coarse unit to share them out in.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

WARPS = 4


def row_a_warp(columns: int) -> Any:
    """The layout of a tile [WARPS, columns]: a row a warp, columns / 32 neighbours a lane.

    Its `reduce(0)` is that of a vector along the columns, its `reduce(1)` that of one number a row.
    """
    tiling = plgpu.Tiling(((WARPS, columns), (columns // 32,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def times(tile: jax.Array, vector: jax.Array, layout: Any) -> jax.Array:
    """float32: each row of a tile [WARPS, columns] times a float32 vector [columns], by element."""
    over = plgpu.layout_cast(lax.broadcast_in_dim(vector, tile.shape, [1]), layout)
    return tile.astype(jnp.float32) * over
