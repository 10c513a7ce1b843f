"""Absorbed paged MLA for NVIDIA GPUs since Ampere, in Triton: where Mosaic GPU cannot run, and as a check where it can.

It follows the schedule of the Mosaic kernel: a program attends with up to 64 query rows (tokens of the window times
heads) to a run of pages, and a second kernel merges the requests that are split.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import triton_call
from pallas_kernels.backend import ampere_unsupported_reason, compute_capability
from pallas_kernels.latents import NO_FP8, Fp8Latents, Latents
from pallas_kernels.mla_decode.mosaic import VALUE_DIM, layout_unsupported_reason
from pallas_kernels.split_kv import PAGE, make_schedule
from pallas_kernels.triton_call import Tile, tile_for

f32 = jnp.float32

# By the least compute capability, fewer rows first. What fits in shared memory without many spilled registers: 10.0
# would keep sums of 64 rows in tensor memory, where they do not fit beside the scores.
TILES = {
    80: (Tile(16, 32, 4, 2, 2), Tile(32, 32, 8, 3, 1), Tile(64, 64, 8, 2, 1)),
    86: (Tile(16, 32, 4, 3, 1), Tile(32, 32, 8, 2, 1)),
    90: (Tile(16, 32, 4, 3, 2), Tile(32, 64, 8, 3, 1), Tile(64, 64, 8, 2, 1)),
    100: (Tile(16, 32, 4, 3, 2), Tile(32, 64, 8, 3, 1)),
    120: (Tile(16, 32, 4, 3, 1), Tile(32, 32, 8, 2, 1)),
}


def unsupported_reason(q: jax.Array | jax.ShapeDtypeStruct, latent: Latents, value_dim: int) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    if isinstance(latent, Fp8Latents):
        return NO_FP8
    return (
        layout_unsupported_reason(q, latent, value_dim)
        or ampere_unsupported_reason(q.dtype, latent.dtype)
        or triton_call.unsupported_reason()
    )


@functools.partial(jax.jit, static_argnames=("scale", "sms", "capability"))
def mla_decode(
    q: jax.Array,
    latent: jax.Array,
    page_tables: jax.Array,
    bounds: jax.Array,
    *,
    scale: float,
    sms: int | None = None,
    capability: int | None = None,
) -> jax.Array:
    """See api.py. Jitted, so that the layers of a model share one lowering.

    Args:
        sms: multiprocessors (default: those of the device).
        capability: compute capability to compile for, 90 for 9.0 (default: the device's).
    """
    from pallas_kernels.mla_decode import triton_kernels as kernels
    from pallas_kernels.triton_split_kv import merge

    B, n, H, _ = q.shape
    live = n * H
    capability = capability or compute_capability(jax.devices()[0])
    assert capability
    tile = tile_for(TILES, live, capability)
    blocks = -(-live // tile.rows)
    sms = sms or jax.devices()[0].core_count
    items, splits = make_schedule(bounds, page_tables.shape[1], blocks, sms * tile.resident)
    num_items = items.shape[0]
    call = functools.partial(triton_call.call, compute_capability=capability)

    def of(shape: tuple[int, ...], dtype: Any = q.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    out, partial, lse = call(
        kernels.mla_decode,
        (q, latent, page_tables, items, bounds),
        (of((B, live, VALUE_DIM)), of((num_items, live, VALUE_DIM)), of((num_items, live), f32)),
        grid=(blocks, num_items),  # blocks of an item run together and share its pages in the L2 cache
        warps=tile.warps,
        stages=tile.stages,
        constants={
            "SCALE": scale / math.log(2),
            "LIVE": live,
            "HEADS": H,
            "WINDOW": n,
            "WINDOW_POWER": 1 << (n - 1).bit_length(),
            "MAX_PAGES": page_tables.shape[1],
            "ROWS": tile.rows,
            "PARTS": PAGE // tile.keys,
            "KEYS": tile.keys,
        },
    )
    if splits.shape[0]:
        out = merge(call, out, partial, lse, splits)
    return out.reshape(B, n, H, VALUE_DIM)
