"""The end of a mixture block for several tokens, and the norm that follows it, in one Mosaic GPU kernel.

A warpgroup has one token (`moe_combine` in traces): it sums the token's weighted rows and what the shared experts add, adds
the residual stream, and norms the result for the next layer. XLA makes two kernels of it.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load
from pallas_kernels.moe.selection import live_flags
from pallas_kernels.row import PARAMS, bf16, f32, inverse_rms, normed_row, row_unsupported_reason, whole_row


def unsupported_reason(residual: jax.Array, norm_weight: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    return row_unsupported_reason(residual.shape[1]) or hopper_unsupported_reason(residual.dtype, norm_weight.dtype)


@functools.partial(jax.jit, static_argnames=("k", "eps", "beside", "interpret"))
def combine_and_norm(
    y: jax.Array,
    addends: tuple[jax.Array, ...],
    weights: jax.Array,
    place: jax.Array,
    live: jax.Array,
    residual: jax.Array,
    norm_weight: jax.Array,
    *,
    k: int,
    eps: float,
    beside: int = 0,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """residual + the weighted sum of each live token's rows and of the addends, and the norm of that: [T, H] each.

    The sum over experts is rounded before the residual is added, as in the reference.

    Args:
        y: [slots, rows, H]; with `beside` the last so many slots have a row for each token, which are addends too.
        addends: each [parts, >= T, H], all of whose parts are added.
        weights: float32 [>= T, >= k]. place: int32 [>= T, >= k], rows among all slots' rows.
        live: bool [T]. residual: [T, H]. norm_weight: [H].
        k: experts of a token.
        eps: of the norm.
        interpret: passed to Pallas.
    """
    T, H = residual.shape
    slots, rows_of_slot, _ = y.shape
    whole = whole_row(H)

    def moe_combine(y, weights, place, live, residual, norm_weight, *refs):
        *addends, out, normed = refs
        t, columns = lax.axis_index("token"), pl.ds(0, H)
        alive = live[t]
        places = [place[t, j] for j in range(k)]
        shares = [weights[t, j] for j in range(k)]
        kept = load(residual, (t, columns), layout=whole)
        gain = load(norm_weight, (columns,), layout=whole)

        def finish(row):
            out[t, :] = row
            normed[t, :] = normed_row(row, inverse_rms(row, eps), gain)

        # A branch and not weights of 0: the place of a token that is not live is another's row or was never written.
        @pl.when(alive == 1)
        def _sum():
            # All loads come first, so that they are in flight together.
            rows = [load(y, (at, columns), layout=whole) for at in places]
            every = [(slots - beside + i) * rows_of_slot + t for i in range(beside)]
            added = [load(y, (at, columns), layout=whole) for at in every]
            added += [load(ref, (i, t, columns), layout=whole) for ref in addends for i in range(ref.shape[0])]
            total: Any = None
            for row, share in zip(rows, shares, strict=True):
                part = row.astype(f32) * share
                total = part if total is None else total + part
            for part in added:
                total = total + part.astype(f32)
            finish(kept + total.astype(bf16))

        @pl.when(alive != 1)
        def _keep():
            finish(kept)

    return plgpu.kernel(
        moe_combine,
        out_type=(jax.ShapeDtypeStruct((T, H), residual.dtype),) * 2,
        grid=(T,),
        grid_names=("token",),
        compiler_params=PARAMS,
        interpret=interpret,
    )(y.reshape(-1, H), weights, place.astype(jnp.int32), live_flags(live), residual, norm_weight, *addends)
