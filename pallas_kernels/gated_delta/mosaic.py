"""Decode windows of gated delta nets on Hopper: one Mosaic GPU kernel replays, writes the state, and reads the window.

What counts is reading and writing each state once. A warpgroup holds ROWS of a head's values in registers, all keys of
each; what a token does to one value's row needs no other row. So a head has as many blocks as it has such parts, none of
them shares anything with another, and a sum over keys stays within four threads.
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
from pallas_kernels.gated_delta.reference import Tokens

ROWS, MOST_KEYS = 64, 128  # 64 registers of a thread hold a part of the state
LAYOUT = plgpu.Layout.WGMMA
OF_VALUES, OF_KEYS = LAYOUT.reduce(1), LAYOUT.reduce(0)
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0)


def unsupported_reason(states: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    V, D = states.shape[-2:]
    if V % ROWS or D % 8 or D > MOST_KEYS:
        return f"it needs values of a multiple of {ROWS} columns and keys of a multiple of 8 up to {MOST_KEYS}, not {V} and {D}"
    return hopper_unsupported_reason()


@functools.partial(jax.jit, static_argnames=("replayed", "interpret"))
def replay_and_read(
    states: jax.Array, slots: jax.Array, counts: jax.Array, tokens: Tokens, *, replayed: int, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """See api.py. Jitted, so that the layers of a model share one lowering. `interpret` is passed to Pallas."""
    q, k, v, g, beta = tokens
    D, length, K, dk = q.shape
    R, dv = v.shape[-2:]

    def gated_delta(slots, counts, q, k, v, remains, beta, states, read):
        # The references are to the arrays above; `remains` is exp(g).
        row, head = lax.axis_index("row"), lax.axis_index("head")
        values = pl.ds(lax.axis_index("part") * ROWS, ROWS)
        key_head, repeat = head // R, head % R
        slot = slots[row]
        shape = (ROWS, dk)

        def over_values(x):
            return lax.broadcast_in_dim(x, shape, [0])

        def over_keys(x):
            return lax.broadcast_in_dim(x, shape, [1])

        def token(i, state):
            key = over_keys(load(k, (row, i, key_head, slice(None)), layout=OF_KEYS))
            if remains.shape[-1] == 1:
                state = state * remains[row, i, key_head, repeat, 0]
            else:
                state = state * over_keys(load(remains, (row, i, key_head, repeat, slice(None)), layout=OF_KEYS))
            value = load(v, (row, i, key_head, repeat, values), layout=OF_VALUES)
            update = (value - (state * key).sum(axis=1)) * beta[row, i, key_head, repeat]
            return state + over_values(update) * key

        place = (slot, 0, key_head, repeat, values, slice(None))
        state = load(states, place, layout=LAYOUT)
        state = lax.fori_loop(0, counts[row], token, state)

        @pl.when(slot > 0)
        def _write():
            states[slot, 0, key_head, repeat, values, :] = state

        for i in range(replayed, length):
            state = token(i, state)
            query = over_keys(load(q, (row, i, key_head, slice(None)), layout=OF_KEYS))
            read[row, i - replayed, key_head, repeat, values] = (state * query).sum(axis=1)

    states, read = run_in_place(
        gated_delta,
        (slots, counts, q, k, v, jnp.exp(g), beta),
        (states,),
        (jax.ShapeDtypeStruct((D, length - replayed, K, R, dv), jnp.float32),),
        scratch_types={},
        grid=(D, K * R, dv // ROWS),
        grid_names=("row", "head", "part"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    return read, states
