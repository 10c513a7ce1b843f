"""Writes a token's normed latent and its rotated key to its page: one Mosaic GPU kernel for Hopper.

XLA makes three kernels of it, whose cost is that of three launches. A warpgroup has one token and a thread four of the
latent's columns; the sum of their squares, and the largest of a group where latents are in FP8, are all that threads have to
share.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load, run_in_place
from pallas_kernels.latents import GROUP, Fp8Latents, Latents, from_arrays, inverse, magnitude_bits, scale_bits
from pallas_kernels.rotary import HALF, rotated

LATENT, ROPE = 512, 2 * HALF
COLUMNS = plgpu.Layout.WG_STRIDED((LATENT,), vec_size=4)
# Scratch for the sum of squares over four warps. No approximate square root, so that rounding is as in the reference.
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048)
f32, bf16 = jnp.float32, jnp.bfloat16


def unsupported_reason(latent: Latents, kv_a: jax.Array | jax.ShapeDtypeStruct, norm_weight: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    L = norm_weight.shape[0]
    if (L, kv_a.shape[1]) != (LATENT, LATENT + ROPE):
        return f"it supports latents of {LATENT} + {ROPE}, not {L} + {kv_a.shape[1] - L}"
    plain = latent.rope if isinstance(latent, Fp8Latents) else latent
    return hopper_unsupported_reason(plain.dtype, kv_a.dtype, norm_weight.dtype)


def write_token(
    token: Any,
    kv_a: Any,
    norm_weight: Any,
    cos: Any,
    sin: Any,
    pages: Any,
    offsets: Any,
    *latent: Any,
    eps: float,
) -> None:
    """Writes one token, by one warpgroup of a kernel with PARAMS.

    The references are to the arrays of `api.write_latent`, `latent` to one array or to those of `Fp8Latents`.
    """
    page, offset = pages[token], offsets[token]
    first = kv_a.shape[1] - LATENT - ROPE  # earlier columns are not for the cache
    c = load(kv_a, (token, pl.ds(first, LATENT)), layout=COLUMNS).astype(f32)
    a, b = rotated(kv_a, (token,), first + LATENT, cos, sin, token)
    weight = load(norm_weight, (pl.ds(0, LATENT),), layout=COLUMNS).astype(f32)
    normed = (c * lax.rsqrt((c * c).sum() * (1 / LATENT) + eps)).astype(bf16)
    # A product of two bfloat16 is exact in float32, so it is rounded once, as in the reference.
    latent_row = (weight * normed.astype(f32)).astype(bf16)
    # Several padding tokens may write the same row of page 0, which is never read.
    if len(latent) == 1:
        (keys,), rope = latent, LATENT
        keys[page, offset, pl.ds(0, LATENT)] = latent_row
    else:
        codes, scale, keys = latent
        rope = 0
        _write_quantised(latent_row.astype(f32), codes, scale, page, offset)
    keys[page, offset, pl.ds(rope, HALF)] = a.astype(bf16)
    keys[page, offset, pl.ds(rope + HALF, HALF)] = b.astype(bf16)


def _write_quantised(row: jax.Array, codes: Any, scale: Any, page: Any, offset: Any) -> None:
    """Writes the codes and scales of a latent, float32 [LATENT], as `latents.quantise` has them."""
    column = plgpu.broadcasted_iota(jnp.int32, (LATENT,), 0, layout=COLUMNS)
    magnitudes = magnitude_bits(row)
    quotient = row
    for group in range(LATENT // GROUP):
        mine = (column >= group * GROUP) & (column < (group + 1) * GROUP)
        bits = scale_bits(jnp.where(mine, magnitudes, 0).max())
        scale[page, offset, group] = lax.bitcast_convert_type(bits, f32)
        quotient = jnp.where(mine, row * inverse(bits), quotient)
    codes[page, offset, pl.ds(0, LATENT)] = quotient.astype(codes.dtype)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def write_latent(
    latent: Latents,
    kv_a: jax.Array,
    norm_weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    eps: float,
    interpret: Any = False,
) -> Latents:
    """See api.py. Jitted, so that the layers of a model share one lowering. `interpret` is passed to Pallas."""

    def kv_write(*refs):
        write_token(lax.axis_index("token"), *refs, eps=eps)

    written = run_in_place(
        kv_write,
        (kv_a, norm_weight, cos, sin, pages, offsets),
        tuple(jax.tree.leaves(latent)),
        scratch_types={},
        grid=(kv_a.shape[0],),
        grid_names=("token",),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    return from_arrays(written)
