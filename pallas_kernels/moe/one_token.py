"""Routed and shared experts of one token on Hopper: two Mosaic GPU kernels, without tensor cores.

The kernels of `mosaic.py` share out weights by tiles of 64 rows: one token of a Moonlight layer has 176 of gate and up, of
which 44 of 132 multiprocessors get two and the others one. Here a block takes 8 rows of gate and of up, or 4 of what
comes down, and there are several to a multiprocessor: while one multiplies, TMA fills another's shared memory. A block of
the second kernel has its rows of all the token's experts, so that their weighted sum, the shared experts and the residual
need no further launch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.moe.route import live_flags
from pallas_kernels.row_a_warp import WARPS, row_a_warp, times
from pallas_kernels.tuning import current

# Rows of gate, and as many of up, to a block; rows of what comes down.
UP_ROWS, DOWN_ROWS = 8, WARPS
# Shared memory that a block may take.
MOST_BYTES = 200 * 1024
f32, bf16 = jnp.float32, jnp.bfloat16
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048)


def takes(x: jax.Array, gate_up: jax.Array, k: int, shared: tuple[jax.Array, jax.Array] | None) -> bool:
    """Whether these kernels are the ones for a call that those of `mosaic.py` can take."""
    T, H = x.shape
    inner, S = gate_up.shape[2], _shared_inner(shared)
    fits = max(2 * UP_ROWS * H, DOWN_ROWS * (k * inner + S)) * x.dtype.itemsize <= MOST_BYTES
    return current().one_token_experts and T == 1 and inner % 64 == 0 and S % 64 == 0 and H % 64 == 0 and fits


def _shared_inner(shared: tuple[jax.Array, jax.Array] | None) -> int:
    return 0 if shared is None else shared[1].shape[1]


def _columns(length: int) -> int:
    """Of a load by all lanes of a warp: 16 bytes each where the length allows it, else 8 or 4."""
    return math.gcd(length, 256)


@functools.partial(jax.jit, static_argnames=("k", "interpret"))
def experts(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    shared: tuple[jax.Array, jax.Array] | None = None,
    residual: jax.Array | None = None,
    *,
    k: int,
    interpret: Any = False,
) -> jax.Array:
    """As `api.experts` for x [1, H], in bfloat16, where `takes`. Weights of a dead token are not read.

    Args:
        weights, ids: [>= 1, >= k], of which the first k of the first row count.

    Jitted, so that the layers of a model share one lowering.
    """
    E, _, inner, H = gate_up.shape
    S = _shared_inner(shared)
    outer, flat = _columns(H), math.gcd(_columns(inner), _columns(S) if S else 256)
    up_weights, down_weights = [gate_up.reshape(E, 2 * inner, H)], [down.reshape(E, H, -1, flat)]
    if shared is not None:
        up_weights.append(shared[0].reshape(2 * S, H))
        down_weights.append(shared[1].reshape(H, -1, flat))
    flags = live_flags(live)
    h = _up(E, k, H, inner, S, outer, interpret)(ids, flags, x, *up_weights)
    added = [] if residual is None else [residual]
    return _down(E, k, H, inner, S, flat, residual is not None, interpret)(
        ids, flags, weights, h, *added, *down_weights
    )


def _expert(ids: Any, j: Any, E: int) -> Any:
    """Of the token's j-th choice; a number that is none would be read past the weights."""
    return lax.max(lax.min(ids[0, j], jnp.int32(E - 1)), jnp.int32(0))


@functools.cache
def _up(E: int, k: int, H: int, inner: int, S: int, columns: int, interpret: Any) -> Any:
    """kernel(ids, live flags, x [1, H], gate_up [E, 2 * inner, H], shared [2 * S, H] if S) -> h [k * inner + S].

    h is silu(gate x) * (up x) of the token's experts in the order of choice, then of the shared ones.
    """
    parts, R = H // columns, UP_ROWS
    layout = row_a_warp(columns)
    routed = k * inner // R

    def body(ids, live, x, *refs, rows_s, arrived):
        *weights, h = refs
        block = lax.axis_index("block")

        def fetch(rows: Callable[[int, Any], Any]) -> None:
            """rows(half, columns): this block's of gate, 0, or of up, 1."""
            for part in range(parts):
                for half in range(2):
                    source = rows(half, pl.ds(part * columns, columns))
                    plgpu.copy_gmem_to_smem(source, rows_s.at[part, half], arrived.at[part])

        @pl.when(live[0] == 1)
        def _():
            @pl.when(block < routed)
            def _of_a_choice():
                j, row = lax.div(block, jnp.int32(inner // R)), lax.rem(block, jnp.int32(inner // R)) * R
                e = _expert(ids, j, E)
                fetch(lambda half, at: weights[0].at[e, pl.ds(half * inner + row, R), at])

            if S:

                @pl.when(block >= routed)
                def _of_shared():
                    row = (block - routed) * R
                    fetch(lambda half, at: weights[1].at[pl.ds(half * S + row, R), at])

            totals: dict[tuple[int, int], jax.Array] = {}
            for part in range(parts):
                vector = load(x, (0, pl.ds(part * columns, columns)), layout=layout.reduce(0)).astype(f32)
                plgpu.barrier_wait(arrived.at[part])
                for half in range(2):
                    for g in range(0, R, WARPS):
                        tile = load(rows_s, (part, half, pl.ds(g, WARPS), slice(None)), layout=layout)
                        product = times(tile, vector, layout)
                        totals[half, g] = totals[half, g] + product if part else product
            for g in range(0, R, WARPS):
                gate, up = totals[0, g].sum(axis=1), totals[1, g].sum(axis=1)
                h[pl.ds(block * R + g, WARPS)] = (gate * (1.0 / (1.0 + jnp.exp(-gate))) * up).astype(bf16)

    body.__name__ = "moe_up_one"
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((k * inner + S,), bf16),
        scratch_types={
            "rows_s": plgpu.SMEM((parts, 2, R, columns), bf16),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=parts),
        },
        grid=(routed + S // R,),
        grid_names=("block",),
        compiler_params=PARAMS,
        interpret=interpret,
    )


@functools.cache
def _down(E: int, k: int, H: int, inner: int, S: int, columns: int, adds: bool, interpret: Any) -> Any:
    """kernel(ids, live flags, weights, h, residual [1, H] if adds, down [E, H, parts, columns], shared [H, parts, columns]
    if S) -> [1, H]: the residual, plus what comes down from the token's experts, by weight, and from the shared ones.
    """
    R, parts, shared_parts = DOWN_ROWS, inner // columns, S // columns
    layout = row_a_warp(columns)

    def body(ids, live, weights, h, *refs, rows_s, arrived, shared_s=None, shared_arrived=None):
        residual = refs[0] if adds else None
        w, out = refs[int(adds) : -1], refs[-1]
        mine = pl.ds(lax.axis_index("block") * R, R)

        def write(total):
            """The experts' sum is rounded before the residual is added, as by the reference."""
            if residual is not None:
                kept = load(residual, (0, mine), layout=layout.reduce(1)).astype(f32)
                total = kept if total is None else kept + total.astype(bf16).astype(f32)
            elif total is None:
                total = plgpu.layout_cast(jnp.zeros((R,), f32), layout.reduce(1))
            out[0, mine] = total.astype(bf16)

        @pl.when(live[0] != 1)
        def _():
            write(None)

        @pl.when(live[0] == 1)
        def _():
            if S:
                plgpu.copy_gmem_to_smem(w[1].at[mine], shared_s, shared_arrived)
            # All together before the first is needed: one wait for memory, not k.
            chosen = [(_expert(ids, j, E), weights[0, j]) for j in range(k)]
            for j, (e, _) in enumerate(chosen):
                plgpu.copy_gmem_to_smem(w[0].at[e, mine], rows_s.at[j], arrived.at[j])

            def product(rows, at, count):
                """Of the rows [R, count, columns] with as many columns of h from `at` on, yet to be summed."""
                total = None
                for part in range(count):
                    vector = load(h, (pl.ds(at + part * columns, columns),), layout=layout.reduce(0))
                    each = times(
                        load(rows, (slice(None), part, slice(None)), layout=layout), vector.astype(f32), layout
                    )
                    total = each if total is None else total + each
                return total

            total = plgpu.layout_cast(jnp.zeros((R, columns), f32), layout)
            if S:
                plgpu.barrier_wait(shared_arrived)
                total = product(shared_s, k * inner, shared_parts)
            for j, (_, weight) in enumerate(chosen):
                plgpu.barrier_wait(arrived.at[j])
                over = plgpu.layout_cast(lax.broadcast_in_dim(weight, (R, columns), ()), layout)
                total = total + product(rows_s.at[j], j * inner, parts) * over
            write(total.sum(axis=1))

    body.__name__ = "moe_down_one"
    scratch: dict[str, Any] = {
        "rows_s": plgpu.SMEM((k, R, parts, columns), bf16),
        "arrived": plgpu.Barrier(num_arrivals=1, num_barriers=k),
    }
    if S:
        scratch |= {
            "shared_s": plgpu.SMEM((R, shared_parts, columns), bf16),
            "shared_arrived": plgpu.Barrier(num_arrivals=1),
        }
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1, H), bf16),
        scratch_types=scratch,
        grid=(H // R,),
        grid_names=("block",),
        compiler_params=PARAMS,
        interpret=interpret,
    )
