"""The routing of a layer as one small Mosaic GPU kernel (`moe_route` in traces): scores, groups, the k best experts.

XLA makes five kernels of it, and each small kernel of a decode step costs 2.2 us on an H200, whatever it does. Up to 8
tokens `dispatch_fused.py` makes the slot tables in the same launch, for more `dispatch_meet.py` may.
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
from pallas_kernels.moe.dispatch_tiles import BLOCK
from pallas_kernels.moe.selection import (
    COLUMNS,
    MAX_EXPERTS,
    MAX_GROUPS,
    ROWS,
    TILE,
    Routing,
    along_rows,
    constant_like,
    kernel_inputs,
    read_block,
    read_token,
    select_experts,
    tokens_of_a_block,
)

# The chosen ids of a block: 8 of each token, held twice.
CHOSEN = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, 8), (2, 8), (1,))), warp_dims=(-5,), lane_dims=(-3, -2, plgpu.Replicated(2)), vector_dim=-1
)


def unsupported_reason(logits: jax.Array, routing: Routing) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    E = logits.shape[-1]
    if E > MAX_EXPERTS or routing.top_k > COLUMNS or routing.num_groups > MAX_GROUPS:
        return (
            f"it supports up to {MAX_EXPERTS} experts, {COLUMNS} of a token and {MAX_GROUPS} groups, "
            f"not {E}, {routing.top_k} and {routing.num_groups}"
        )
    if logits.dtype != jnp.float32:
        return f"it needs float32 logits, not {logits.dtype}"
    return hopper_unsupported_reason()


@functools.partial(jax.jit, static_argnames=("routing", "interpret"))
def route(
    logits: jax.Array, bias: jax.Array | None, *, routing: Routing, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """As `api.route_sigmoid`, or `api.route_softmax` where the bias is None: weights and ids [T, k]."""
    T, k = logits.shape[-2], routing.top_k
    weights, ids, _ = route_padded(logits, bias, jnp.ones(T, bool), routing=routing, interpret=interpret)
    return weights[:T, :k], ids[:T, :k]


@functools.partial(jax.jit, static_argnames=("routing", "interpret"))
def route_padded(
    logits: jax.Array, bias: jax.Array | None, live: jax.Array, *, routing: Routing, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `route`, with the kernel's padding: [>= T, COLUMNS] weights and [>= T, `routing.width`] ids.

    The logits may be in parts (`router.logit_parts`).

    Ids are E past the k-th, past the last token and for tokens that are not live. The third result is a 0, int32 [1], for
    a kernel that needs a counter.
    """
    T, E = live.shape[0], logits.shape[-1]
    kernel = _route(T, E, routing, route_blocks(logits, T), tuple(route_scratch(logits).items()), interpret)
    weights, chosen, zero = kernel(*kernel_inputs(logits, bias, live))
    return weights, chosen.reshape(-1, routing.width), zero


def assign(
    logits: jax.Array, bias: jax.Array | None, live: jax.Array, *, routing: Routing, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Weights float32 [>= T, >= k], and ids for `dispatch.dispatch_assigned`.

    The ids are int32 [chunks, BLOCK], `routing.width` for each token; E for tokens that are not live or do not exist.
    """
    weights, ids, _ = route_padded(logits, bias, live, routing=routing, interpret=interpret)
    return weights, ids.reshape(-1, BLOCK)


def route_scratch(logits: jax.Array) -> dict[str, Any]:
    """Scratch types of `route_block`."""
    scratch = {"chosen_smem": plgpu.SMEM((ROWS, COLUMNS), jnp.int32)}
    if tokens_of_a_block(logits) == 1:
        scratch["weights_smem"] = plgpu.SMEM((ROWS, COLUMNS), jnp.float32)
        scratch["sums_smem"] = plgpu.SMEM((ROWS, logits.shape[-1]), jnp.float32)
    return scratch


def route_blocks(logits: jax.Array, T: int) -> int:
    """How many blocks route T tokens, padded."""
    return -(-T // ROWS) * ROWS // tokens_of_a_block(logits)


def route_block(
    inputs: Any,
    block: Any,
    T: int,
    E: int,
    r: Routing,
    weights: Any,
    chosen: Any,
    chosen_smem: Any,
    weights_smem: Any = None,
    sums_smem: Any = None,
) -> None:
    """Chooses the experts of a block's tokens (`tokens_of_a_block`), inside a kernel.

    Args:
        inputs: references to `kernel_inputs` of T tokens.
        weights, chosen: references float32 [padded T, COLUMNS] and int32 [padded T / ROWS, ROWS, width].
        chosen_smem, weights_smem, sums_smem: `route_scratch`.
    """
    if tokens_of_a_block(inputs[0]) == 1:
        logits, bias, is_live = read_token(inputs, block, sums_smem)
        # All rows are this token's.
        _, chosen_smem[...], weights_smem[...] = select_experts(logits, bias, E, r)
        weights[block] = load(weights_smem, (0, slice(None)), layout=TILE.reduce(0))
        ids = load(chosen_smem, (0, pl.ds(0, r.width)), layout=CHOSEN.reduce(0))
        mine = chosen.at[lax.div(block, jnp.int32(ROWS)), lax.rem(block, jnp.int32(ROWS))]
        mine[...] = jnp.where(is_live == 1, ids, constant_like(E, ids))
        return
    logits, bias, live = read_block(inputs, block, T)
    _, ids, weights[pl.ds(block * ROWS, ROWS)] = select_experts(logits, bias, E, r)
    chosen_smem[...] = jnp.where(along_rows(live, COLUMNS) == 1, ids, constant_like(E, ids))
    chosen[block] = load(chosen_smem, (slice(None), pl.ds(0, r.width)), layout=CHOSEN)


@functools.cache
def _route(T: int, E: int, r: Routing, blocks: int, scratch: tuple[tuple[str, Any], ...], interpret: Any) -> Any:
    """kernel(*kernel_inputs) -> weights float32 [padded T, COLUMNS], ids int32 [padded T / ROWS, ROWS, width], 0 int32 [1].

    Args:
        blocks, scratch: `route_blocks`, and the items of `route_scratch`.
    """
    int32 = jnp.int32
    padded = -(-T // ROWS) * ROWS

    def moe_route(*refs, **scratch):
        *inputs, weights, chosen, zero = refs
        block = lax.axis_index("block")

        @pl.when(block == 0)
        def _clear_counter():
            zero[0] = int32(0)

        route_block(inputs, block, T, E, r, weights, chosen, **scratch)

    return plgpu.kernel(
        moe_route,
        out_type=[
            jax.ShapeDtypeStruct((padded, COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((padded // ROWS, ROWS, r.width), int32),
            jax.ShapeDtypeStruct((1,), int32),
        ],
        scratch_types=dict(scratch),
        grid=(blocks,),
        grid_names=("block",),
        interpret=interpret,
        # Exact exp and division: approximate ones would reorder scores that nearly tie.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )
