"""The grouped matmuls of experts whose weights have codes of four bits (`moe_packed_up`, `moe_packed_down` in traces, or both
as `moe_packed`).

As `grouped_matmul.py`, with these differences. The ring holds codes and scales as they are in global memory, and a
multiplying warpgroup makes bfloat16 of them in registers, from where the wgmma takes its weights: activations stay as they
are, and nothing is written back. Making them takes about as long as reading them, so more warpgroups multiply: `splits`
teams take the stages in turn, each with sums of its own, and the first adds up the others' at the end of a tile.

Columns are multiplied in the order of `packed_codes`. Tokens come in it, and gate and up take their rows in it, so that
what they write is in it too.

Both matmuls may be one kernel (`joined_matmuls`), whose blocks do all their items of gate and up, then all of down. The ring
runs on: codes of down are copied while the last tiles of gate and up are multiplied, and only tokens wait, until a counter in
global memory says that all tiles of their slot are written. For the blocks that wait see `meet.py`: all of them must be on the
device at once, which one block a multiprocessor is, and what they wait for waits for nothing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, run_in_place, transpose_ref
from pallas_kernels.meet import arrive, wait_for
from pallas_kernels.moe.activation import Clamp
from pallas_kernels.moe.config import Config, M, Tiles
from pallas_kernels.moe.grouped_matmul import PRODUCER_REGISTERS
from pallas_kernels.moe.packed_codes import UNIT, fragment_order, tile_transforms
from pallas_kernels.moe.packed_work import Matmul, Work, share
from pallas_kernels.moe.ring import keep_full
from pallas_kernels.moe.slots import SlotTables
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.values import Quantised

# Registers of a thread, by how many warpgroups multiply. Together with the producer's they must not be more than what the
# compiler gives each warpgroup at first, 65536 by the number of threads and rounded down to eights: the last one to ask
# would wait forever.
CONSUMER_REGISTERS = {1: 232, 2: 232, 3: 152, 4: 104}


def packed_experts(
    x: jax.Array, parameters: ExpertWeights, tables: SlotTables, config: Config, *, interpret: Any = False
) -> jax.Array:
    """The routed experts of the slots' rows, x as for `up_matmul`: bfloat16 [slots, rows, H]."""
    gate_up, down = parameters.gate_up, parameters.down
    assert isinstance(gate_up, Quantised)
    assert isinstance(down, Quantised)
    up_bias, down_bias = parameters.biases or (None, None)
    if config.joined and gate_up.scheme is down.scheme:
        return joined_matmuls(
            x, gate_up, down, tables, config, up_bias, down_bias, parameters.clamp, interpret=interpret
        )
    h = up_matmul(x, gate_up, tables, config, up_bias, parameters.clamp, interpret=interpret)
    return down_matmul(h, down, tables, config, down_bias, interpret=interpret)


def up_matmul(
    x: jax.Array,
    gate_up: Quantised,
    tables: SlotTables,
    config: Config,
    bias: jax.Array | None = None,
    clamp: Clamp | None = None,
    *,
    interpret: Any = False,
) -> jax.Array:
    """silu(x gate^T) * (x up^T) of the slots: bfloat16 [slots, rows, I], columns in `fragment_order`.

    Args:
        x: [slots, rows, H], or [1, T, H] if every slot has all tokens; columns in `fragment_order`.
        gate_up: [E, 2, I, H].
        bias: [E, 2, I].
        clamp: as in `api.experts`.
    """
    return _run([_up(gate_up, bias, config, clamp)], x, tables, config, interpret)


def down_matmul(
    h: jax.Array,
    down: Quantised,
    tables: SlotTables,
    config: Config,
    bias: jax.Array | None = None,
    *,
    interpret: Any = False,
) -> jax.Array:
    """h down^T of the slots: bfloat16 [slots, rows, H].

    Args:
        h: [slots, rows, I], columns in `fragment_order`.
        down: [E, H, I].
        bias: [E, H].
    """
    return _run([_down(down, bias, config)], h, tables, config, interpret)


def joined_matmuls(
    x: jax.Array,
    gate_up: Quantised,
    down: Quantised,
    tables: SlotTables,
    config: Config,
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    clamp: Clamp | None = None,
    *,
    interpret: Any = False,
) -> jax.Array:
    """`down_matmul` of `up_matmul`, in one kernel. The interpreter gives it one block, because blocks cannot wait there."""
    config = dataclasses.replace(config, grid=1) if interpret else config
    operands = [_up(gate_up, up_bias, config, clamp), _down(down, down_bias, config)]
    return _run(operands, x, tables, config, interpret)


# A matmul, and the arrays of its weights.
Operands = tuple[Matmul, list[jax.Array]]


def _up(gate_up: Quantised, bias: jax.Array | None, config: Config, clamp: Clamp | None) -> Operands:
    bias = None if bias is None else fragment_order(bias)
    return _operands(config.up, gate_up, bias, config.all_tokens, clamp)


def _down(down: Quantised, bias: jax.Array | None, config: Config) -> Operands:
    parts = Quantised(down.codes[:, None], down.scale[:, None], down.scheme, _with_parts(down.factor))
    return _operands(config.down, parts, _with_parts(bias), False, None)


def _with_parts(array: jax.Array | None) -> jax.Array | None:
    return None if array is None else array[:, None]


def _operands(
    tiles: Tiles, weight: Quantised, bias: jax.Array | None, same_tokens: bool, clamp: Clamp | None
) -> Operands:
    """weight: [E, 2 or 1, out_rows, columns]; bias: [E, 2 or 1, out_rows]."""
    numbers = [] if weight.factor is None else [weight.factor]
    numbers += [] if bias is None else [bias.astype(jnp.float32)]
    _, parts, out_rows, columns = weight.shape
    matmul = Matmul(tiles, weight.scheme, parts, out_rows, columns, bias is not None, same_tokens, clamp)
    return matmul, [*numbers, weight.codes, weight.scale]


def _run(operands: list[Operands], x: jax.Array, tables: SlotTables, config: Config, interpret: Any) -> jax.Array:
    matmuls = tuple(matmul for matmul, _ in operands)
    arrays = [array for _, arrays in operands for array in arrays]
    kernel = _kernel(matmuls, config.rows, config.slots, config.grid, interpret)
    arrays = [tables.num_slots, tables.expert, *arrays, x]
    if len(matmuls) == 1:
        return kernel(*arrays)
    # Made by XLA they are a launch of their own.
    zeros = jnp.zeros(config.slots, jnp.int32) if tables.zeros is None else tables.zeros
    return kernel(zeros, *arrays)


@functools.cache
def _kernel(matmuls: tuple[Matmul, ...], rows: int, slots: int, grid: int, interpret: Any) -> Any:
    """kernel(num_slots [1], expert [slots], *weights, tokens) -> [slots, rows, out_rows].

    For two matmuls kernel(written [at least slots], num_slots, ...), which counts the first one's tiles of each slot from 0 on.
    weights: of each matmul *factor, *bias, codes, scale.
    factor: float32 [E, parts], where the scheme has one. bias: float32 [E, parts, out_rows], if it is biased.
    codes, scale: of a weight [E, parts, out_rows, columns]; two parts are gate and up.
    tokens: bfloat16 [slots or 1, rows, columns]. With fewer than GRANULE tokens they have as many rows as there are tokens.
    """
    t, both = matmuls[0].tiles, len(matmuls) == 2
    teams, members = t.splits, t.splits * t.consumers
    if len({(m.scheme, m.tiles.stages, m.tiles.splits, m.tiles.consumers) for m in matmuls}) > 1:
        raise ValueError(f"matmuls of one kernel have one ring and the same teams, not {[m.tiles for m in matmuls]}")
    most_blocks, most_depth = (max(getattr(m.tiles, name) for m in matmuls) for name in ("blocks", "depth"))
    most_codes = max(m.tiles.blocks * m.tiles.depth for m in matmuls)
    # A stage has room for any of the matmuls. Where one needs less of it, its own tiles are numbered so far apart.
    strides = [(most_codes // (m.tiles.blocks * m.tiles.depth), most_depth // m.tiles.depth) for m in matmuls]
    if any(most_codes % (m.tiles.blocks * m.tiles.depth) or most_depth % m.tiles.depth for m in matmuls):
        raise ValueError(f"stages of one of {[m.tiles for m in matmuls]} are no multiple of the other's")
    # Tiles of a slot that the second matmul waits for.
    tiles_before = matmuls[0].num_tiles * t.consumers
    f32, bf16 = jnp.float32, jnp.bfloat16

    def body(num_slots, expert, *refs, w_smem, s_smem, x_smem, out_smem, full, free, **only):
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        rest, works = list(refs), []
        weights = [[rest.pop(0) for _ in range(m.num_arrays)] for m in matmuls]
        tokens: Any = rest.pop(0)
        written: Any = rest.pop(0) if both else None
        rings = [list(parts) for parts in (w_smem, s_smem, x_smem)]
        first: Any = block
        items: Any = 0
        steps: Any = 0
        for i, m in enumerate(matmuls):
            mine, following = share(first, num_slots[0] * m.num_tiles, grid)
            w, s, x = (ring[i % len(ring)] for ring in rings)
            work = Work(
                m, grid, expert, weights[i], tokens, rest[i], w, s, x, full[i], *strides[i],
                first, mine, items_before=items, steps_before=steps, a_smem=only.get("a_smem"),
            )  # fmt: skip
            works.append(work)
            # The next matmul's first items are of the blocks that have one item less of this one.
            first, items, steps, tokens = following, items + mine, steps + work.steps, work.out

        def signal(work, j):
            """Says that the j-th tile of the first matmul is written."""
            slot, _ = work.item(j)
            if interpret:
                plgpu.barrier_arrive(only["written"].at[slot])
            else:
                arrive(written.at[slot])

        def wait(work, step):
            """Before the first step that has tokens of a slot: until the first matmul has written them."""
            j, depth = (f(step, jnp.int32(work.matmul.depths)) for f in (lax.div, lax.rem))
            (slot, _), (before, _) = work.item(j), work.item(j - 1)

            @pl.when((depth == 0) & ((j == 0) | (slot != before)))
            def _wait():
                if interpret:
                    plgpu.barrier_wait(only["written"].at[slot])
                else:
                    wait_for(written.at[slot], tiles_before)

        @pl.when(warpgroup == members)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            if not both:
                (work,) = works

                def fill(step):
                    work.copy_weights(step)
                    work.copy_tokens(step)

                keep_full(fill, free, steps, t.stages)
                return

            up, down = works

            def fill_weights(step):
                pl.when(step < up.steps)(lambda: up.copy_weights(step))
                pl.when(step >= up.steps)(lambda: down.copy_weights(step - up.steps))

            def fill_tokens(step):
                pl.when(step < up.steps)(lambda: up.copy_tokens(step))

                @pl.when(step >= up.steps)
                def _():
                    wait(down, step - up.steps)
                    down.copy_tokens(step - up.steps)

            keep_full(fill_weights, free, steps, t.stages, fill_tokens)

        @pl.when(warpgroup < t.consumers)
        def _first_team():
            plgpu.set_max_registers(CONSUMER_REGISTERS[members], action="increase")
            me = warpgroup

            def complete(work, signals, j):
                slot, tile = work.item(j)
                sums = work.multiplied(j, 0, me, warpgroup, free)
                if teams > 1:
                    plgpu.barrier_wait(only["summed"].at[me])
                    for team in range(1, teams):
                        parts = (only["sum_smem"].at[team - 1, me, b] for b in range(len(sums)))
                        sums = tuple(
                            total + load(part, (slice(None), slice(None)), layout=plgpu.Layout.WGMMA)
                            for total, part in zip(sums, parts, strict=True)
                        )
                    plgpu.barrier_arrive(only["taken"].at[me])
                for b, total in enumerate(work.results(sums, j, me)):
                    plgpu.wait_smem_to_gmem(0)  # until the store before this one has read the staging buffer
                    if signals:  # only now, when that store has had an item's time to complete
                        pl.when(j > 0)(lambda: signal(work, j - 1))
                    staged = transpose_ref(out_smem.at[me], (1, 0))
                    staged[...] = plgpu.layout_cast(total.astype(bf16), plgpu.Layout.WGMMA_TRANSPOSED)
                    plgpu.commit_smem()
                    at = pl.ds(work.matmul.place_of(me, b, tile)[1], M)
                    plgpu.copy_smem_to_gmem(out_smem.at[me], work.out.at[slot, :, at])

            for i, work in enumerate(works):
                signals = i + 1 < len(works)
                pl.loop(0, work.items)(functools.partial(complete, work, signals))
                plgpu.wait_smem_to_gmem(0)
                if signals:
                    pl.when(work.items > 0)(functools.partial(signal, work, work.items - 1))

        def other_teams():
            plgpu.set_max_registers(CONSUMER_REGISTERS[members], action="increase")
            team, me = lax.div(warpgroup, jnp.int32(t.consumers)), lax.rem(warpgroup, jnp.int32(t.consumers))
            sum_smem, summed, taken = (only[name] for name in ("sum_smem", "summed", "taken"))

            def hand_over(work, j):
                sums = work.multiplied(j, team, me, warpgroup, free)

                @pl.when(work.items_before + j > 0)
                def _():
                    plgpu.barrier_wait(taken.at[me])

                for b, total in enumerate(sums):
                    sum_smem[team - 1, me, b] = total
                plgpu.barrier_arrive(summed.at[me])

            for work in works:
                pl.loop(0, work.items)(functools.partial(hand_over, work))

            @pl.when(items > 0)
            def _():
                plgpu.barrier_wait(taken.at[me])

        if teams > 1:
            pl.when((warpgroup >= t.consumers) & (warpgroup < members))(other_teams)

    body.__name__ = "moe_packed" if both else "moe_packed_up" if matmuls[0].gated else "moe_packed_down"
    smem = functools.partial(
        plgpu.SMEM, dtype=bf16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )
    codes, scales, tokens = [], [], []
    for m, (w_stride, x_stride) in zip(matmuls, strides, strict=True):
        tiles = (t.stages * w_stride, t.consumers, m.tiles.blocks)
        codes.append(plgpu.SMEM((*tiles, M, m.pitch), jnp.uint8, transforms=tile_transforms(m.pitch)))
        scales.append(plgpu.SMEM((*tiles, m.groups, M), m.scheme.scale))
        tokens.append(smem((t.stages * x_stride, rows, m.tiles.depth)))
    scratch: dict[str, Any] = {
        "w_smem": _overlaid(codes, interpret),
        "s_smem": _overlaid(scales, interpret),
        "x_smem": _overlaid(tokens, interpret),
        "out_smem": smem((t.consumers, rows, M)),
        "full": [
            plgpu.Barrier(num_arrivals=2 * t.consumers * m.tiles.blocks + 1, num_barriers=t.stages) for m in matmuls
        ],
        "free": plgpu.Barrier(num_arrivals=t.consumers, num_barriers=t.stages),
    }
    if teams > 1:
        scratch |= {
            "sum_smem": plgpu.SMEM((teams - 1, t.consumers, most_blocks, M, rows), f32),
            "summed": plgpu.Barrier(num_arrivals=teams - 1, num_barriers=t.consumers),
            "taken": plgpu.Barrier(num_arrivals=1, num_barriers=t.consumers),
        }
    if interpret:
        scratch["a_smem"] = smem((members, M, UNIT))
        if both:
            scratch["written"] = plgpu.Barrier(num_arrivals=tiles_before, num_barriers=slots)
    outs = [jax.ShapeDtypeStruct((slots, rows, m.out_rows), bf16) for m in matmuls]
    arguments: dict[str, Any] = {
        "scratch_types": scratch,
        "grid": (grid,),
        "grid_names": ("block",),
        "num_threads": members + 1,
        "thread_name": "warpgroup",
        "interpret": interpret,
        "compiler_params": plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    }
    if not both:
        return plgpu.kernel(body, out_type=outs[0], **arguments)

    def run(written: jax.Array, *inputs: jax.Array) -> jax.Array:
        return run_in_place(body, inputs, [written], outs, **arguments)[-1]

    return run


def _overlaid(types: list[Any], interpret: Any) -> Any:
    """Scratch of these types in the same memory, each from its start on; equal ones are one.

    To the interpreter a union is in use as a whole, not by stages: there they are apart.
    """
    equal = all(kind == types[0] for kind in types)
    return types[:1] if equal else types if interpret else plgpu.RefUnion(*types)
