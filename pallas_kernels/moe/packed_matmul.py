"""The grouped matmuls of experts whose weights have codes of four bits (`moe_packed_up`, `moe_packed_down` in traces).

As `grouped_matmul.py`, with these differences. The ring holds codes and scales as they are in global memory, and a
multiplying warpgroup makes bfloat16 of them in registers, from where the wgmma takes its weights: activations stay as they
are, and nothing is written back. Making them takes about as long as reading them, so more warpgroups multiply: `splits`
teams take the stages in turn, each with sums of its own, and the first adds up the others' at the end of a tile.

Columns are multiplied in the order of `packed_codes`. Tokens come in it, and gate and up take their rows in it, so that
what they write is in it too.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.moe.activation import Clamp, joined
from pallas_kernels.moe.config import Config, M
from pallas_kernels.moe.grouped_matmul import OF_ROWS, PRODUCER_REGISTERS
from pallas_kernels.moe.packed_codes import (
    UNIT,
    converted,
    fragment_order,
    group_of,
    interpreted,
    loaded,
    tile_transforms,
)
from pallas_kernels.moe.slots import SlotTables
from pallas_kernels.moe.store_rows import is_short, short_slots, staging, store_tile
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.schemes import Scheme
from pallas_kernels.quant.values import Quantised
from pallas_kernels.ring import keep_full

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
    bias = None if bias is None else fragment_order(bias)
    return _matmul(x, gate_up, bias, tables, config, clamp, interpret)


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
    parts = Quantised(down.codes[:, None], down.scale[:, None], down.scheme, _with_parts(down.factor))
    return _matmul(h, parts, _with_parts(bias), tables, config, None, interpret)


def _with_parts(array: jax.Array | None) -> jax.Array | None:
    return None if array is None else array[:, None]


def _matmul(
    x: jax.Array,
    weight: Quantised,
    bias: jax.Array | None,
    tables: SlotTables,
    config: Config,
    clamp: Clamp | None,
    interpret: Any,
) -> jax.Array:
    """weight: [E, 2 or 1, out_rows, columns]; bias: [E, 2 or 1, out_rows]."""
    numbers = [] if weight.factor is None else [weight.factor]
    numbers += [] if bias is None else [bias.astype(jnp.float32)]
    kernel = _kernel(config, weight.scheme, *weight.shape[1:], bias is not None, clamp, interpret)
    return kernel(
        tables.num_slots, tables.expert, *short_slots(tables, config), *numbers, weight.codes, weight.scale, x
    )


@functools.cache
def _kernel(
    config: Config,
    scheme: Scheme,
    parts: int,
    out_rows: int,
    columns: int,
    biased: bool,
    clamp: Clamp | None,
    interpret: Any,
) -> Any:
    """kernel(num_slots [1], expert [slots], *used, *factor, *bias, codes, scale, tokens) -> [slots, rows, out_rows].

    used: `SlotTables.used`, if the configuration `is_short`: then only rows with a token are written.
    factor: float32 [E, parts], where the scheme has one. bias: float32 [E, parts, out_rows], if `biased`.
    codes, scale: of a weight [E, parts, out_rows, columns]; two parts are gate and up.
    tokens: bfloat16 [slots or 1, rows, columns]. With fewer than GRANULE tokens they have as many rows as there are tokens.
    """
    gated = parts == 2
    t, rows, grid = config.up if gated else config.down, config.rows, config.grid
    teams, members, short = t.splits, t.splits * t.consumers, is_short(config)
    width = t.consumers * (1 if gated else t.blocks) * M  # output columns of a tile
    num_tiles, depths, units = out_rows // width, pl.cdiv(columns, t.depth), t.depth // UNIT
    groups, pitch = t.depth // group_of(scheme), t.depth // 2
    if out_rows % width or columns % UNIT:
        raise ValueError(f"{t} does not divide weights of [{out_rows}, {columns}]")
    if t.stages % teams:
        # A warpgroup counts the completions of a barrier by its own waits.
        raise ValueError(f"{t}: a stage has to be the same team's every time")
    f32, bf16 = jnp.float32, jnp.bfloat16

    def body(num_slots, expert, *refs, w_smem, s_smem, x_smem, out_smem, full, free, **only):
        used, numbers, (codes, scale, x, out) = refs[0] if short else None, list(refs[int(short) : -4]), refs[-4:]
        bias = numbers.pop() if biased else None
        factor = numbers.pop() if scheme.factor else None
        warpgroup, first = lax.axis_index("warpgroup"), lax.axis_index("block")
        mine = lax.div(num_slots[0] * num_tiles - first + (grid - 1), jnp.int32(grid))
        steps = mine * depths

        def item(j):
            """Slot and tile of this block's j-th item of work."""
            place = first + j * grid
            return lax.div(place, jnp.int32(num_tiles)), lax.rem(place, jnp.int32(num_tiles))

        def stage(step):
            return lax.rem(step, jnp.int32(t.stages))

        def place_of(member, b, tile):
            """The part of accumulator b of a member of a team, and its first row in a tile."""
            return (b, tile * width + member * M) if gated else (0, tile * width + (member * t.blocks + b) * M)

        @pl.when(warpgroup == members)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def fill(step):
                slot, tile = item(lax.div(step, jnp.int32(depths)))
                s, depth = stage(step), lax.rem(step, jnp.int32(depths))
                e = expert[slot]
                for c in range(t.consumers):
                    for b in range(t.blocks):
                        part, row = place_of(c, b, tile)
                        at = pl.ds(row, M)
                        own = codes.at[e, part, at, pl.ds(depth * pitch, pitch)]
                        plgpu.copy_gmem_to_smem(own, w_smem.at[s, c, b], full.at[s])
                        own = scale.at[e, part, pl.ds(depth * groups, groups), at]
                        plgpu.copy_gmem_to_smem(own, s_smem.at[s, c, b], full.at[s])
                # A dynamic index, because a static one must not reach past the last token.
                own = x.at[
                    0 if gated and config.all_tokens else slot,
                    pl.ds(jnp.int32(0), rows),
                    pl.ds(depth * t.depth, t.depth),
                ]
                plgpu.copy_gmem_to_smem(own, x_smem.at[s], full.at[s])

            keep_full(fill, free, steps, t.stages)

        def loads(s, member):
            """Of all units of a stage, so that none has to be waited for between two products."""
            if interpret:
                return {}
            each = ((unit, b) for unit in range(units) for b in range(t.blocks))
            return {
                (u, b): loaded(w_smem.at[s, member, b], s_smem.at[s, member, b], scheme, u, ordered=gated)
                for u, b in each
            }

        def weights(s, member, b, unit, loads):
            if not interpret:
                return converted(loads[unit, b], scheme)
            operand = only["a_smem"].at[warpgroup]
            tile = w_smem.at[s, member, b], s_smem.at[s, member, b]
            operand[...] = interpreted(*tile, scheme, unit, ordered=gated)
            plgpu.commit_smem()
            return operand

        def multiplied(j, team, member):
            """This team's share of the sums of an item."""

            def multiply(*sums):
                start = lax.rem(team + (teams - 1) * lax.rem(j * depths, jnp.int32(teams)), jnp.int32(teams))

                @pl.loop(0, lax.div(depths - start + (teams - 1), jnp.int32(teams)))
                def _step(n):
                    s = stage(j * depths + start + n * teams)
                    plgpu.barrier_wait(full.at[s])
                    ahead = loads(s, member)
                    for unit in range(units):
                        tokens = x_smem.at[s, :, pl.ds(unit * UNIT, UNIT)]
                        for b in range(t.blocks):
                            plgpu.wgmma(sums[b], weights(s, member, b, unit, ahead), transpose_ref(tokens, (1, 0)))
                            # While one is multiplied the next is made.
                            plgpu.wgmma_wait(0 if interpret else 1)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[s])

                return tuple(total[...] for total in sums)

            return pl.run_scoped(multiply, *[plgpu.ACC((M, rows), f32)] * t.blocks)

        @pl.when(warpgroup < t.consumers)
        def _first_team():
            plgpu.set_max_registers(CONSUMER_REGISTERS[members], action="increase")
            me = warpgroup

            @pl.loop(0, mine)
            def _work(j):
                slot, tile = item(j)
                sums = multiplied(j, 0, me)
                if teams > 1:
                    plgpu.barrier_wait(only["summed"].at[me])
                    for team in range(1, teams):
                        parts = (only["sum_smem"].at[team - 1, me, b] for b in range(t.blocks))
                        sums = tuple(
                            total + load(part, (slice(None), slice(None)), layout=plgpu.Layout.WGMMA)
                            for total, part in zip(sums, parts, strict=True)
                        )
                    plgpu.barrier_arrive(only["taken"].at[me])

                def over_tokens(values_M):
                    return lax.broadcast_in_dim(values_M, (M, rows), [0])

                e = expert[slot]
                if factor is not None:
                    sums = tuple(total * factor[e, place_of(me, b, tile)[0]] for b, total in enumerate(sums))
                if bias is not None:
                    places = [place_of(me, b, tile) for b in range(t.blocks)]
                    biases = [load(bias, (e, part, pl.ds(row, M)), layout=OF_ROWS) for part, row in places]
                    sums = tuple(total + over_tokens(own) for total, own in zip(sums, biases, strict=True))
                if gated:
                    gate, up = sums
                    sums = (joined(gate, up, clamp) if clamp else gate * (1.0 / (1.0 + jnp.exp(-gate))) * up,)
                for b, total in enumerate(sums):
                    to = out.at[slot, :, pl.ds(place_of(me, b, tile)[1], M)]
                    store_tile(total.astype(bf16), out_smem.at[me], to, None if used is None else used[slot])

            plgpu.wait_smem_to_gmem(0)

        def other_teams():
            plgpu.set_max_registers(CONSUMER_REGISTERS[members], action="increase")
            team, me = lax.div(warpgroup, jnp.int32(t.consumers)), lax.rem(warpgroup, jnp.int32(t.consumers))
            sum_smem, summed, taken = (only[name] for name in ("sum_smem", "summed", "taken"))

            @pl.loop(0, mine)
            def _work(j):
                sums = multiplied(j, team, me)

                @pl.when(j > 0)
                def _():
                    plgpu.barrier_wait(taken.at[me])

                for b, total in enumerate(sums):
                    sum_smem[team - 1, me, b] = total
                plgpu.barrier_arrive(summed.at[me])

            @pl.when(mine > 0)
            def _():
                plgpu.barrier_wait(taken.at[me])

        if teams > 1:
            pl.when((warpgroup >= t.consumers) & (warpgroup < members))(other_teams)

    body.__name__ = "moe_packed_up" if gated else "moe_packed_down"
    smem = functools.partial(
        plgpu.SMEM, dtype=bf16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )
    tiles = (t.stages, t.consumers, t.blocks)
    scratch: dict[str, Any] = {
        "w_smem": plgpu.SMEM((*tiles, M, pitch), jnp.uint8, transforms=tile_transforms(pitch)),
        "s_smem": plgpu.SMEM((*tiles, groups, M), scheme.scale),
        "x_smem": smem((t.stages, rows, t.depth)),
        "out_smem": staging(t.consumers, rows, M, bf16, short=short),
        "full": plgpu.Barrier(num_arrivals=2 * t.consumers * t.blocks + 1, num_barriers=t.stages),
        "free": plgpu.Barrier(num_arrivals=t.consumers, num_barriers=t.stages),
    }
    if teams > 1:
        scratch |= {
            "sum_smem": plgpu.SMEM((teams - 1, t.consumers, t.blocks, M, rows), f32),
            "summed": plgpu.Barrier(num_arrivals=teams - 1, num_barriers=t.consumers),
            "taken": plgpu.Barrier(num_arrivals=1, num_barriers=t.consumers),
        }
    if interpret:
        scratch["a_smem"] = smem((members, M, UNIT))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((config.slots, rows, out_rows), bf16),
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("block",),
        num_threads=members + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )
