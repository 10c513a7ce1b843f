"""Routed experts on Hopper: after `plan`, two Mosaic GPU kernels stream the weights of every expert that has tokens.

A decode step is bound by reading weights, so they are the 64 rows of a wgmma and the tokens are its columns, of which it
takes as few as 8 (a slot of 8 or 16 tokens wastes little). One warpgroup feeds a ring of shared memory by TMA while the
others multiply; the grid has one block a multiprocessor, and each takes every n-th tile of every slot, so that
neighbours read the same expert's tokens from the L2 cache.

A column of a wgmma depends on its own token only: a NaN, or what lies in a slot's unused rows, reaches no other token.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_obstacle
from pallas_kernels.compat import transpose_ref
from pallas_kernels.moe.plan import MAX_ASSIGNMENTS, plan, plan_assigned
from pallas_kernels.moe.route import ROWS, Routing, assign, route, route_and_plan
from pallas_kernels.moe.schedule import Schedule, max_slots, schedule

M = 64  # Rows of a wgmma, and the granule of the shapes this file takes.

# Shared memory of the ring, of 227 KiB; the rest is for barriers and the staged output.
RING_BYTES = 192 * 1024
# Registers of a thread: the producer gives away what the consumers' accumulators need.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232

# Up to this many tokens every slot sees all of them, and one block of the routing kernel makes all tables.
SHARED_ROWS = ROWS
# Up to this many assignments the routing kernel lays ids out for the plan: each token takes a multiple of 8, which a
# prefill would pay for.
MAX_ASSIGNED = 2048
# (most tokens an expert has on average, rows of a slot): wider slots read weights less often and pad more.
ROWS_BY_LOAD = ((24.0, 16), (96.0, 64), (float("inf"), 128))
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
    """

    rows: int
    slots: int
    shared: bool
    up: Tiles
    down: Tiles
    grid: int


def tiles(rows: int, columns: int, out_rows: int, *, gated: bool) -> Tiles:
    """Tiles of a matmul with weights [out_rows, columns] (twice, if gated) on slots of `rows` tokens."""
    wide = rows >= WIDE_ROWS
    consumers = 2 if wide and out_rows % (2 * M) == 0 else 1
    blocks = 2 if gated or (wide and out_rows % (2 * consumers * M) == 0) else 1
    depth = 128 if not wide and columns % 128 == 0 else 64
    stages = RING_BYTES // ((consumers * blocks * M + rows) * depth * 2)
    return Tiles(depth, stages, consumers, blocks)


def configure(T: int, E: int, k: int, H: int, inner: int) -> Config:
    """How T tokens with k of E experts each are worked on."""
    shared = T <= SHARED_ROWS
    rows = SHARED_ROWS if shared else next(rows for load, rows in ROWS_BY_LOAD if T * k / E <= load)
    slots = max_slots(T, k, E, rows, shared=shared)
    # The number of an H200, where there is no GPU to ask (lowering on a CPU).
    grid = getattr(jax.devices()[0], "core_count", None) or 132
    return Config(rows, slots, shared, tiles(rows, H, inner, gated=True), tiles(rows, inner, H, gated=False), grid)


def obstacle(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> str | None:
    """Why these kernels cannot take a call, None if they can."""
    inner, H = gate_up.shape[2:]
    if H % M or inner % M:
        return f"it needs a hidden size and an expert size of multiples of {M}, not {H} and {inner}"
    return hopper_obstacle(x.dtype, gate_up.dtype, down.dtype)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def experts(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    *,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `api.experts`, in bfloat16, where `obstacle` is None. A tuner may give the config, a test `interpret`.

    Jitted, so that the layers of a model share one lowering.
    """
    config = config or _configured(x, gate_up, ids.shape[1])
    tables = tabulate(ids, live, gate_up.shape[0], config, interpret=interpret)
    return _work(x, gate_up, down, weights, tables, live, config, interpret)


@functools.partial(jax.jit, static_argnames=("routing", "config", "interpret"))
def routed_experts(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    *,
    routing: Routing,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `api.routed_experts`, where both `obstacle` and that of `route` are None.

    A step of few tokens has one kernel between the router's matmul and the experts', a larger decode step two.
    """
    T, E = logits.shape
    k = routing.top_k
    config = config or _configured(x, gate_up, k)
    if config.shared:
        weights, tables = route_and_plan(
            logits, bias, live, config.rows, config.slots, routing=routing, interpret=interpret
        )
    elif T * routing.width <= MAX_ASSIGNED:
        weights, assigned = assign(logits, bias, live, routing=routing, interpret=interpret)
        tables = plan_assigned(
            assigned, T, routing.width, E, config.rows, config.slots, shared=False, interpret=interpret
        )
        tables = tables._replace(place=tables.place[:, :k])
    else:
        weights, ids = route(logits, bias, routing=routing, interpret=interpret)
        tables = tabulate(ids, live, E, config, interpret=interpret)
    return _work(x, gate_up, down, weights, tables, live, config, interpret)


def _configured(x: jax.Array, gate_up: jax.Array, k: int) -> Config:
    T, H = x.shape
    E, _, inner, _ = gate_up.shape
    return configure(T, E, k, H, inner)


def _work(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    weights: jax.Array,
    tables: Schedule,
    live: jax.Array,
    config: Config,
    interpret: Any,
) -> jax.Array:
    x_slots = gather(x, tables, config)
    h = up_matmul(x_slots, gate_up, tables, config, interpret=interpret)
    y = down_matmul(h, down, tables, config, interpret=interpret)
    return combine(y, weights, tables, live).astype(x.dtype)


def tabulate(ids: jax.Array, live: jax.Array, E: int, config: Config, *, interpret: Any = False) -> Schedule:
    """The layer's tables, by a kernel or, for a prefill that is too large for it, by XLA."""
    if ids.size > MAX_ASSIGNMENTS:
        return schedule(ids, live, E, config.rows, shared=config.shared)
    return plan(ids, live, E, config.rows, config.slots, shared=config.shared, interpret=interpret)


def gather(x: jax.Array, tables: Schedule, config: Config) -> jax.Array:
    """The slots' rows of x [T, H]: [slots, rows, H], or [1, rows, H] if all slots share them."""
    T, H = x.shape
    if config.shared:
        return jnp.pad(x, ((0, config.rows - T), (0, 0)))[None]
    return x.at[tables.token].get(mode="clip").reshape(-1, config.rows, H)


def up_matmul(
    x: jax.Array, gate_up: jax.Array, tables: Schedule, config: Config, *, interpret: Any = False
) -> jax.Array:
    """silu(x gate^T) * (x up^T): [slots, rows, I] from x [slots or 1, rows, H] and gate_up [E, 2, I, H]."""
    E, _, inner, H = gate_up.shape
    kernel = _matmul(config.up, config.grid, config.slots, config.rows, inner, H, True, config.shared, interpret)
    return kernel(gate_up.reshape(E, 2 * inner, H), x, tables.num_slots, tables.expert)


def down_matmul(
    h: jax.Array, down: jax.Array, tables: Schedule, config: Config, *, interpret: Any = False
) -> jax.Array:
    """h down^T: [slots, rows, H] from h [slots, rows, I] and down [E, H, I]."""
    _, H, inner = down.shape
    kernel = _matmul(config.down, config.grid, config.slots, config.rows, H, inner, False, False, interpret)
    return kernel(down, h, tables.num_slots, tables.expert)


def combine(y: jax.Array, weights: jax.Array, tables: Schedule, live: jax.Array) -> jax.Array:
    """float32 [T, H]: each live token's weighted sum of its rows in y [slots, rows, H]."""
    picked_TkH = y.reshape(-1, y.shape[-1]).at[tables.place].get(mode="promise_in_bounds").astype(jnp.float32)
    # Not by a weight of 0: where a token is not live, its place is another's row or never written, NaN as it may be.
    out = (picked_TkH * weights[:, :, None]).sum(axis=1)
    return jnp.where(live[:, None], out, 0.0)


@functools.cache
def _matmul(
    t: Tiles, grid: int, slots: int, rows: int, out_rows: int, columns: int, gated: bool, shared: bool, interpret: Any
) -> Any:
    """kernel(w [E, (2 *) out_rows, columns], x [slots or 1, rows, columns], num_slots [1], expert [slots]).

    Gives bfloat16 [slots, rows, out_rows], of which only the slots that exist are written.
    """
    width = t.consumers * (1 if gated else t.blocks) * M  # output columns of a tile
    num_tiles, depths = out_rows // width, columns // t.depth
    if out_rows % width or columns % t.depth:
        raise ValueError(f"{t} does not divide weights of [{out_rows}, {columns}]")
    dtype = jnp.bfloat16

    def body(w, x, num_slots, expert, out, w_smem, x_smem, out_smem, full, free):
        warpgroup, first = lax.axis_index("warpgroup"), lax.axis_index("block")
        mine = lax.div(num_slots[0] * num_tiles - first + (grid - 1), jnp.int32(grid))
        steps = mine * depths

        def item(j):
            """Slot and tile of this block's j-th piece of work."""
            place = first + j * grid
            return lax.div(place, jnp.int32(num_tiles)), lax.rem(place, jnp.int32(num_tiles))

        def stage(step):
            return lax.rem(step, jnp.int32(t.stages))

        def weight_row(tile, consumer, block):
            if gated:
                return block * out_rows + tile * width + consumer * M
            return tile * width + (consumer * t.blocks + block) * M

        @pl.when(warpgroup == t.consumers)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def fill(step):
                slot, tile = item(lax.div(step, jnp.int32(depths)))
                s, at = stage(step), pl.ds(lax.rem(step, jnp.int32(depths)) * t.depth, t.depth)
                e = expert[slot]
                for c in range(t.consumers):
                    for b in range(t.blocks):
                        box = w.at[e, pl.ds(weight_row(tile, c, b), M), at]
                        plgpu.copy_gmem_to_smem(box, w_smem.at[s, c, b], full.at[s])
                plgpu.copy_gmem_to_smem(x.at[0 if shared else slot, :, at], x_smem.at[s], full.at[s])

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

            @pl.loop(0, mine)
            def _work(j):
                slot, tile = item(j)

                def multiply(*sums):
                    @pl.loop(0, depths)
                    def _step(depth):
                        s = stage(j * depths + depth)
                        plgpu.barrier_wait(full.at[s])
                        for b in range(t.blocks):
                            plgpu.wgmma(sums[b], w_smem.at[s, me, b], transpose_ref(x_smem.at[s], (1, 0)))
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[s])

                    return tuple(total[...] for total in sums)

                sums = pl.run_scoped(multiply, *[plgpu.ACC((M, rows), jnp.float32)] * t.blocks)
                if gated:
                    gate, up = sums
                    sums = (gate * (1.0 / (1.0 + jnp.exp(-gate))) * up,)
                for b, total in enumerate(sums):
                    plgpu.wait_smem_to_gmem(0)  # until the store before this one has read the staging buffer
                    staged = transpose_ref(out_smem.at[me], (1, 0))
                    staged[...] = plgpu.layout_cast(total.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                    plgpu.commit_smem()
                    column = tile * width + (me * len(sums) + b) * M
                    plgpu.copy_smem_to_gmem(out_smem.at[me], out.at[slot, :, pl.ds(column, M)])

            plgpu.wait_smem_to_gmem(0)

    body.__name__ = "moe_up" if gated else "moe_down"
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=swizzled)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((slots, rows, out_rows), dtype),
        scratch_types={
            "w_smem": smem((t.stages, t.consumers, t.blocks, M, t.depth)),
            "x_smem": smem((t.stages, rows, t.depth)),
            "out_smem": smem((t.consumers, rows, M)),
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
