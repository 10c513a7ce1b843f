"""Routed and shared experts of a single token on Hopper: one Mosaic GPU kernel, without tensor cores.

The experts of one token are bytes to read and little else, and two kernels pay twice for their first and last bytes. Here
every multiprocessor has one block. Its producer streams the block's rows of gate and up through a ring of shared memory
and goes on with its rows of down through a second ring, while the consumers still multiply. Between the two halves all
blocks wait for each other at a counter in global memory, because every row of down needs all of gate and up. Rows are
dealt out by eight: tiles of 64 rows for a tensor core would leave some multiprocessors twice the work of others.

The producer also chooses the experts, in every block again, once the first rows of the shared ones are on their way: a kernel
before this one would take longer than they do.

Weights in FP8 come as codes; what else they need is in `one_token_fp8.py`. Those in INT4 have a kernel like this one
(`one_token_int4.py`).

Blocks that wait for each other must all be on the device at once, which one block a multiprocessor is. The interpreter
has no such wait: it runs the two halves as two kernels, one after the other.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, run_in_place
from pallas_kernels.matvec import WARPS, row_products, warp_per_row
from pallas_kernels.meet import meet
from pallas_kernels.moe import one_token_fp8, one_token_int4
from pallas_kernels.moe.one_token_config import CONSUMERS, ROWS, Sizes, values_of
from pallas_kernels.moe.one_token_fp8 import SCALE_ROWS, scales_ahead, write_values
from pallas_kernels.moe.selection import COLUMNS, Routing, kernel_inputs, live_flags, read_block, select_experts
from pallas_kernels.moe.selection import ROWS as ROUTED_ROWS
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.activations import GROUP
from pallas_kernels.quant.schemes import INT4_G32
from pallas_kernels.quant.values import Quantised, in_schemes
from pallas_kernels.tuning import current

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def supports(x: jax.Array, parameters: ExpertWeights, k: int) -> bool:
    """Whether this kernel runs a call with k experts of a token that `mosaic.unsupported_reason` allows."""
    T, H = x.shape
    inner, S, choices = parameters.gate_up.shape[2], parameters.shared_inner, current()
    fits = inner % 64 == 0 and S % 64 == 0 and H % 64 == 0
    if parameters.quantised:
        fits = choices.one_token_fp8 and one_token_fp8.supports(parameters, k)
        fits |= choices.one_token_int4 and one_token_int4.supports(parameters)
    return choices.one_token_experts and T == 1 and fits and not parameters.special


@functools.partial(jax.jit, static_argnames=("k", "blocks", "interpret"))
def experts(
    x: jax.Array,
    parameters: ExpertWeights,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    residual: jax.Array | None = None,
    counter: jax.Array | None = None,
    *,
    k: int,
    blocks: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `api.experts` for x [1, H], in bfloat16. Jitted, so that the layers of a model share one lowering.

    Args:
        weights, ids: [>= 1, >= k], of which the first k of the first row count.
        counter: int32 [1], 0, in which the blocks count themselves (default: made by XLA, in a launch of its own).
        k: experts of the token.
        blocks: of the grid, all on the device at once (default: one a multiprocessor).
        interpret: passed to Pallas.
    """
    choice = [ids, weights, live_flags(live)]
    return _run(x, parameters, choice, None, k, residual, counter, blocks, interpret)


@functools.partial(jax.jit, static_argnames=("routing", "blocks", "interpret"))
def routed_experts(
    x: jax.Array,
    parameters: ExpertWeights,
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    residual: jax.Array | None = None,
    counter: jax.Array | None = None,
    *,
    routing: Routing,
    blocks: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `api.routed_experts`, where `routing.unsupported_reason` is None too and all experts are on this device.

    Args:
        logits: float32 [1, E]. counter, blocks, interpret: as of `experts`.
    """
    choice = kernel_inputs(logits, bias, live)
    return _run(x, parameters, choice, routing, routing.top_k, residual, counter, blocks, interpret)


def _run(
    x: jax.Array,
    parameters: ExpertWeights,
    choice: list[jax.Array],
    routing: Routing | None,
    k: int,
    residual: jax.Array | None,
    counter: jax.Array | None,
    blocks: int | None,
    interpret: Any,
) -> jax.Array:
    if in_schemes((INT4_G32,), parameters.gate_up):
        return one_token_int4.run(x, parameters, choice, routing, k, residual, counter, blocks, interpret)
    E, _, inner, H = parameters.gate_up.shape
    first = parameters.first
    # The number of an H200, where there is no GPU to ask (lowering on a CPU).
    grid = blocks or getattr(jax.devices()[0], "core_count", None) or 132
    z = Sizes(E, k, H, inner, parameters.shared_inner, grid, parameters.quantised)
    weights = [parameters.gate_up, parameters.down, *(parameters.shared or ())]
    inputs = [*choice, x.reshape(-1, GROUP) if z.fp8 else x, *([] if residual is None else [residual])]
    inputs += [] if first is None else [first.reshape(1)]
    for weight, cut in zip(
        weights, (z.up_cut, z.down_cut) * 2, strict=False
    ):  # of shared experts as well, if there are any
        codes = weight.codes if isinstance(weight, Quantised) else weight
        inputs.append(codes.reshape(*codes.shape[:-1], -1, cut.columns))
    inputs += [weight.scale for weight in weights if isinstance(weight, Quantised)]
    h = jax.ShapeDtypeStruct((z.products // GROUP, GROUP), f32) if z.fp8 else jax.ShapeDtypeStruct((z.products,), bf16)
    out = jax.ShapeDtypeStruct((1, H), bf16)
    kernel = functools.partial(_kernel, z, len(choice), routing, residual is not None, first is not None, interpret)
    if interpret:
        h_up = plgpu.kernel(out_type=h, **kernel("up"))(*inputs)
        return plgpu.kernel(out_type=out, **kernel("down"))(*inputs, h_up)
    counter = jnp.zeros(1, i32) if counter is None else counter
    _, _, result = run_in_place(inputs=inputs, outs=[counter], new=[h, out], **kernel("up", "down"))
    return result


def _choices_here(ids: Any, first: Any, E: int, k: int) -> tuple[jax.Array, list[tuple[Any, Any, Any]]]:
    """How many of the token's choices are among the E experts from `first` on; None: all are.

    Returns:
        Also of each choice its expert here, how many before it are here, and whether it is.
    """
    if first is None:
        return i32(k), []
    count, out = i32(0), []
    for j in range(k):
        e = ids[0, j] - first[0]
        counts = (e >= 0) & (e < E)
        out.append((e, count, counts))
        count = count + jnp.where(counts, i32(1), i32(0))
    return count, out


def _kernel(
    z: Sizes, choice_inputs: int, routing: Routing | None, adds: bool, elsewhere: bool, interpret: Any, *halves: str
) -> dict[str, Any]:
    """Arguments of `plgpu.kernel` for one or both halves of the work: "up" writes h [S + k * inner], "down" out [1, H].

    The body's first references, `choice_inputs` of them, are the token's choice: ids, weights and live flags, or with `routing`
    what `selection.read_block` reads to make it. Then x; the residual [1, H] if `adds`; the first expert's id [1] if some
    are `elsewhere`; gate_up [E, 2, inner, parts, columns] and down [E, H, parts, columns]; if S, the shared experts' [2, S,
    parts, columns] and [H, parts, columns]; in FP8 these are codes, and the scales of all four follow; then h for "up", h and
    out for "down", and the counter, h and out for both. In FP8 x and h are [groups, GROUP], h in float32.
    """
    E, k, H, inner, S, grid, fp8, up_cut, down_cut = z.E, z.k, z.H, z.inner, z.S, z.grid, z.fp8, z.up_cut, z.down_cut
    # Stages of a row of gate and up; and of a row of down those that are shared or one expert's.
    up_stages, shared_stages, expert_stages = H // up_cut.depth, S // down_cut.depth, inner // down_cut.depth

    def moe_one_token(*inputs, up_s, up_full, up_free, down_s, down_full, down_free, **chosen):
        chooses, x, refs = inputs[:choice_inputs], inputs[choice_inputs], inputs[choice_inputs + 1 :]
        live = chooses[-1]
        ids, weights = (chosen["ids_s"], chosen["weights_s"]) if routing else chooses[:2]
        residual = refs[0] if adds else None
        first, given = (refs[int(adds)], refs[1 + int(adds) :]) if elsewhere else (None, refs[int(adds) :])
        (gate_up, down), given = given[:2], given[2:]
        (shared_gate_up, shared_down), given = (given[:2], given[2:]) if S else ((None, None), given)
        scales, given = (given[: 4 if S else 2], given[4 if S else 2 :]) if fp8 else ((), given)
        counter, h, out = {"up": (None, *given, None), "down": (None, *given), "updown": given}["".join(halves)]
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")

        def share(items):
            """How many of `items`, dealt out in turn, are this block's."""
            return lax.div(items - block + (grid - 1), i32(grid))

        reached, here = _choices_here(ids, first, E, k)
        # Of a row of down over all choices that are here.
        down_stages = shared_stages + reached * expert_stages
        divisor = lax.max(down_stages, i32(1))

        def choice(place):
            """The place-th choice that is here, as its place among all of them and its expert."""
            if first is None:
                # Clamped, because any other number would read past the weights.
                return place, lax.max(lax.min(ids[0, place], i32(E - 1)), i32(0))
            j, e = i32(0), i32(0)
            for i, (each, before, counts) in enumerate(here):
                it = counts & (before == place)
                j, e = jnp.where(it, i32(i), j), jnp.where(it, each, e)
            return j, e

        mine_up = share(lax.div(S + reached * inner, i32(ROWS))) if "up" in halves else i32(0)
        mine_down = share(H // ROWS) if "down" in halves else i32(0)

        def row_of(item):
            return (block + item * grid) * ROWS

        @pl.when(warpgroup == CONSUMERS)
        def _produce():
            def fill_up(step):
                row, s = row_of(lax.div(step, i32(up_stages))), lax.rem(step, i32(up_cut.stages))
                at = pl.ds(lax.rem(step, i32(up_stages)) * up_cut.parts, up_cut.parts)

                # First, because they do not wait for the token's choice.
                if S:

                    @pl.when(row < S)
                    def _of_shared():
                        plgpu.copy_gmem_to_smem(shared_gate_up.at[:, pl.ds(row, ROWS), at], up_s.at[s], up_full.at[s])
                        if fp8:
                            of_block = scales[2].at[:, pl.ds(lax.div(row, i32(GROUP)), SCALE_ROWS), at]
                            plgpu.copy_gmem_to_smem(of_block, chosen["scales_s"].at[s], up_full.at[s])

                @pl.when(row >= S)
                def _of_a_choice():
                    e, first_row = choice(lax.div(row - S, i32(inner)))[1], lax.rem(row - S, i32(inner))
                    own = gate_up.at[e, :, pl.ds(first_row, ROWS), at]
                    plgpu.copy_gmem_to_smem(own, up_s.at[s], up_full.at[s])
                    if fp8:
                        of_block = scales[0].at[e, :, pl.ds(lax.div(first_row, i32(GROUP)), SCALE_ROWS), at]
                        plgpu.copy_gmem_to_smem(of_block, chosen["scales_s"].at[s], up_full.at[s])

            def fill_down(step):
                mine, s = pl.ds(row_of(lax.div(step, divisor)), ROWS), lax.rem(step, i32(down_cut.stages))
                stage = lax.rem(step, divisor)

                if S:

                    @pl.when(stage < shared_stages)
                    def _of_shared():
                        at = pl.ds(stage * down_cut.parts, down_cut.parts)
                        plgpu.copy_gmem_to_smem(shared_down.at[mine, at], down_s.at[s], down_full.at[s])

                @pl.when(stage >= shared_stages)
                def _of_a_choice():
                    place = stage - shared_stages
                    e = choice(lax.div(place, i32(expert_stages)))[1]
                    at = pl.ds(lax.rem(place, i32(expert_stages)) * down_cut.parts, down_cut.parts)
                    plgpu.copy_gmem_to_smem(down.at[e, mine, at], down_s.at[s], down_full.at[s])

            def choose(routing):
                """Writes the choice to shared memory, for the whole block."""
                logits, bias, _ = read_block(chooses, 0, 1)
                _, ids[...], weights[...] = select_experts(logits, bias, E, routing)
                plgpu.barrier_arrive(chosen["routed"])
                plgpu.barrier_wait(chosen["routed"])

            def stream(fill, steps, stages, free, begun=0):
                """All steps but the first ones, which have `begun`."""
                ahead = lax.min(steps, i32(stages))
                pl.loop(begun, ahead)(fill)

                @pl.loop(ahead, steps)
                def _refill(step):
                    plgpu.barrier_wait(free.at[lax.rem(step, i32(stages))])
                    fill(step)

            def drain(steps, stages, free):
                """Every completion of a barrier must be awaited before the kernel ends."""

                @pl.loop(lax.max(steps - stages, i32(0)), steps)
                def _wait(step):
                    plgpu.barrier_wait(free.at[lax.rem(step, i32(stages))])

            begun = i32(0)
            if routing:
                if S and "up" in halves:
                    begun = lax.min(share(i32(S // ROWS)) * up_stages, i32(up_cut.stages))
                    pl.loop(0, begun)(fill_up)
                choose(routing)
            stream(fill_up, mine_up * up_stages, up_cut.stages, up_free, begun)
            stream(fill_down, mine_down * down_stages, down_cut.stages, down_free)
            drain(mine_up * up_stages, up_cut.stages, up_free)
            drain(mine_down * down_stages, down_cut.stages, down_free)

        @pl.when(warpgroup < CONSUMERS)
        def _consume():
            my_rows = pl.ds(warpgroup * WARPS, WARPS)

            def give_back(free, s):
                plgpu.commit_smem()  # reads must have completed before TMA writes there again
                plgpu.barrier_arrive(free.at[s])

            def values_ready(source, groups):
                """The token's values of `groups` groups are in shared memory, written by all consumers."""
                write_values(source, groups, chosen["values_s"], warpgroup, CONSUMERS)
                plgpu.barrier_arrive(chosen["valued"])
                plgpu.barrier_wait(chosen["valued"])

            def part_of(source, part, columns, layout):
                """The token's float32 values of one load of columns: of x, or of h."""
                if fp8:
                    return load(chosen["values_s"], (part, slice(None)), layout=layout.reduce(0))
                at = pl.ds(part * columns, columns)
                place = (0, at) if source is x else (at,)
                return load(source, place, layout=layout.reduce(0)).astype(f32)

            if "up" in halves:
                layout = warp_per_row(up_cut.columns)
                if fp8:
                    values_ready(x, H // GROUP)

                @pl.loop(0, mine_up)
                def _up(item):
                    totals: list[Any] = [None, None]
                    for stage in range(up_stages):
                        s = lax.rem(item * up_stages + stage, i32(up_cut.stages))
                        plgpu.barrier_wait(up_full.at[s])
                        for part in range(up_cut.parts):
                            vector = part_of(x, stage * up_cut.parts + part, up_cut.columns, layout)
                            for half in range(2):
                                tile = load(up_s, (s, half, my_rows, part, slice(None)), layout=layout)
                                factor = chosen["scales_s"][s, half, 0, part] if fp8 else None
                                product = row_products(tile, vector if factor is None else vector * factor, layout)
                                totals[half] = product if totals[half] is None else totals[half] + product
                        give_back(up_free, s)
                    gate, up = (total.sum(axis=1) for total in totals)
                    value = gate * (1.0 / (1.0 + jnp.exp(-gate))) * up
                    row = row_of(item) + warpgroup * WARPS
                    if fp8:
                        h[lax.div(row, i32(GROUP)), pl.ds(lax.rem(row, i32(GROUP)), WARPS)] = value
                    else:
                        h[pl.ds(row, WARPS)] = value.astype(bf16)

            if routing:
                plgpu.barrier_wait(chosen["routed"])
            if counter is not None:
                meet(counter, grid * CONSUMERS)

            if "down" in halves:
                layout = warp_per_row(down_cut.columns)
                if fp8:
                    values_ready(h, z.products // GROUP)

                @pl.loop(0, mine_down)
                def _down(item):
                    mine = pl.ds(row_of(item) + warpgroup * WARPS, WARPS)

                    def scales_of(j):
                        """Of the row's blocks, in FP8: those of a choice, or of the shared experts."""
                        if not fp8:
                            return None
                        block_row = lax.div(row_of(item), i32(GROUP))
                        if j is None:
                            return [scales[3][block_row, n] for n in range(S // GROUP)]
                        e = choice(j)[1]
                        return [scales[1][e, block_row, n] for n in range(inner // GROUP)]

                    def piece(stages, first, factors=None):
                        """Products of `stages` stages of a row, from `first` on, with h; still to be summed over columns."""
                        total: Any = None
                        for stage in range(stages):
                            s = lax.rem(item * down_stages + first + stage, i32(down_cut.stages))
                            plgpu.barrier_wait(down_full.at[s])
                            for part in range(down_cut.parts):
                                vector = part_of(h, (first + stage) * down_cut.parts + part, down_cut.columns, layout)
                                if factors is not None:
                                    vector = vector * factors[stage * down_cut.parts + part]
                                tile = load(down_s, (s, my_rows, part, slice(None)), layout=layout)
                                product = row_products(tile, vector, layout)
                                total = product if total is None else total + product
                            give_back(down_free, s)
                        return total

                    def of_choice(j, factors):
                        weight = lax.broadcast_in_dim(weights[0, choice(j)[0]], (WARPS, down_cut.columns), ())
                        each = piece(expert_stages, shared_stages + j * expert_stages, factors)
                        return each * plgpu.layout_cast(weight, layout)

                    # All pieces of a row, if it is known how many there are: the scales of each are read during the one before.
                    pieces = ([None] if S else []) + ([*range(k)] if first is None else [])
                    factors = scales_ahead(lambda n: scales_of(pieces[n]), len(pieces))
                    total: Any = piece(shared_stages, 0, factors(0)) if S else None
                    if first is None:
                        for n, j in enumerate(range(k), start=1 if S else 0):
                            each = of_choice(j, factors(n))
                            total = each if total is None else total + each
                    else:
                        if total is None:
                            total = plgpu.layout_cast(jnp.zeros((WARPS, down_cut.columns), f32), layout)
                        total = lax.fori_loop(0, reached, lambda j, total: total + of_choice(j, scales_of(j)), total)
                    # The experts' sum is rounded before the residual is added, as in the reference.
                    routed = total.sum(axis=1)
                    kept = plgpu.layout_cast(jnp.zeros((WARPS,), f32), layout.reduce(1))
                    if residual is not None:
                        kept = load(residual, (0, mine), layout=layout.reduce(1)).astype(f32)

                    @pl.when(live[0] == 1)
                    def _():
                        out[0, mine] = (kept + routed.astype(bf16).astype(f32)).astype(bf16)

                    @pl.when(live[0] != 1)
                    def _():
                        out[0, mine] = kept.astype(bf16)

    dtype = jnp.float8_e4m3fn if fp8 else bf16
    fp8_scratch = {
        "scales_s": plgpu.SMEM((up_cut.stages, 2, SCALE_ROWS, up_cut.parts), f32),
        "values_s": plgpu.SMEM((values_of(H, z.products) // GROUP, GROUP), f32),
        "valued": plgpu.Barrier(num_arrivals=CONSUMERS),
    }
    routing_scratch = {
        "ids_s": plgpu.SMEM((ROUTED_ROWS, COLUMNS), i32),
        "weights_s": plgpu.SMEM((ROUTED_ROWS, COLUMNS), f32),
        "routed": plgpu.Barrier(),
    }
    return {
        "body": moe_one_token,
        "scratch_types": {
            "up_s": plgpu.SMEM((up_cut.stages, 2, ROWS, up_cut.parts, up_cut.columns), dtype),
            "up_full": plgpu.Barrier(num_arrivals=2 if fp8 else 1, num_barriers=up_cut.stages),
            "up_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=up_cut.stages),
            "down_s": plgpu.SMEM((down_cut.stages, ROWS, down_cut.parts, down_cut.columns), dtype),
            "down_full": plgpu.Barrier(num_barriers=down_cut.stages),
            "down_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=down_cut.stages),
            **(routing_scratch if routing else {}),
            **(fp8_scratch if fp8 else {}),
        },
        "grid": (grid,),
        "grid_names": ("block",),
        "num_threads": CONSUMERS + 1,
        "thread_name": "warpgroup",
        # Reductions stay within a warp, and all that shared memory needs is the rings' barriers.
        "compiler_params": plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        "interpret": interpret,
    }
