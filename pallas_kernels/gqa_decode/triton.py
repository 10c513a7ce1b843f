"""Paged grouped-query attention over decode windows for NVIDIA GPUs since Ampere, in Triton.

It follows the schedule of the Mosaic kernel: a program attends with up to 64 query rows of one key head to a run of
pages, and a second kernel merges the requests that are split.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import triton_call
from pallas_kernels.backend import ampere_unsupported_reason, compute_capability
from pallas_kernels.gqa_decode.mosaic import layout_unsupported_reason
from pallas_kernels.split_kv import PAGE, make_schedule
from pallas_kernels.triton_call import Tile, tile_for

f32 = jnp.float32

# Tiles of 256 columns do not fit in the shared memory of most GPUs.
HEAD_DIMS = (64, 128)

# By the least compute capability, fewer rows first: what fits in shared memory at 128 columns.
TILES = {
    80: (Tile(16, 64, 4, 3, 2), Tile(32, 64, 4, 3, 2), Tile(64, 64, 4, 3, 1)),
    86: (Tile(16, 32, 4, 3, 2), Tile(32, 32, 4, 3, 2), Tile(64, 32, 4, 3, 1)),
    90: (Tile(16, 64, 4, 3, 2), Tile(32, 64, 4, 3, 2), Tile(64, 64, 4, 3, 2)),
    100: (Tile(16, 64, 4, 3, 2), Tile(32, 64, 4, 3, 2), Tile(64, 64, 4, 3, 1)),
    120: (Tile(16, 32, 4, 3, 2), Tile(32, 32, 4, 3, 2), Tile(64, 32, 4, 3, 1)),
}


def unsupported_reason(q: jax.Array, k: jax.Array, v: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    return (
        layout_unsupported_reason(q, k, HEAD_DIMS)
        or ampere_unsupported_reason(q.dtype, k.dtype, v.dtype)
        or triton_call.unsupported_reason()
    )


@functools.partial(jax.jit, static_argnames=("scale", "window", "sms", "capability"))
def gqa_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_tables: jax.Array,
    bounds: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    sms: int | None = None,
    capability: int | None = None,
) -> jax.Array:
    """See api.py. Jitted, so that the layers of a model share one lowering.

    Args:
        page_tables, bounds: with a window those that `sliding_window.window_pages` has cut.
        sms: multiprocessors (default: those of the device).
        capability: compute capability to compile for, 90 for 9.0 (default: the device's).
    """
    from pallas_kernels.gqa_decode import triton_kernels as kernels
    from pallas_kernels.triton_split_kv import merge

    B, n, K, G, D = q.shape
    has_sinks = sinks is not None
    capability = capability or compute_capability(jax.devices()[0])
    assert capability
    tile = tile_for(TILES, n * G, capability)
    row_blocks = -(-n * G // tile.rows)
    blocks = K * row_blocks
    sms = sms or jax.devices()[0].core_count
    items, splits = make_schedule(bounds, page_tables.shape[1], blocks, sms * tile.resident)
    num_items, rows = items.shape[0], n * K * G
    call = functools.partial(triton_call.call, compute_capability=capability)

    def of(shape: tuple[int, ...], dtype: Any = q.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    # As exponents of 2, like the scores. Without sinks nothing reads them.
    sinks = jnp.zeros((K, G), f32) if sinks is None else sinks.astype(f32) / math.log(2)
    out, partial, lse = call(
        kernels.gqa_decode,
        (q, k, v, page_tables, items, bounds, sinks),
        (of((B, rows, D)), of((num_items, rows, D)), of((num_items, rows), f32)),
        grid=(blocks, num_items),  # blocks of an item run together
        warps=tile.warps,
        stages=tile.stages,
        constants={
            "SCALE": scale / math.log(2),
            "SLIDING": window or 0,
            "SINKS": has_sinks,
            "WINDOW": n,
            "WINDOW_POWER": 1 << (n - 1).bit_length(),
            "HEADS": K,
            "GROUP": G,
            "DIM": D,
            "MAX_PAGES": page_tables.shape[1],
            "ROWS": tile.rows,
            "ROW_BLOCKS": row_blocks,
            "PARTS": PAGE // tile.keys,
            "KEYS": tile.keys,
        },
    )
    if splits.shape[0]:
        out = merge(call, out, partial, lse, splits)
    return out.reshape(q.shape)
