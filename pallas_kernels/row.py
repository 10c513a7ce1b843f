"""A row of the residual stream in the registers of a warpgroup, and its RMS norm, inside Mosaic GPU kernels."""

import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason

WARPGROUP = 128
# For kernels with one row a warpgroup: scratch for sums over its four warps. No approximate square root, so that rounding
# is as in the reference.
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048)
f32, bf16 = jnp.float32, jnp.bfloat16


def whole_row(H: int) -> Any:
    """The layout of a row of H columns, a multiple of WARPGROUP, over a warpgroup: up to 16 bytes a load of bfloat16."""
    return plgpu.Layout.WG_STRIDED((H,), vec_size=math.gcd(H // WARPGROUP, 8))


def row_unsupported_reason(H: int) -> str | None:
    """Why kernels with one row a warpgroup do not support rows of H columns, or None if they do."""
    return f"it needs a hidden size that is a multiple of {WARPGROUP}, not {H}" if H % WARPGROUP else None


def norm_unsupported_reason(x: jax.Array, weight: jax.Array) -> str | None:
    """Why kernels here cannot norm rows like those of x by such a weight, or None if they can."""
    if weight.dtype not in (bf16, f32):
        return f"it needs a norm's weight in bfloat16 or float32, not {weight.dtype}"
    return hopper_unsupported_reason(x.dtype)


def inverse_rms(row: jax.Array, eps: float) -> jax.Array:
    """1 / sqrt(mean(row^2) + eps) of a row [H] in the layout of `whole_row`."""
    row = row.astype(f32)
    return lax.rsqrt((row * row).sum() * (1 / row.shape[0]) + eps)


def normed_row(row: jax.Array, scale: jax.Array, weight: jax.Array) -> jax.Array:
    """The RMS norm of (a part of) a row whose `inverse_rms` is `scale`, in bfloat16; see `norm_linear.reference.rms_norm`."""
    normed = row.astype(f32) * scale
    if weight.dtype == f32:
        return (weight * normed).astype(bf16)
    # A product of two bfloat16 is exact in float32, so it is rounded once, as in the reference.
    return (weight.astype(f32) * normed.astype(bf16).astype(f32)).astype(bf16)
