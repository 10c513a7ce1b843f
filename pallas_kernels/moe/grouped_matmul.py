"""The grouped matmuls of the experts: two Mosaic GPU kernels for Hopper (`moe_up`, `moe_down` in traces).

A decode step is bound by reading weights, so the weights are the 64 rows of a wgmma and the tokens its columns, of which
there may be as few as 8: a slot of 8 or 16 tokens wastes little. One warpgroup feeds a ring of shared memory by TMA while
the others multiply. The grid has one block a multiprocessor, and each block works on every n-th tile of all slots, so
that neighbours read the same expert's tokens from the L2 cache.

Shared experts may run in the same kernels: an MLP whose inner size is that of n experts is n experts that every token
visits with weight 1. These pieces are slots too, before those of the routed experts, but have all tokens at once, so that
their weights are read once.

A column of a wgmma depends on its own token only: a NaN, or what lies in a slot's unused rows, reaches no other token.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.moe.activation import Clamp, joined
from pallas_kernels.moe.config import Config, M
from pallas_kernels.moe.slots import SlotTables
from pallas_kernels.moe.store_rows import is_short, short_slots, staging, store_tile
from pallas_kernels.ring import keep_full

OF_ROWS = plgpu.Layout.WGMMA.reduce(1)
# Registers of a thread: the producer gives away what the consumers' accumulators need.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


def up_matmul(
    x: Sequence[jax.Array],
    gate_up: Sequence[jax.Array],
    tables: SlotTables,
    config: Config,
    bias: jax.Array | None = None,
    clamp: Clamp | None = None,
    *,
    interpret: Any = False,
) -> list[jax.Array]:
    """silu(x gate^T) * (x up^T) of the slots and, where there are any, of the pieces; all bfloat16.

    Args:
        x: [slots, rows, H], or [1, T, H] if every slot has all tokens; of pieces [1, T, H].
        gate_up: [E, 2, I, H]; of pieces [2, pieces * I, H].
        bias: [E, 2, I], where there are no pieces.
        clamp: as in `api.experts`.

    Returns:
        [slots, rows, I]; of pieces [pieces, piece_rows, I].
    """
    E, _, inner, H = gate_up[0].shape
    w = [gate_up[0].reshape(E, 2 * inner, H), *(part.reshape(-1, H) for part in gate_up[1:])]
    biases = [] if bias is None else [bias.reshape(E, 2 * inner).astype(jnp.float32)]
    kernel = _matmul(config, inner, H, True, bias is not None, clamp, interpret)
    return kernel(tables.num_slots, tables.expert, *short_slots(tables, config), *biases, *w, *x)


def down_matmul(
    h: Sequence[jax.Array],
    down: Sequence[jax.Array],
    tables: SlotTables,
    config: Config,
    bias: jax.Array | None = None,
    *,
    interpret: Any = False,
) -> list[jax.Array]:
    """h down^T of the slots and, where there are any, of the pieces, over which it has still to be summed; all bfloat16.

    Args:
        h: [slots, rows, I]; of pieces [pieces, piece_rows, I].
        down: [E, H, I]; of pieces [H, pieces * I].
        bias: [E, H], where there are no pieces.

    Returns:
        [slots, rows, H]; of pieces [pieces, piece_rows, H].
    """
    _, H, inner = down[0].shape
    biases = [] if bias is None else [bias.astype(jnp.float32)]
    kernel = _matmul(config, H, inner, False, bias is not None, None, interpret)
    return kernel(tables.num_slots, tables.expert, *short_slots(tables, config), *biases, *down, *h)


@functools.cache
def _matmul(
    config: Config, out_rows: int, columns: int, gated: bool, biased: bool, clamp: Clamp | None, interpret: Any
) -> Any:
    """kernel(num_slots [1], expert [slots], *used [slots], *bias, *weights, *tokens): products of the slots and the pieces.

    used: `SlotTables.used`, if the configuration `is_short`.
    bias: float32 [E, (2 *) out_rows], if `biased`.
    weights: [E, (2 *) out_rows, columns]; of pieces [2 * pieces * out_rows, columns] or [out_rows, pieces * columns].
    tokens: [slots or 1, rows, columns]; of pieces [pieces or 1, piece_rows, columns]. With fewer than GRANULE tokens they
    have as many rows as there are tokens.
    Returns bfloat16 [slots, rows, out_rows], of which slots that exist are written, of short ones the rows with a token; and
    of pieces [pieces, piece_rows, out_rows].
    """
    t = config.up if gated else config.down
    grid, pieces, short = config.grid, config.pieces, is_short(config)
    kinds, most_rows = (2, max(config.rows, config.piece_rows)) if pieces else (1, config.rows)
    width = t.consumers * (1 if gated else t.blocks) * M  # output columns of a tile
    num_tiles, depths = out_rows // width, columns // t.depth
    if out_rows % width or columns % t.depth:
        raise ValueError(f"{t} does not divide weights of [{out_rows}, {columns}]")
    if biased and pieces:
        raise ValueError("shared experts have no biases")
    dtype = jnp.bfloat16

    def body(num_slots, expert, *refs, w_smem, x_smem, full, free, **stages):
        used, refs = refs[0] if short else None, refs[int(short) :]
        bias, refs = refs[: int(biased)], refs[int(biased) :]
        w, x, out = refs[:kinds], refs[kinds : 2 * kinds], refs[2 * kinds :]
        warpgroup, first = lax.axis_index("warpgroup"), lax.axis_index("block")

        def share(slots):
            """How many tiles of the first `slots` slots are this block's."""
            return lax.div(slots * num_tiles - first + (grid - 1), jnp.int32(grid))

        # The pieces come first: with more tokens, a tile of theirs may take longer than one of an expert.
        of_pieces, mine = share(pieces), share(pieces + num_slots[0])
        steps = mine * depths

        def item(j):
            """Slot (pieces are the first slots) and tile of this block's j-th item of work."""
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
                    """Copies one stage; weights(row, up) are M rows from `row` of this tile, of the up half if `up` is 1."""
                    for c in range(t.consumers):
                        for b in range(t.blocks):
                            row, up = (c * M, b) if gated else ((c * t.blocks + b) * M, 0)
                            plgpu.copy_gmem_to_smem(weights(tile * width + row, up), w_smem.at[s, c, b], full.at[s])
                    # A dynamic index, because a static one must not reach past the last token.
                    plgpu.copy_gmem_to_smem(
                        tokens.at[pl.ds(jnp.int32(0), rows), at], x_smem.at[s, pl.ds(0, rows)], full.at[s]
                    )

                @pl.when(pieces == 0 or slot >= pieces)
                def _copy_routed():
                    e = expert[slot - pieces]

                    def weights(row, up):
                        return w[0].at[e, pl.ds(up * out_rows + row, M), at]

                    copy(weights, x[0].at[0 if gated and config.all_tokens else slot - pieces], config.rows)

                @pl.when(pieces > 0 and slot < pieces)
                def _copy_piece():
                    def weights(row, up):
                        if gated:
                            return w[1].at[pl.ds((up * pieces + slot) * out_rows + row, M), at]
                        return w[1].at[pl.ds(row, M), pl.ds(slot * columns + start, t.depth)]

                    copy(weights, x[1].at[0 if gated else slot], config.piece_rows)

            keep_full(fill, free, steps, t.stages)

        @pl.when(warpgroup < t.consumers)
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            me = warpgroup

            def work(j, *, rows, out, first_slot, staged, used):
                slot, tile = item(j)
                own = pl.ds(0, rows)

                def bias_of(b):
                    """Of the rows of accumulator b, over its tokens."""
                    row = tile * width + (me if gated else me * t.blocks + b) * M + (b * out_rows if gated else 0)
                    bias_M = load(bias[0], (expert[slot - first_slot], pl.ds(row, M)), layout=OF_ROWS)
                    return lax.broadcast_in_dim(bias_M, (M, rows), [0])

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
                if bias:
                    sums = tuple(total + bias_of(b) for b, total in enumerate(sums))
                if gated:
                    gate, up = sums
                    sums = (joined(gate, up, clamp) if clamp else gate * (1.0 / (1.0 + jnp.exp(-gate))) * up,)
                for b, total in enumerate(sums):
                    at = pl.ds(tile * width + (me * len(sums) + b) * M, M)
                    of_slot = None if used is None else used[slot - first_slot]
                    store_tile(total.astype(dtype), staged, out.at[slot - first_slot, :, at], of_slot)

            if pieces:
                whole = {"out": out[1], "first_slot": 0, "staged": stages["piece_smem"].at[me], "used": None}
                pl.loop(0, of_pieces)(functools.partial(work, rows=config.piece_rows, **whole))
            routed = {"out": out[0], "first_slot": pieces, "staged": stages["out_smem"].at[me], "used": used}
            pl.loop(of_pieces, mine)(functools.partial(work, rows=config.rows, **routed))
            plgpu.wait_smem_to_gmem(0)

    body.__name__ = "moe_up" if gated else "moe_down"
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=swizzled)
    shapes = ((config.slots, config.rows, out_rows), (pieces, config.piece_rows, out_rows))
    scratch = {"out_smem": staging(t.consumers, config.rows, M, dtype, short=short)}
    if pieces:
        scratch["piece_smem"] = staging(t.consumers, config.piece_rows, M, dtype, short=False)
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes[:kinds]],
        scratch_types={
            "w_smem": smem((t.stages, t.consumers, t.blocks, M, t.depth)),
            "x_smem": smem((t.stages, most_rows, t.depth)),
            **scratch,
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
