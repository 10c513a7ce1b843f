"""Gathers the tokens of the slots that exist: one Mosaic GPU kernel (`moe_gather` in traces).

XLA's gather would fill every slot that the shapes allow, at 512 tokens nearly twice as many as exist.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load

WARPGROUP = 128
# Rows of a block, whose loads are in flight together. It divides the rows of every slot.
ROWS = 8


def supports(H: int) -> bool:
    """Whether the kernel supports rows of H columns."""
    return H % WARPGROUP == 0


@functools.partial(jax.jit, static_argnames=("rows", "interpret"))
def gather_slots(
    x: jax.Array, token: jax.Array, num_slots: jax.Array, *, rows: int, interpret: Any = False
) -> jax.Array:
    """The rows of x that the slots' rows hold.

    Args:
        x: [T, H].
        token: int32 [slots * rows]; rows without a token may hold any number.
        num_slots: int32 [1].
        rows: token rows of a slot, a multiple of ROWS.

    Returns:
        [slots, rows, H] in x's dtype; slots past `num_slots` are uninitialised.
    """
    T, H = x.shape
    slots = token.size // rows
    layout = plgpu.Layout.WG_STRIDED((H,), vec_size=math.gcd(H // WARPGROUP, 8))

    def moe_gather(x, token, num_slots, out):
        slot, part = lax.axis_index("slot"), lax.axis_index("part")

        @pl.when(slot < num_slots[0])
        def _():
            at = [part * ROWS + i for i in range(ROWS)]
            # All loads come before the first store: the compiler moves no load across a store.
            tokens = [lax.max(lax.min(token[slot * rows + row], jnp.int32(T - 1)), jnp.int32(0)) for row in at]
            values = [load(x, (t, pl.ds(0, H)), layout=layout) for t in tokens]
            for row, value in zip(at, values, strict=True):
                out[slot, row] = value

    return plgpu.kernel(
        moe_gather,
        out_type=jax.ShapeDtypeStruct((slots, rows, H), x.dtype),
        grid=(slots, rows // ROWS),
        grid_names=("slot", "part"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(x, token, num_slots)
