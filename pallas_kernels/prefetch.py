"""Weights on their way to the L2 cache while a kernel leaves the memory idle.

In a decode step memory is the limit, but a few kernels of each layer only wait for each other: routing, slot tables, sums. Such
a kernel gets blocks that do nothing but ask for the first weights of the next one that reads many. They change no result.
"""

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.quant.values import Weight

# Blocks that ask, beside those that work.
BLOCKS = 32
# About half of the L2 cache of an H100 or H200; memory delivers it in 5 to 8 us.
MOST_BYTES = 24 * 2**20
# Rows and columns of one request.
ROWS, COLUMNS = 64, 256


def rows_ahead(weight: Weight | None) -> jax.Array | None:
    """A weight [..., columns] for `prefetch` as [1, rows, columns], which are read in this order; None if it cannot be."""
    return None if weight is None else _supported(weight, 1)


def halves_ahead(weight: Weight) -> jax.Array | None:
    """As `rows_ahead`, of gate and up, whose rows are read side by side: [..., 2, rows, columns] as [parts, rows, columns]."""
    return _supported(weight, 2)


def _supported(weight: Weight, parts: int) -> jax.Array | None:
    if not tuning.current().prefetches or not isinstance(weight, jax.Array):
        return None
    columns = weight.shape[-1]
    flat = weight.reshape(1, -1, columns) if parts == 1 else weight.reshape(-1, *weight.shape[-2:])
    return flat if flat.shape[1] % ROWS == columns % COLUMNS == 0 else None


def operands(ahead: jax.Array | None) -> list[jax.Array]:
    """A kernel's further inputs."""
    return [] if ahead is None else [ahead]


def prefetch(weight: Any, block: Any) -> None:
    """Asks for this block's share of the first bytes of a weight. The interpreter does nothing.

    Args:
        weight: reference [parts, rows, columns], of which the first two parts count, or the only one.
        block: of `BLOCKS`.
    """
    parts, rows, columns = weight.shape
    parts, across = min(parts, 2), columns // COLUMNS
    most = MOST_BYTES // (ROWS * COLUMNS * weight.dtype.itemsize)
    requests = min(parts * across * (rows // ROWS), most)

    @pl.loop(0, math.ceil(requests / BLOCKS))
    def _request(i: jax.Array) -> None:
        request = i * BLOCKS + block
        row, at = lax.div(request, jnp.int32(parts * across)), lax.rem(request, jnp.int32(parts * across))
        part, column = lax.div(at, jnp.int32(across)), lax.rem(at, jnp.int32(across))

        @pl.when(request < requests)
        def _() -> None:
            plgpu.async_prefetch(weight.at[part, pl.ds(row * ROWS, ROWS), pl.ds(column * COLUMNS, COLUMNS)])
