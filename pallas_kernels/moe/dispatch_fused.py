"""Routing and the slot tables of up to 8 tokens in one Mosaic GPU kernel (`moe_route_plan` in traces).

With so few tokens one block routes them all and every slot has all tokens, so that its row for token t is t: what is left
to find are the experts that any token chose.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import load
from pallas_kernels.moe.dispatch_tiles import AS_ROWS, BLOCK, slot_experts, write_slot_ends
from pallas_kernels.moe.selection import (
    COLUMNS,
    ROWS,
    TILE,
    Routing,
    along_rows,
    constant_like,
    down_columns,
    iota,
    kernel_inputs,
    read_block,
    select_experts,
)
from pallas_kernels.moe.slots import SlotTables


def route_and_dispatch(
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    rows: int,
    slots: int,
    *,
    routing: Routing,
    interpret: Any = False,
) -> tuple[jax.Array, SlotTables]:
    """Weights and the slot tables of T <= ROWS tokens, where every slot has all tokens.

    Weights and places, [ROWS, COLUMNS], keep the kernel's padding: the first T rows and k columns count.

    Args:
        logits: float32 [T, E], or parts of them (`router.logit_parts`). bias: float32 [E], None for `api.route_softmax`.
        live: bool [T].
        rows: token rows of a slot, ROWS.
        slots: `max_slots` or more.
    """
    run = _route_and_dispatch(live.shape[0], logits.shape[-1], routing, rows, slots, interpret)
    weights, num_slots, expert, place = run(*kernel_inputs(logits, bias, live))
    nothing = jnp.zeros(slots * rows, jnp.int32)  # never read
    return weights, SlotTables(num_slots, expert, nothing, nothing, place)


@functools.cache
def _route_and_dispatch(T: int, E: int, r: Routing, rows: int, slots: int, interpret: Any) -> Any:
    """kernel(*kernel_inputs) -> weights float32 [ROWS, COLUMNS], num_slots, expert, place int32 [ROWS, COLUMNS]."""
    int32 = jnp.int32
    experts = -(-E // COLUMNS) * COLUMNS

    def moe_route_plan(*refs, order_smem, used_smem, ends_smem):
        *inputs, weights, num_slots, expert, place = refs
        logits, bias, live = read_block(inputs, 0, T)
        order, _, weights[...] = select_experts(logits, bias, E, r)
        order = jnp.where(along_rows(live, experts) == 1, order, constant_like(-1, order))
        order_smem[...] = order
        used = load(order_smem, (0,), layout=AS_ROWS)
        for t in range(1, T):
            used = jnp.maximum(used, load(order_smem, (t,), layout=AS_ROWS))
        used_smem[...] = jnp.where(used >= 0, constant_like(1, used), constant_like(0, used))
        write_slot_ends(used_smem, ends_smem)
        num_slots[0] = ends_smem[experts - 1]
        for first in range(0, slots, BLOCK):
            expert[pl.ds(first, BLOCK)] = slot_experts(ends_smem, first)
        # The rows of a slot are the tokens.
        starts = down_columns(load(ends_smem, (pl.ds(0, experts),), layout=TILE.reduce(0))) * rows - rows
        starts = starts + iota((ROWS, experts), 0)
        column = iota((ROWS, COLUMNS), 1)
        places = constant_like(0, column)
        for j in range(r.top_k):
            start = jnp.where(order == j, starts, constant_like(0, starts)).sum(axis=1)
            places = jnp.where(column == j, along_rows(start, COLUMNS), places)
        place[...] = places

    return plgpu.kernel(
        moe_route_plan,
        out_type=[
            jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((1,), int32),
            jax.ShapeDtypeStruct((-(-slots // BLOCK) * BLOCK,), int32),
            jax.ShapeDtypeStruct((ROWS, COLUMNS), int32),
        ],
        scratch_types={
            "order_smem": plgpu.SMEM((ROWS, experts), int32),
            "used_smem": plgpu.SMEM((experts,), int32),
            "ends_smem": plgpu.SMEM((experts,), int32),
        },
        grid=(1,),
        grid_names=("block",),
        interpret=interpret,
        # Exact exp and division: approximate ones would reorder scores that nearly tie.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )
