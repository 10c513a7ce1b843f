"""The rotation of rope columns inside Mosaic GPU kernels."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import load

# Columns of cos, of sin, and of each half of what they rotate.
HALF = 32
# Rows of a tile, two in each warp; two neighbouring columns in each lane.
ROWS = 8
TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, HALF), (2, HALF), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
# A row, which every warp holds.
ROW = TILE.reduce(0)


def rotated(x: Any, place: tuple, first: Any, cos: Any, sin: Any, rows: Any) -> tuple[jax.Array, jax.Array]:
    """Both halves, float32, of 2 * HALF columns from `first` on of x[place], rotated.

    Args:
        place: of one row, or of ROWS rows.
        rows: of cos and sin for them: an index or a slice.
    """
    layout = TILE if isinstance(rows, pl.Slice) else ROW

    def read(ref: Any, *index: Any) -> jax.Array:
        return load(ref, index, layout=layout)

    a, b = (read(x, *place, pl.ds(first + start, HALF)).astype(jnp.float32) for start in (0, HALF))
    c, s = (read(ref, rows, pl.ds(0, HALF)) for ref in (cos, sin))
    return a * c - b * s, b * c + a * s
