"""What the kernel of a single token's experts (`one_token.py`) needs for weights in `fp8_block`.

Codes take the place of the weights in its rings. The token is quantised as it is for the other kernels of these weights
(`quant/activations.py`), by every block for itself: its values as their codes stand for them lie in shared memory, first those
of x, then those of the product of gate and up, which the blocks write in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.matvec import WARPS, warp_per_row
from pallas_kernels.moe.one_token_config import VALUES_BYTES, values_of
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.activations import GROUP, scale_and_inverse
from pallas_kernels.quant.schemes import FP8_BLOCK
from pallas_kernels.quant.values import in_schemes

# Rows of blocks whose scales are copied with a stage, of which the first is its own: Pallas copies 128 bytes at a time.
SCALE_ROWS = 4
f32, e4m3 = jnp.float32, jnp.float8_e4m3fn


def supports(parameters: ExpertWeights, k: int) -> bool:
    """Whether all weights are in `fp8_block`, of sizes that the kernel supports with k experts of a token."""
    weights = parameters.gate_up, parameters.down, *(parameters.shared or ())
    H, inner, S = parameters.gate_up.shape[-1], parameters.gate_up.shape[2], parameters.shared_inner
    # TMA copies the scales of gate and up four at a time.
    sizes = H % (WARPS * GROUP) == 0 and inner % GROUP == 0 and S % GROUP == 0
    return in_schemes((FP8_BLOCK,), *weights) and sizes and 4 * values_of(H, S + k * inner) <= VALUES_BYTES


def write_values(source: Any, groups: int, values_s: Any, warpgroup: Any, warpgroups: int) -> None:
    """A warpgroup's part of the values of `groups` groups as their codes stand for them. Callers make them visible.

    Args:
        source: [groups, GROUP] in global memory. groups: whole sets of WARPS.
        values_s: float32, of the same shape, in shared memory.
    """
    layout = warp_per_row(GROUP)
    rounds = -(-groups // (WARPS * warpgroups))
    firsts = [(n * warpgroups + warpgroup) * WARPS for n in range(rounds)]
    last = jnp.int32(groups - WARPS)
    # All loads come first, so that they are in flight together; past the end it is the last set's again.
    tiles = [load(source, (pl.ds(lax.min(first, last), WARPS), slice(None)), layout=layout) for first in firsts]

    def write(first, tile):
        values = tile.astype(f32)
        scale, inverse = (
            plgpu.layout_cast(lax.broadcast_in_dim(number, values.shape, [0]), layout)
            for number in scale_and_inverse(jnp.abs(values).max(axis=1))
        )
        values_s[pl.ds(first, WARPS), :] = (values * inverse).astype(e4m3).astype(f32) * scale

    for first, tile in zip(firsts, tiles, strict=True):
        pl.when(first <= last)(functools.partial(write, first, tile))


def scales_ahead(read: Callable[[int], Any], pieces: int) -> Callable[[int], Any]:
    """read(piece) of the pieces in turn, each one called for while the piece before it is worked on."""
    held = {0: read(0)} if pieces else {}

    def scales(piece: int) -> Any:
        if piece + 1 < pieces:
            held[piece + 1] = read(piece + 1)
        return held.pop(piece)

    return scales
