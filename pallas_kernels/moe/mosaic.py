"""Routed experts on Hopper: after `plan`, two Mosaic GPU kernels stream the weights of every expert that has tokens.

A decode step is bound by reading weights, so they are the 64 rows of a wgmma and the tokens are its columns, of which it
takes as few as 8 (a slot of 8 or 16 tokens wastes little). One warpgroup feeds a ring of shared memory by TMA while the
others multiply; the grid has one block a multiprocessor, and each takes every n-th tile of every slot, so that
neighbours read the same expert's tokens from the L2 cache.

In a decode step the shared experts come along: an MLP whose inner size is that of n experts is n experts that every token
visits with weight 1. These pieces are slots too, before those of the routed experts, but see all tokens at once, so that
their weights are read once.

A column of a wgmma depends on its own token only: a NaN, or what lies in a slot's unused rows, reaches no other token.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_obstacle
from pallas_kernels.compat import transpose_ref
from pallas_kernels.moe.gather import gather_slots, takes
from pallas_kernels.moe.plan import plan, plan_assigned
from pallas_kernels.moe.reference import swiglu
from pallas_kernels.moe.route import ROWS, Routing, assign, route_and_plan
from pallas_kernels.moe.schedule import Schedule, max_slots
from pallas_kernels.tuning import current

M = 64  # Rows of a wgmma, and the granule of the shapes this file takes.
GRANULE = 8  # Of a wgmma's columns.

# Shared memory of the ring, of 227 KiB; the rest is for barriers and the staged output.
RING_BYTES = 192 * 1024
# Registers of a thread: the producer gives away what the consumers' accumulators need.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232

# Up to this many tokens every slot sees all of them, and one block of the routing kernel makes all tables.
SHARED_ROWS = ROWS
# Rows of a slot where `Tuning.slot_rows` ends.
WIDEST_ROWS = 128
# From this many rows on the tensor cores are the limit: wider tiles, two warpgroups.
WIDE_ROWS = 64


@dataclass(frozen=True)
class Tiles:
    """How one matmul is cut: `consumers` warpgroups each keep `blocks` accumulators of 64 weight rows.

    Gate and up take one block each; `depth` is how many columns of the weights a stage of the ring holds.
    """

    depth: int
    stages: int
    consumers: int
    blocks: int


@dataclass(frozen=True)
class Config:
    """rows: token rows of a slot, a power of two; slots: how many there may be; shared: every slot sees all tokens.

    grid: blocks of a kernel, one a multiprocessor.
    pieces: how many experts' worth the shared experts are, 0 if the kernels leave them out; piece_rows: a piece's token
    rows, which are all tokens.
    """

    rows: int
    slots: int
    shared: bool
    up: Tiles
    down: Tiles
    grid: int
    pieces: int = 0
    piece_rows: int = 0


def tiles(rows: int, columns: int, out_rows: int, *, gated: bool, piece_rows: int = 0) -> Tiles:
    """Tiles of a matmul with weights [out_rows, columns] (twice, if gated) on slots of `rows` tokens, beside pieces."""
    wide = rows >= WIDE_ROWS
    consumers = 2 if wide and out_rows % (2 * M) == 0 else 1
    blocks = 2 if gated or (wide and out_rows % (2 * consumers * M) == 0) else 1
    depth = 128 if not wide and columns % 128 == 0 else 64
    stages = RING_BYTES // ((consumers * blocks * M + max(rows, piece_rows)) * depth * 2)
    return Tiles(depth, stages, consumers, blocks)


def configure(T: int, E: int, k: int, H: int, inner: int, shared_inner: int = 0) -> Config:
    """How T tokens with k of E experts each are worked on, and with shared experts of a joint inner size."""
    tuning, shared = current(), T <= SHARED_ROWS
    slot_rows = (rows for load, rows in tuning.slot_rows if T * k / E <= load)
    rows = SHARED_ROWS if shared else next(slot_rows, WIDEST_ROWS)
    slots = max_slots(T, k, E, rows, shared=shared)
    # The number of an H200, where there is no GPU to ask (lowering on a CPU).
    grid = getattr(jax.devices()[0], "core_count", None) or 132
    pieces = shared_inner // inner if tuning.most_piece_rows >= T and shared_inner % inner == 0 else 0
    piece_rows = -(-T // GRANULE) * GRANULE if pieces else 0
    up = tiles(rows, H, inner, gated=True, piece_rows=piece_rows)
    down = tiles(rows, inner, H, gated=False, piece_rows=piece_rows)
    return Config(rows, slots, shared, up, down, grid, pieces, piece_rows)


def obstacle(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, shared: tuple[jax.Array, jax.Array] | None = None
) -> str | None:
    """Why these kernels cannot take a call, None if they can."""
    inner, H = gate_up.shape[2:]
    if H % M or inner % M:
        return f"it needs a hidden size and an expert size of multiples of {M}, not {H} and {inner}"
    return hopper_obstacle(x.dtype, gate_up.dtype, down.dtype, *(w.dtype for w in shared or ()))


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def experts(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    shared: tuple[jax.Array, jax.Array] | None = None,
    *,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `api.experts`, in bfloat16, where `obstacle` is None. A tuner may give the config, a test `interpret`.

    Jitted, so that the layers of a model share one lowering.
    """
    config = config or _configured(x, gate_up, ids.shape[1], shared)
    E = gate_up.shape[0]
    tables = plan(ids, live, E, config.rows, config.slots, shared=config.shared, interpret=interpret)
    return _work(x, gate_up, down, weights, tables, live, shared, config, interpret)


@functools.partial(jax.jit, static_argnames=("routing", "config", "interpret"))
def routed_experts(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    shared: tuple[jax.Array, jax.Array] | None = None,
    *,
    routing: Routing,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `api.routed_experts`, where both `obstacle` and that of `route` are None.

    A step of few tokens has one kernel between the router's matmul and the experts', a larger decode step two, a prefill
    three.
    """
    T, E = logits.shape
    k = routing.top_k
    config = config or _configured(x, gate_up, k, shared)
    if config.shared:
        weights, tables = route_and_plan(
            logits, bias, live, config.rows, config.slots, routing=routing, interpret=interpret
        )
    else:
        weights, assigned = assign(logits, bias, live, routing=routing, interpret=interpret)
        tables = plan_assigned(
            assigned, T, routing.width, E, config.rows, config.slots, shared=False, interpret=interpret
        )
        tables = tables._replace(place=tables.place[:, :k])
    return _work(x, gate_up, down, weights, tables, live, shared, config, interpret)


def _configured(x: jax.Array, gate_up: jax.Array, k: int, shared: tuple[jax.Array, jax.Array] | None) -> Config:
    T, H = x.shape
    E, _, inner, _ = gate_up.shape
    shared_inner = 0 if shared is None else shared[1].shape[1]
    return configure(T, E, k, H, inner, shared_inner)


def _work(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    weights: jax.Array,
    tables: Schedule,
    live: jax.Array,
    shared: tuple[jax.Array, jax.Array] | None,
    config: Config,
    interpret: Any,
) -> jax.Array:
    T = x.shape[0]
    x_parts, gate_up_parts, down_parts = [gather(x, tables, config, interpret=interpret)], [gate_up], [down]
    if shared is not None and config.pieces:
        x_parts.append(_whole(x)[None])
        gate_up_parts.append(shared[0])
        down_parts.append(shared[1])
    h_parts = up_matmul(x_parts, gate_up_parts, tables, config, interpret=interpret)
    y, *y_pieces = down_matmul(h_parts, down_parts, tables, config, interpret=interpret)
    beside = [y_piece[i, :T] for y_piece in y_pieces for i in range(config.pieces)]
    if shared is not None and not config.pieces:
        beside = [swiglu(x, *shared)]
    return combine(y, weights, tables, live, beside).astype(x.dtype)


def gather(x: jax.Array, tables: Schedule, config: Config, *, interpret: Any = False) -> jax.Array:
    """The slots' rows of x [T, H]: [slots, rows, H], or [1, T, H] if all slots share them."""
    if config.shared:
        return _whole(x)[None]
    if not takes(x.shape[1]):
        return x.at[tables.token].get(mode="clip").reshape(-1, config.rows, x.shape[1])
    return gather_slots(x, tables.token, tables.num_slots, rows=config.rows, interpret=interpret)


def _whole(x: jax.Array) -> jax.Array:
    """Pads tokens: rows of tiles in memory are whole. Of fewer than a tile, TMA reads zeros past the last one."""
    T = x.shape[0]
    return x if T < GRANULE or T % GRANULE == 0 else jnp.pad(x, ((0, -T % GRANULE), (0, 0)))


def up_matmul(
    x: Sequence[jax.Array], gate_up: Sequence[jax.Array], tables: Schedule, config: Config, *, interpret: Any = False
) -> list[jax.Array]:
    """silu(x gate^T) * (x up^T) of the slots and, where there are any, of the pieces.

    Args:
        x: [slots, rows, H] or [1, T, H]; [1, piece_rows, H]. Of shared rows and of pieces there may be fewer.
        gate_up: [E, 2, I, H]; [2, pieces * I, H].

    Returns:
        [slots, rows, I]; [pieces, piece_rows, I].
    """
    E, _, inner, H = gate_up[0].shape
    w = [gate_up[0].reshape(E, 2 * inner, H), *(part.reshape(-1, H) for part in gate_up[1:])]
    return _matmul(config, inner, H, True, interpret)(tables.num_slots, tables.expert, *w, *x)


def down_matmul(
    h: Sequence[jax.Array], down: Sequence[jax.Array], tables: Schedule, config: Config, *, interpret: Any = False
) -> list[jax.Array]:
    """h down^T of the slots and, where there are any, of the pieces, over which it is yet to be summed.

    Args:
        h: [slots, rows, I]; [pieces, piece_rows, I].
        down: [E, H, I]; [H, pieces * I].

    Returns:
        [slots, rows, H]; [pieces, piece_rows, H].
    """
    _, H, inner = down[0].shape
    return _matmul(config, H, inner, False, interpret)(tables.num_slots, tables.expert, *down, *h)


def combine(
    y: jax.Array, weights: jax.Array, tables: Schedule, live: jax.Array, beside: Sequence[jax.Array] = ()
) -> jax.Array:
    """float32 [T, H]: each live token's weighted sum of its rows in y [slots, rows, H], plus what is beside it [T, H]."""
    picked_TkH = y.reshape(-1, y.shape[-1]).at[tables.place].get(mode="promise_in_bounds").astype(jnp.float32)
    out = (picked_TkH * weights[:, :, None]).sum(axis=1)
    for part in beside:
        out += part.astype(jnp.float32)
    # Not by a weight of 0: where a token is not live, its place is another's row or never written, NaN as it may be.
    return jnp.where(live[:, None], out, 0.0)


@functools.cache
def _matmul(config: Config, out_rows: int, columns: int, gated: bool, interpret: Any) -> Any:
    """kernel(num_slots [1], expert [slots], *weights, *tokens): products of the slots and, if there are any, of pieces.

    weights: [E, (2 *) out_rows, columns]; of pieces [2 * pieces * out_rows, columns] or [out_rows, pieces * columns].
    tokens: [slots or 1, rows, columns]; of pieces [pieces or 1, piece_rows, columns]; with fewer rows than a tile's 8 where
    there are fewer tokens.
    Gives bfloat16 [slots, rows, out_rows], of which only the slots that exist are written; [pieces, piece_rows, out_rows].
    """
    t = config.up if gated else config.down
    grid, pieces = config.grid, config.pieces
    kinds, most_rows = (2, max(config.rows, config.piece_rows)) if pieces else (1, config.rows)
    width = t.consumers * (1 if gated else t.blocks) * M  # output columns of a tile
    num_tiles, depths = out_rows // width, columns // t.depth
    if out_rows % width or columns % t.depth:
        raise ValueError(f"{t} does not divide weights of [{out_rows}, {columns}]")
    dtype = jnp.bfloat16

    def body(num_slots, expert, *refs, w_smem, x_smem, out_smem, full, free):
        w, x, out = refs[:kinds], refs[kinds : 2 * kinds], refs[2 * kinds :]
        warpgroup, first = lax.axis_index("warpgroup"), lax.axis_index("block")

        def share(slots):
            """How many tiles of the first slots are this block's."""
            return lax.div(slots * num_tiles - first + (grid - 1), jnp.int32(grid))

        # The pieces come first: with more tokens, a tile of theirs may take longer than one of an expert.
        of_pieces, mine = share(pieces), share(pieces + num_slots[0])
        steps = mine * depths

        def item(j):
            """Slot, counting the pieces, and tile of this block's j-th item of work."""
            place = first + j * grid
            return lax.div(place, jnp.int32(num_tiles)), lax.rem(place, jnp.int32(num_tiles))

        def stage(step):
            return lax.rem(step, jnp.int32(t.stages))

        @pl.when(warpgroup == t.consumers)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def fill(step):
                slot, tile = item(lax.div(step, jnp.int32(depths)))
                s, start = stage(step), lax.rem(step, jnp.int32(depths)) * t.depth
                at = pl.ds(start, t.depth)

                def copy(weights, tokens, rows):
                    """weights(row, up): the M rows from one of this tile's, of the up half if `up` is 1."""
                    for c in range(t.consumers):
                        for b in range(t.blocks):
                            row, up = (c * M, b) if gated else ((c * t.blocks + b) * M, 0)
                            plgpu.copy_gmem_to_smem(weights(tile * width + row, up), w_smem.at[s, c, b], full.at[s])
                    # An index that is not static may reach past the last token.
                    plgpu.copy_gmem_to_smem(
                        tokens.at[pl.ds(jnp.int32(0), rows), at], x_smem.at[s, pl.ds(0, rows)], full.at[s]
                    )

                @pl.when(pieces == 0 or slot >= pieces)
                def _copy_routed():
                    e = expert[slot - pieces]

                    def weights(row, up):
                        return w[0].at[e, pl.ds(up * out_rows + row, M), at]

                    copy(weights, x[0].at[0 if gated and config.shared else slot - pieces], config.rows)

                @pl.when(pieces > 0 and slot < pieces)
                def _copy_piece():
                    def weights(row, up):
                        if gated:
                            return w[1].at[pl.ds((up * pieces + slot) * out_rows + row, M), at]
                        return w[1].at[pl.ds(row, M), pl.ds(slot * columns + start, t.depth)]

                    copy(weights, x[1].at[0 if gated else slot], config.piece_rows)

            ahead = lax.min(steps, jnp.int32(t.stages))
            pl.loop(0, ahead)(fill)

            @pl.loop(ahead, steps)
            def _refill(step):
                plgpu.barrier_wait(free.at[stage(step)])
                fill(step)

            # Every completion of a barrier must be awaited before the kernel ends.
            @pl.loop(lax.max(steps - t.stages, jnp.int32(0)), steps)
            def _drain(step):
                plgpu.barrier_wait(free.at[stage(step)])

        @pl.when(warpgroup < t.consumers)
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            me = warpgroup

            def work(j, *, rows, out, first_slot):
                slot, tile = item(j)
                own = pl.ds(0, rows)

                def multiply(*sums):
                    @pl.loop(0, depths)
                    def _step(depth):
                        s = stage(j * depths + depth)
                        plgpu.barrier_wait(full.at[s])
                        for b in range(t.blocks):
                            plgpu.wgmma(sums[b], w_smem.at[s, me, b], transpose_ref(x_smem.at[s, own], (1, 0)))
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[s])

                    return tuple(total[...] for total in sums)

                sums = pl.run_scoped(multiply, *[plgpu.ACC((M, rows), jnp.float32)] * t.blocks)
                if gated:
                    gate, up = sums
                    sums = (gate * (1.0 / (1.0 + jnp.exp(-gate))) * up,)
                for b, total in enumerate(sums):
                    plgpu.wait_smem_to_gmem(0)  # until the store before this one has read the staging buffer
                    staged = transpose_ref(out_smem.at[me, own], (1, 0))
                    staged[...] = plgpu.layout_cast(total.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                    plgpu.commit_smem()
                    column = tile * width + (me * len(sums) + b) * M
                    plgpu.copy_smem_to_gmem(out_smem.at[me, own], out.at[slot - first_slot, :, pl.ds(column, M)])

            if pieces:
                pl.loop(0, of_pieces)(functools.partial(work, rows=config.piece_rows, out=out[1], first_slot=0))
            pl.loop(of_pieces, mine)(functools.partial(work, rows=config.rows, out=out[0], first_slot=pieces))
            plgpu.wait_smem_to_gmem(0)

    body.__name__ = "moe_up" if gated else "moe_down"
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=swizzled)
    shapes = ((config.slots, config.rows, out_rows), (pieces, config.piece_rows, out_rows))
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes[:kinds]],
        scratch_types={
            "w_smem": smem((t.stages, t.consumers, t.blocks, M, t.depth)),
            "x_smem": smem((t.stages, most_rows, t.depth)),
            "out_smem": smem((t.consumers, most_rows, M)),
            "full": plgpu.Barrier(num_arrivals=t.consumers * t.blocks + 1, num_barriers=t.stages),
            "free": plgpu.Barrier(num_arrivals=t.consumers, num_barriers=t.stages),
        },
        grid=(grid,),
        grid_names=("block",),
        num_threads=t.consumers + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )
