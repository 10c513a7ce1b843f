"""Matrix-vector products without tensor cores inside Mosaic GPU kernels: each warp of a warpgroup has one row.

For a single token the bytes of the weights are the limit, and the 64 rows of a wgmma would be too coarse a unit to share
them out evenly.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

WARPS = 4


def warp_per_row(columns: int) -> Any:
    """The layout of a tile [WARPS, columns] with one row per warp and columns / 32 neighbouring columns per lane.

    Its `reduce(0)` is the layout of a vector along the columns, its `reduce(1)` that of one number per row.
    """
    tiling = plgpu.Tiling(((WARPS, columns), (columns // 32,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def row_products(tile: jax.Array, vector: jax.Array, layout: Any) -> jax.Array:
    """Elementwise products, float32, of each row of a tile [WARPS, columns] with a float32 vector [columns]."""
    over = plgpu.layout_cast(lax.broadcast_in_dim(vector, tile.shape, [1]), layout)
    return tile.astype(jnp.float32) * over
