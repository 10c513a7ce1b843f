"""Routing and the slot tables of 9 to 128 tokens in one Mosaic GPU kernel (`moe_route_and_plan` in traces).

The first blocks route, as those of `routing.py` do, and count themselves when their ids are in global memory; the others
make the tables, as those of `dispatch_small.py` do, when all ids are there. Meanwhile these load the tokens that they copy.
Blocks start in the order of their numbers and wait only for lower ones, which wait for none: however few are on the device
at once, all get their turn.

The interpreter has no such wait: it runs the two halves as two kernels, one after the other.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, run_in_place
from pallas_kernels.meet import arrive, await_arrivals
from pallas_kernels.moe.dispatch_small import Plan, make_tables
from pallas_kernels.moe.dispatch_tiles import BLOCK, PARAMS
from pallas_kernels.moe.routing import route_block, route_blocks, route_scratch
from pallas_kernels.moe.selection import COLUMNS, ROWS, Routing, kernel_inputs
from pallas_kernels.moe.slots import SlotTables

# Chunks of ids, each held twice: a thread has one id of every chunk, so that all its loads are in flight together.
CHUNKS = plgpu.Layout.TILED(
    plgpu.Tiling(((1, BLOCK), (16,), (1,))), warp_dims=(-3,), lane_dims=(-2, plgpu.Replicated(2)), vector_dim=-1
)


def chunks_of(T: int, width: int) -> int:
    """Chunks of the ids that T tokens have, `width` each, as `routing.assign` pads them."""
    return -(-T // ROWS) * ROWS * width // BLOCK


def route_and_place(
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    x: jax.Array,
    zero: jax.Array,
    plan: Plan,
    *,
    routing: Routing,
    interpret: Any = False,
) -> tuple[jax.Array, SlotTables, jax.Array | None]:
    """Weights as `routing.assign` gives them, and `Plan.tables` of its ids.

    Args:
        logits: float32 [T, E], or parts of them (`router.logit_parts`). bias: float32 [E], None for `api.route_softmax`.
        live: bool [T].
        x: [T, H], read only if the plan copies it.
        zero: int32 [1], a 0, in which the blocks count themselves.
        plan: of `chunks_of` chunks, `routing.width` ids for each token.
    """
    T = live.shape[0]
    inputs, tokens = kernel_inputs(logits, bias, live), [x] if plan.copied else []
    eights = -(-T // ROWS)
    weights = jax.ShapeDtypeStruct((eights * ROWS, COLUMNS), jnp.float32)
    ids = jax.ShapeDtypeStruct((eights, ROWS, routing.width), jnp.int32)
    kernel = functools.partial(_kernel, logits, T, len(inputs), routing, plan, interpret)
    if interpret:
        made, chosen = plgpu.kernel(out_type=[weights, ids], **kernel("route"))(*inputs)
        results = plgpu.kernel(out_type=plan.out_type, **kernel("plan"))(*tokens, chosen.reshape(-1, BLOCK))
    else:
        new = [weights, ids, *plan.out_type]
        _, made, _, *results = run_in_place(inputs=[*inputs, *tokens], outs=[zero], new=new, **kernel("route", "plan"))
    return made, *plan.tables(results)


def _kernel(
    logits: jax.Array, T: int, inputs: int, r: Routing, plan: Plan, interpret: Any, *halves: str
) -> dict[str, Any]:
    """Arguments of `plgpu.kernel` for one or both halves of the work. Of the logits only the shape counts.

    The body's references are for "route" `inputs` of `kernel_inputs`, then weights and ids [eights, ROWS, width]; for "plan"
    x if it is copied, ids [chunks, BLOCK], then `Plan.out_type`; for both `kernel_inputs`, x if it is copied, the counter,
    weights, ids as of "route", then `Plan.out_type`.
    """
    routers = route_blocks(logits, T) if "route" in halves else 0
    of_routing = route_scratch(logits)

    def moe_route_and_plan(*refs, **scratch):
        block, emulated = lax.axis_index("block"), bool(interpret)

        def route(inputs, weights, chosen):
            route_block(inputs, block, T, plan.E, r, weights, chosen, **{name: scratch[name] for name in of_routing})

        def make(tokens, ids, tables, counter=None):
            def await_ids():
                if counter is not None:
                    await_arrivals(counter, routers)
                # Not by a copy of TMA, which might not see what other blocks have stored.
                scratch["ids_smem"][...] = load(ids, (slice(None), slice(None)), layout=CHUNKS)

            of_tables = {name: scratch[name] for name in plan.scratch_types}
            make_tables(plan, block - routers, await_ids, *tokens, *tables, emulated=emulated, **of_tables)

        if halves == ("route",):
            route(refs[:inputs], *refs[inputs:])
        elif halves == ("plan",):
            *tokens, ids = refs[:-5]
            make(tokens, ids, refs[-5:])
        else:
            *tokens, counter, weights, chosen = refs[inputs:-5]

            @pl.when(block < routers)
            def _route():
                route(refs[:inputs], weights, chosen)
                arrive(counter)

            @pl.when(block >= routers)
            def _make():
                make(tokens, chosen.reshape(plan.chunks, BLOCK), refs[-5:], counter)

    return {
        "body": moe_route_and_plan,
        "scratch_types": {**of_routing, **plan.scratch_types},
        "grid": (routers + (plan.blocks if "plan" in halves else 0),),
        "grid_names": ("block",),
        "interpret": interpret,
        # Exact exp and division, as of `routing.py`.
        "compiler_params": PARAMS,
    }
