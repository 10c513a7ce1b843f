"""Sum and RMS norm of several tokens, before their projections: one small Mosaic GPU kernel (`add_norm` in traces).

A warpgroup has one token. XLA makes up to three kernels of it: the sum, the norm, and the norm in float32 for a router.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.norm_linear.reference import factor_of
from pallas_kernels.row import (
    PARAMS,
    bf16,
    f32,
    inverse_rms,
    norm_unsupported_reason,
    normed_row,
    row_unsupported_reason,
    whole_row,
)


def unsupported_reason(x: jax.Array, norm_weight: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    return row_unsupported_reason(x.shape[1]) or norm_unsupported_reason(x, norm_weight)


@functools.partial(jax.jit, static_argnames=("eps", "centred", "interpret"))
def add_norm(
    x: jax.Array,
    delta: jax.Array,
    norm_weight: jax.Array,
    *,
    eps: float,
    centred: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """x + delta and its norm, [T, H] each. Jitted, so that the layers of a model share one lowering.

    Args:
        x: [T, H]. norm_weight: [H].
        delta: [T, H], or [parts, T, H], whose sum is rounded before it is added.
        centred: see `api.norm_linear`.
        interpret: passed to Pallas.
    """
    T, H = x.shape
    whole = whole_row(H)

    def add_norm(x, delta, norm_weight, summed, normed):
        t = lax.axis_index("token")
        weight = factor_of(load(norm_weight, (pl.ds(0, H),), layout=whole), centred=centred)
        row = load(x, (t, pl.ds(0, H)), layout=whole)
        # All loads come first, so that they are in flight together.
        first, *others = (
            load(delta, (*part, t, pl.ds(0, H)), layout=whole)
            for part in (((i,) for i in range(delta.shape[0])) if len(delta.shape) == 3 else ((),))
        )
        if others:
            total = first.astype(f32)
            for other in others:
                total = total + other.astype(f32)
            first = total.astype(bf16)
        row = row + first
        summed[t, :] = row
        normed[t, :] = normed_row(row, inverse_rms(row, eps), weight)

    return plgpu.kernel(
        add_norm,
        out_type=(jax.ShapeDtypeStruct((T, H), x.dtype),) * 2,
        grid=(T,),
        grid_names=("token",),
        compiler_params=PARAMS,
        interpret=interpret,
    )(x, delta, norm_weight)
