"""The grouped matmuls of experts in FP8 (`moe_fp8_up`, `moe_fp8_down` in traces).

For slots of up to 64 tokens; `fp8_wide.py` has those of 128. As `grouped_matmul.py`, with e4m3 codes of weights and of
activations as the operands of the wgmma. The tensor cores add products of FP8 in about 14 bits, so each 128 columns have an
accumulator of their own, which is multiplied by the scales of its tokens (and of its block of weights, in `fp8_block`) and
added to sums in float32; in `fp8_channel` the scales of weights are those of rows, and wait for the end.

Gate and up give `down` its tokens in FP8: a tile of theirs is 128 columns, of which each token has one scale. Two
warpgroups have half of the columns; the second hands its half to the first, which finds the largest magnitudes,
quantises and writes, while the second goes on.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.moe.config import WIDEST_ROWS, Config, M
from pallas_kernels.moe.fp8_config import MULTIPLE, padded_rows, pieces_beside
from pallas_kernels.moe.fp8_wide import wide_kernel
from pallas_kernels.moe.fp8_work import Work, i32
from pallas_kernels.moe.grouped_matmul import CONSUMER_REGISTERS, OF_ROWS, PRODUCER_REGISTERS
from pallas_kernels.moe.slots import SlotTables
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.activations import GROUP, Codes, scale_and_inverse
from pallas_kernels.quant.schemes import FP8_BLOCK, Scheme
from pallas_kernels.quant.values import Quantised
from pallas_kernels.ring import keep_full

OF_TOKENS = plgpu.Layout.WGMMA.reduce(0)


def fp8_experts(
    x: Codes, parameters: ExpertWeights, tables: SlotTables, config: Config, *, interpret: Any = False
) -> jax.Array:
    """The routed experts of the slots' rows, x as for `up_matmul`: bfloat16 [slots, rows, H].

    With `fp8_config.pieces_beside` the pieces' products follow: [slots + pieces, rows, H].
    """
    gate_up, down = parameters.gate_up, parameters.down
    assert isinstance(gate_up, Quantised)
    assert isinstance(down, Quantised)
    shared: Any = parameters.shared if pieces_beside(parameters, config) else (None, None)
    h = up_matmul(x, gate_up, tables, config, shared[0], interpret=interpret)
    return down_matmul(h, down, tables, config, shared[1], interpret=interpret)


def up_matmul(
    x: Codes,
    gate_up: Quantised,
    tables: SlotTables,
    config: Config,
    shared: Quantised | None = None,
    *,
    interpret: Any = False,
) -> Codes:
    """silu(x gate^T) * (x up^T) of the slots, quantised: codes [slots, rows, I], scale [slots, I / GROUP, padded_rows].

    Args:
        x: codes [slots, rows, H], or [1, T, H] if every slot has all tokens; scale [slots or 1, H / GROUP, padded_rows].
        gate_up: [E, 2, I, H]; with pieces [1, 2, pieces * I, H].
        shared: [2, pieces * I, H] of shared experts that all tokens visit, in the scheme of `gate_up`: the pieces' rows
            follow those of the slots.
    """
    _, parts, inner, H = gate_up.shape
    beside = shared.shape[1] // inner if shared else 0
    kernel = _kernel_of(config, gate_up.scheme, parts, inner // (config.pieces or 1), H, beside, interpret)
    of_pieces = (shared.codes[None], shared.scale[None]) if shared else ()
    return Codes(*kernel(tables.num_slots, tables.expert, gate_up.codes, gate_up.scale, *of_pieces, *x))


def down_matmul(
    h: Codes,
    down: Quantised,
    tables: SlotTables,
    config: Config,
    shared: Quantised | None = None,
    *,
    interpret: Any = False,
) -> jax.Array:
    """h down^T of the slots: bfloat16 [slots, rows, H].

    Args:
        h: codes [slots, rows, I], scale [slots, I / GROUP, padded_rows].
        down: [E, H, I]; with pieces [1, H, pieces * I].
        shared: [H, pieces * I] of the pieces that follow the slots in h.
    """
    _, H, inner = down.shape
    beside = shared.shape[1] // inner if shared else 0
    kernel = _kernel_of(config, down.scheme, 1, H, inner // (config.pieces or 1), beside, interpret)
    of_pieces = (shared.codes[None, None], shared.scale[None, None]) if shared else ()
    (y,) = kernel(tables.num_slots, tables.expert, down.codes[:, None], down.scale[:, None], *of_pieces, *h)
    return y


def _kernel_of(
    config: Config, scheme: Scheme, parts: int, out_rows: int, columns: int, beside: int, interpret: Any
) -> Any:
    if beside and (config.pieces or not config.all_tokens):
        raise ValueError(f"{config} has no slots of all tokens that pieces could be beside")
    if config.rows == WIDEST_ROWS:
        return wide_kernel(config, scheme, parts, out_rows, columns, interpret)
    return _kernel(config, scheme, parts, out_rows, columns, beside, interpret)


@functools.cache
def _kernel(
    config: Config, scheme: Scheme, parts: int, out_rows: int, columns: int, beside: int, interpret: Any
) -> Any:
    """kernel(num_slots [1], expert, codes, scale, tokens, tokens' scale) -> products of the slots.

    expert: int32, of each slot; not read with pieces, which have the slots in turn.
    codes, scale: of a weight [E, parts, out_rows, columns]; two parts are gate and up. With pieces expert e is a piece of
        [1, 2, pieces * out_rows, columns], or of [1, 1, out_rows, pieces * columns].
    tokens: [slots or 1, rows, columns]; of gate and up each piece has all of them, [slots / pieces, rows, columns].
        With fewer than GRANULE tokens they have as many rows as there are tokens.
    beside: pieces of shared experts of that many rows of gate and up, or columns of down, whose codes and scale follow those of
        the experts; every slot has all tokens then, and the results end with those of the pieces.
    Returns the arrays of `Codes` if gated, else bfloat16 [slots, rows, out_rows]. Only slots that exist are written.
    """
    gated = parts == 2
    t, rows = config.up if gated else config.down, config.rows
    width = GROUP if gated else t.consumers * t.blocks * M  # output columns of a tile
    units = t.depth // GROUP
    in_blocks = scheme is FP8_BLOCK
    if out_rows % width or out_rows % MULTIPLE or columns % t.depth or t.depth % GROUP:
        raise ValueError(f"{t} does not divide weights of [{out_rows}, {columns}]")
    if gated and (t.consumers, t.blocks) != (2, 2):
        raise ValueError(f"{t}: two warpgroups share a tile of gate and up")
    work = Work(config, gated, out_rows, columns, width, beside)
    depths = work.depths
    f32, bf16, e4m3 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn

    def place_of(member, b, tile):
        """The part of accumulator b of a warpgroup, and its first row."""
        return (b, tile * width + member * M) if gated else (0, tile * width + (member * t.blocks + b) * M)

    def body(num_slots, expert, codes, scale, *refs, w_smem, x_smem, s_smem, out_smem, full, free, **only):
        *of_pieces, x, x_scale = refs[: 2 * bool(beside) + 2]
        out = refs[2 * bool(beside) + 2 :]
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        slots = num_slots[0]
        mine = work.items(slots, block)

        def place_and_tile(j):
            """Where the results of an item are."""
            slot, tile = work.item(block, j)
            return work.place(slots, slot), tile

        @pl.when(warpgroup == t.consumers)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def fill(step):
                slot, tile = work.item(block, lax.div(step, i32(depths)))
                s, depth = work.stage(step), lax.rem(step, i32(depths))
                e, own, at = work.expert(expert, slots, slot), work.tokens(work.place(slots, slot)), depth * t.depth

                def copy_weights(codes, piece):
                    first, top, left = work.origin(e, piece=piece)
                    for c in range(t.consumers):
                        for b in range(t.blocks):
                            part, row = place_of(c, b, tile)
                            weights = codes.at[first, part, pl.ds(top + row, M), pl.ds(left + at, t.depth)]
                            plgpu.copy_gmem_to_smem(weights, w_smem.at[s, c, b], full.at[s])

                if beside:
                    pl.when(slot < slots)(lambda: copy_weights(codes, False))
                    pl.when(slot >= slots)(lambda: copy_weights(of_pieces[0], True))
                else:
                    copy_weights(codes, False)
                # A dynamic index, because a static one must not reach past the last token.
                plgpu.copy_gmem_to_smem(x.at[own, pl.ds(i32(0), rows), pl.ds(at, t.depth)], x_smem.at[s], full.at[s])
                for unit in range(units):
                    plgpu.copy_gmem_to_smem(x_scale.at[own, depth * units + unit], s_smem.at[s, unit], full.at[s])

            keep_full(fill, free, mine * depths, t.stages)

        def of_weights(slot, numbers):
            """numbers(scales, e, piece) of the slot's weights, whose scales are in one of two places."""
            e = work.expert(expert, slots, slot)
            if not beside:
                return numbers(scale, e, False)
            # Both are read, so each index is one that there is.
            routed = numbers(scale, lax.clamp(i32(0), e, i32(scale.shape[0] - 1)), False)
            shared = numbers(of_pieces[1], lax.min(e, i32(beside - 1)), True)
            return jax.tree.map(functools.partial(jnp.where, slot < slots), routed, shared)

        def block_scales(slot, tile, me, depth):
            """Of the blocks of weights that a step multiplies: one for each unit and accumulator."""
            places = [place_of(me, b, tile) for b in range(t.blocks)] if in_blocks else ()

            def numbers(scale, e, piece):
                return tuple(
                    work.scale(scale, e, part, row, depth * units + unit, piece=piece)
                    for unit in range(units)
                    for part, row in places
                )

            return of_weights(slot, numbers)

        def multiplied(j, me):
            """The sums of an item: an accumulator for each of its blocks of weights."""
            slot, tile = work.item(block, j)

            def step(depth, carried):
                sums, scales = list(carried[0]), carried[1]
                s = work.stage(j * depths + depth)
                # The next step's numbers come from global memory while this one's product is made.
                ahead = block_scales(slot, tile, me, lax.min(depth + 1, i32(depths - 1)))
                plgpu.barrier_wait(full.at[s])
                for unit in range(units):
                    at = pl.ds(unit * GROUP, GROUP)
                    tokens = transpose_ref(x_smem.at[s, :, at], (1, 0))
                    of_tokens = load(s_smem, (s, unit, pl.ds(0, rows)), layout=OF_TOKENS)
                    for b in range(t.blocks):

                        def product(acc, b=b, at=at, tokens=tokens):
                            plgpu.wgmma(acc, w_smem.at[s, me, b, :, at], tokens)
                            return acc[...]

                        part = pl.run_scoped(product, plgpu.ACC((M, rows), f32))
                        number = of_tokens * scales[unit * t.blocks + b] if in_blocks else of_tokens
                        # Before the next product begins: there are registers for one.
                        sums[b] = sums[b] + part * lax.broadcast_in_dim(number, (M, rows), [1])
                plgpu.commit_smem()  # reads of the scales must have completed before TMA writes there again
                plgpu.barrier_arrive(free.at[s])
                return tuple(sums), ahead

            nothing = plgpu.layout_cast(jnp.zeros((M, rows), f32), plgpu.Layout.WGMMA)
            start = (nothing,) * t.blocks, block_scales(slot, tile, me, i32(0))
            sums, _ = lax.fori_loop(0, depths, step, start)
            if in_blocks:
                return sums

            def of_rows(b):
                part, row = place_of(me, b, tile)

                def numbers(scale, e, piece):
                    at, top, _ = work.origin(e, piece=piece)
                    return load(scale, (at, part, pl.ds(top + row, M)), layout=OF_ROWS)

                return lax.broadcast_in_dim(of_weights(slot, numbers), (M, rows), [0])

            return tuple(total * of_rows(b) for b, total in enumerate(sums))

        def joined(sums):
            gate, up = sums
            return gate * (1.0 / (1.0 + jnp.exp(-gate))) * up

        def quantising():
            """The first warpgroup of gate and up: writes its half of each tile, and the other's."""
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            half_smem, handed, taken = (only[name] for name in ("half_smem", "handed", "taken"))

            @pl.loop(0, mine)
            def _work(j):
                place, tile = place_and_tile(j)
                ours = joined(multiplied(j, 0))
                plgpu.barrier_wait(handed)
                plgpu.wait_smem_to_gmem(0)  # until the store before this one has read the staging buffer
                other = load(half_smem, (slice(None), pl.ds(0, rows)), layout=plgpu.Layout.WGMMA)
                plgpu.barrier_arrive(taken)
                largest = jnp.maximum(jnp.abs(ours), jnp.abs(other)).max(axis=0)
                scale_T, inverse_T = scale_and_inverse(largest)
                out[1][place, tile, pl.ds(0, rows)] = scale_T
                inverse = lax.broadcast_in_dim(inverse_T, (M, rows), [1])
                for n, part in enumerate((ours, other)):
                    staged = transpose_ref(out_smem.at[:, pl.ds(n * M, M)], (1, 0))
                    # In this layout the cast is of pairs that are neighbours in a token.
                    staged[...] = plgpu.layout_cast(part * inverse, plgpu.Layout.WGMMA_TRANSPOSED).astype(e4m3)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem, out[0].at[place, :, pl.ds(tile * GROUP, GROUP)])

            plgpu.wait_smem_to_gmem(0)

        def handing_over():
            """The second warpgroup of gate and up."""
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            half_smem, handed, taken = (only[name] for name in ("half_smem", "handed", "taken"))

            @pl.loop(0, mine)
            def _work(j):
                ours = joined(multiplied(j, 1))

                @pl.when(j > 0)
                def _():
                    plgpu.barrier_wait(taken)

                half_smem[...] = ours
                plgpu.barrier_arrive(handed)

            @pl.when(mine > 0)
            def _():
                plgpu.barrier_wait(taken)

        def down():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            me = warpgroup

            @pl.loop(0, mine)
            def _work(j):
                place, tile = place_and_tile(j)
                sums = multiplied(j, me)
                for b in range(t.blocks):
                    plgpu.wait_smem_to_gmem(0)
                    staged = transpose_ref(out_smem.at[me], (1, 0))
                    staged[...] = plgpu.layout_cast(sums[b].astype(bf16), plgpu.Layout.WGMMA_TRANSPOSED)
                    plgpu.commit_smem()
                    at = pl.ds(place_of(me, b, tile)[1], M)
                    plgpu.copy_smem_to_gmem(out_smem.at[me], out[0].at[place, :, at])

            plgpu.wait_smem_to_gmem(0)

        if gated:
            pl.when(warpgroup == 0)(quantising)
            pl.when(warpgroup == 1)(handing_over)
        else:
            pl.when(warpgroup < t.consumers)(down)

    results = config.slots + beside
    body.__name__ = "moe_fp8_up" if gated else "moe_fp8_down"
    swizzled = functools.partial(
        plgpu.SMEM, dtype=e4m3, transforms=(plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
    )
    scratch: dict[str, Any] = {
        "w_smem": swizzled((t.stages, t.consumers, t.blocks, M, t.depth)),
        "x_smem": swizzled((t.stages, rows, t.depth)),
        "s_smem": plgpu.SMEM((t.stages, units, padded_rows(rows)), f32),
        "full": plgpu.Barrier(num_arrivals=t.consumers * t.blocks + 1 + units, num_barriers=t.stages),
        "free": plgpu.Barrier(num_arrivals=t.consumers, num_barriers=t.stages),
    }
    if gated:
        scratch |= {
            "out_smem": plgpu.SMEM((rows, GROUP), e4m3),
            "half_smem": plgpu.SMEM((M, rows), f32),
            "handed": plgpu.Barrier(num_arrivals=1),
            "taken": plgpu.Barrier(num_arrivals=1),
        }
        shapes = [((results, rows, out_rows), e4m3), ((results, out_rows // GROUP, padded_rows(rows)), f32)]
    else:
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        scratch |= {"out_smem": plgpu.SMEM((t.consumers, rows, M), bf16, transforms=transforms)}
        shapes = [((results, rows, out_rows), bf16)]
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        scratch_types=scratch,
        grid=(config.grid,),
        grid_names=("block",),
        num_threads=t.consumers + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Only one warpgroup reduces: over its four warps.
            reduction_scratch_bytes=2048 if gated else 0,
        ),
    )
