"""Routed and shared experts of a single token on Hopper: one Mosaic GPU kernel, without tensor cores.

The experts of one token are bytes to read and little else, and two kernels pay twice for their first and last bytes. Here
every multiprocessor has one block. Its producer streams the block's rows of gate and up through a ring of shared memory
and goes on with its rows of down through a second ring, while the consumers still multiply. Between the two halves all
blocks wait for each other at a counter in global memory, because every row of down needs all of gate and up. Rows are
dealt out by eight: tiles of 64 rows for a tensor core would leave some multiprocessors twice the work of others.

The producer also chooses the experts, in every block again, once the first rows of the shared ones are on their way: a kernel
before this one would take longer than they do.

Blocks that wait for each other must all be on the device at once, which one block a multiprocessor is. The interpreter
has no such wait: it runs the two halves as two kernels, one after the other.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, run_in_place
from pallas_kernels.matvec import WARPS, row_products, warp_per_row
from pallas_kernels.meet import meet
from pallas_kernels.moe.selection import COLUMNS, Routing, kernel_inputs, live_flags, read_block, select_experts
from pallas_kernels.moe.selection import ROWS as ROUTED_ROWS
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.tuning import current

# Warpgroups that multiply; each has its own rows of a stage.
CONSUMERS = 2
ROWS = CONSUMERS * WARPS
# Shared memory of the two rings, of 227 KiB, and of a stage at most.
UP_BYTES, UP_STAGE = 96 * 1024, 16 * 1024
DOWN_BYTES, DOWN_STAGE = 112 * 1024, 24 * 1024
MOST_STAGES = 16
f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def supports(x: jax.Array, parameters: ExpertWeights) -> bool:
    """Whether this kernel runs a call that `mosaic.unsupported_reason` allows."""
    T, H = x.shape
    inner, S = parameters.gate_up.shape[2], parameters.shared_inner
    fits = T == 1 and inner % 64 == 0 and S % 64 == 0 and H % 64 == 0
    plain = not parameters.special and not parameters.quantised
    return current().one_token_experts and fits and plain


@dataclass(frozen=True)
class Cut:
    """How rows of weights are cut.

    Attributes:
        columns: of one load, 16 bytes a lane or less.
        parts: loads of a stage.
        stages: of the ring.
    """

    columns: int
    parts: int
    stages: int

    @property
    def depth(self) -> int:
        """Columns of a stage."""
        return self.parts * self.columns


def cut(length: int, rows: int, stage_bytes: int, ring_bytes: int) -> Cut:
    """The deepest stages of `rows` rows, of `length` columns each, that fit."""
    columns = math.gcd(length, 256)
    loads = length // columns
    most = max(stage_bytes // (2 * rows * columns), 1)
    parts = max(n for n in range(1, min(loads, most) + 1) if loads % n == 0)
    return Cut(columns, parts, min(ring_bytes // (2 * rows * columns * parts), MOST_STAGES))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call: k of E experts, hidden and inner size, joint inner size S of the shared experts, blocks."""

    E: int
    k: int
    H: int
    inner: int
    S: int
    grid: int

    @property
    def up_cut(self) -> Cut:
        return cut(self.H, 2 * ROWS, UP_STAGE, UP_BYTES)

    @property
    def down_cut(self) -> Cut:
        """A stage lies within one expert."""
        return cut(math.gcd(self.inner, self.S), ROWS, DOWN_STAGE, DOWN_BYTES)


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
    gate_up, down, shared = parameters.arrays()
    E, _, inner, H = gate_up.shape
    first = parameters.first
    # The number of an H200, where there is no GPU to ask (lowering on a CPU).
    grid = blocks or getattr(jax.devices()[0], "core_count", None) or 132
    z = Sizes(E, k, H, inner, parameters.shared_inner, grid)
    inputs = [*choice, x, *([] if residual is None else [residual])]
    inputs += [] if first is None else [first.reshape(1)]
    inputs += [gate_up.reshape(E, 2, inner, -1, z.up_cut.columns), down.reshape(E, H, -1, z.down_cut.columns)]
    if shared is not None:
        inputs += [shared[0].reshape(2, z.S, -1, z.up_cut.columns), shared[1].reshape(H, -1, z.down_cut.columns)]
    h, out = (jax.ShapeDtypeStruct(shape, bf16) for shape in ((z.S + k * inner,), (1, H)))
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
    parts, columns] and [H, parts, columns]; then h for "up", h and out for "down", and the counter, h and out for both.
    """
    E, k, H, inner, S, grid, up_cut, down_cut = z.E, z.k, z.H, z.inner, z.S, z.grid, z.up_cut, z.down_cut
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

                @pl.when(row >= S)
                def _of_a_choice():
                    e, mine = choice(lax.div(row - S, i32(inner)))[1], pl.ds(lax.rem(row - S, i32(inner)), ROWS)
                    plgpu.copy_gmem_to_smem(gate_up.at[e, :, mine, at], up_s.at[s], up_full.at[s])

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

            if "up" in halves:
                layout = warp_per_row(up_cut.columns)

                @pl.loop(0, mine_up)
                def _up(item):
                    totals: list[Any] = [None, None]
                    for stage in range(up_stages):
                        s = lax.rem(item * up_stages + stage, i32(up_cut.stages))
                        plgpu.barrier_wait(up_full.at[s])
                        for part in range(up_cut.parts):
                            at = pl.ds((stage * up_cut.parts + part) * up_cut.columns, up_cut.columns)
                            vector = load(x, (0, at), layout=layout.reduce(0)).astype(f32)
                            for half in range(2):
                                tile = load(up_s, (s, half, my_rows, part, slice(None)), layout=layout)
                                product = row_products(tile, vector, layout)
                                totals[half] = product if totals[half] is None else totals[half] + product
                        give_back(up_free, s)
                    gate, up = (total.sum(axis=1) for total in totals)
                    value = gate * (1.0 / (1.0 + jnp.exp(-gate))) * up
                    h[pl.ds(row_of(item) + warpgroup * WARPS, WARPS)] = value.astype(bf16)

            if routing:
                plgpu.barrier_wait(chosen["routed"])
            if counter is not None:
                meet(counter, grid * CONSUMERS)

            if "down" in halves:
                layout = warp_per_row(down_cut.columns)

                @pl.loop(0, mine_down)
                def _down(item):
                    mine = pl.ds(row_of(item) + warpgroup * WARPS, WARPS)

                    def piece(stages, first):
                        """Products of `stages` stages of a row, from `first` on, with h; still to be summed over columns."""
                        total: Any = None
                        for stage in range(stages):
                            s = lax.rem(item * down_stages + first + stage, i32(down_cut.stages))
                            plgpu.barrier_wait(down_full.at[s])
                            for part in range(down_cut.parts):
                                at = ((first + stage) * down_cut.parts + part) * down_cut.columns
                                at = pl.ds(at, down_cut.columns)
                                vector = load(h, (at,), layout=layout.reduce(0)).astype(f32)
                                tile = load(down_s, (s, my_rows, part, slice(None)), layout=layout)
                                product = row_products(tile, vector, layout)
                                total = product if total is None else total + product
                            give_back(down_free, s)
                        return total

                    def of_choice(j):
                        weight = lax.broadcast_in_dim(weights[0, choice(j)[0]], (WARPS, down_cut.columns), ())
                        each = piece(expert_stages, shared_stages + j * expert_stages)
                        return each * plgpu.layout_cast(weight, layout)

                    total: Any = piece(shared_stages, 0) if S else None
                    if first is None:
                        for j in range(k):
                            total = of_choice(j) if total is None else total + of_choice(j)
                    else:
                        if total is None:
                            total = plgpu.layout_cast(jnp.zeros((WARPS, down_cut.columns), f32), layout)
                        total = lax.fori_loop(0, reached, lambda j, total: total + of_choice(j), total)
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

    routing_scratch = {
        "ids_s": plgpu.SMEM((ROUTED_ROWS, COLUMNS), i32),
        "weights_s": plgpu.SMEM((ROUTED_ROWS, COLUMNS), f32),
        "routed": plgpu.Barrier(),
    }
    return {
        "body": moe_one_token,
        "scratch_types": {
            "up_s": plgpu.SMEM((up_cut.stages, 2, ROWS, up_cut.parts, up_cut.columns), bf16),
            "up_full": plgpu.Barrier(num_barriers=up_cut.stages),
            "up_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=up_cut.stages),
            "down_s": plgpu.SMEM((down_cut.stages, ROWS, down_cut.parts, down_cut.columns), bf16),
            "down_full": plgpu.Barrier(num_barriers=down_cut.stages),
            "down_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=down_cut.stages),
            **(routing_scratch if routing else {}),
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
