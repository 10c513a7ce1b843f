"""Tokens in FP8: one small Mosaic GPU kernel (`quantise_tokens` in traces), where XLA makes three.

A warpgroup has one token, and each of its warps a group of columns at a time.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.matvec import WARPS, warp_per_row
from pallas_kernels.quant import activations
from pallas_kernels.quant.activations import GROUP, Codes, scale_and_inverse

f32, e4m3 = jnp.float32, jnp.float8_e4m3fn


@functools.partial(jax.jit, static_argnames=("interpret",))
def quantise_tokens(x: jax.Array, *, interpret: Any = False) -> Codes:
    """`activations.quantise` of x [T, H], on a GPU. Jitted, so that the layers of a model share one lowering.

    Args:
        x: bfloat16. Where H is no multiple of WARPS groups, plain XLA quantises it.
        interpret: passed to Pallas.
    """
    T, H = x.shape
    if H % (WARPS * GROUP):
        return activations.quantise(x)
    groups = H // GROUP
    layout = warp_per_row(GROUP)

    def quantise_tokens(x, codes, scale):
        t = lax.axis_index("token")
        firsts = range(0, groups, WARPS)
        # All loads come first, so that they are in flight together.
        tiles = [load(x, (t, pl.ds(first, WARPS)), layout=layout) for first in firsts]
        for first, tile in zip(firsts, tiles, strict=True):
            values = tile.astype(f32)
            scales, inverse = scale_and_inverse(jnp.abs(values).max(axis=1))
            scale[pl.ds(first, WARPS), t] = scales
            inverse = plgpu.layout_cast(lax.broadcast_in_dim(inverse, values.shape, [0]), layout)
            codes[t, pl.ds(first, WARPS)] = (values * inverse).astype(e4m3)

    codes, scale = plgpu.kernel(
        quantise_tokens,
        out_type=(jax.ShapeDtypeStruct((T, groups, GROUP), e4m3), jax.ShapeDtypeStruct((groups, T), f32)),
        grid=(T,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )(x.reshape(T, groups, GROUP))
    return Codes(codes.reshape(T, H), scale)
