"""The grouped matmuls of experts in FP8 for slots of 128 tokens (`moe_fp8_up`, `moe_fp8_down` in traces).

There tensor cores are the limit. So tokens are the rows of a wgmma and 128 rows of weights its columns, the other way round
than in `fp8_matmul.py`: a product reads less shared memory for what it multiplies, a thread needs the scales of two tokens,
and the 128 columns of gate and up that share a scale are in one warpgroup, which quantises them. Two warpgroups have half of
the tokens each; while one adds a product to its sums, the other multiplies.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.inline_code import publish
from pallas_kernels.moe.config import WIDEST_ROWS, Config, M
from pallas_kernels.moe.fp8_config import TOKEN_WARPGROUPS
from pallas_kernels.moe.fp8_work import Work, i32
from pallas_kernels.moe.grouped_matmul import OF_ROWS, PRODUCER_REGISTERS
from pallas_kernels.mosaic_attention import over_columns, params
from pallas_kernels.quant.activations import GROUP, scale_and_inverse
from pallas_kernels.quant.schemes import FP8_BLOCK, Scheme
from pallas_kernels.ring import keep_full

OF_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
# With 232, as the other matmuls have, ptxas begins a product while it still adds the last one, and spills 180 bytes.
CONSUMER_REGISTERS = 216


@functools.cache
def wide_kernel(config: Config, scheme: Scheme, parts: int, out_rows: int, columns: int, interpret: Any) -> Any:
    """As `fp8_matmul._kernel` without pieces beside, for slots of WIDEST_ROWS tokens."""
    gated = parts == 2
    t = config.up if gated else config.down
    width = GROUP if gated else t.blocks * GROUP  # output columns of a tile
    in_blocks = scheme is FP8_BLOCK
    if config.rows != WIDEST_ROWS or t.consumers != TOKEN_WARPGROUPS or t.depth != GROUP or (gated and t.blocks != 2):
        raise ValueError(f"{config} is not for slots of {WIDEST_ROWS} tokens")
    if out_rows % width or columns % GROUP:
        raise ValueError(f"{t} does not divide weights of [{out_rows}, {columns}]")
    work = Work(config, gated, out_rows, columns, width)
    depths = work.depths
    f32, bf16, e4m3 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn

    def place_of(b, tile):
        """The part of the b-th weights of a tile, and their first row."""
        return (b, tile * width) if gated else (0, tile * width + b * GROUP)

    def body(num_slots, expert, codes, scale, x, x_scale, *out, w_smem, x_smem, s_smem, out_smem, full, free):
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        mine = work.items(num_slots[0], block)

        @pl.when(warpgroup == TOKEN_WARPGROUPS)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def fill(step):
                slot, tile = work.item(block, lax.div(step, i32(depths)))
                s, depth = work.stage(step), lax.rem(step, i32(depths))
                e, top, left = work.origin(work.expert(expert, num_slots[0], slot))
                own, at = work.tokens(slot), depth * GROUP
                for b in range(t.blocks):
                    part, row = place_of(b, tile)
                    weights = codes.at[e, part, pl.ds(top + row, GROUP), pl.ds(left + at, GROUP)]
                    plgpu.copy_gmem_to_smem(weights, w_smem.at[s, b], full.at[s])
                for half in range(TOKEN_WARPGROUPS):
                    tokens = pl.ds(half * M, M)
                    plgpu.copy_gmem_to_smem(x.at[own, tokens, pl.ds(at, GROUP)], x_smem.at[s, half], full.at[s])
                    plgpu.copy_gmem_to_smem(x_scale.at[own, depth, tokens], s_smem.at[s, half], full.at[s])

            keep_full(fill, free, mine * depths, t.stages)

        def block_scales(e, tile, depth):
            """Of the blocks of weights that a step multiplies."""
            places = [place_of(b, tile) for b in range(t.blocks)] if in_blocks else ()
            return tuple(work.scale(scale, e, part, row, depth) for part, row in places)

        def multiplied(j, here, following, scales):
            """The sums of an item, [M, GROUP] for each of its blocks of weights, and the first scales of the following one.

            Args:
                here, following: expert and tile of these items.
                scales: the first ones of this item.
            """

            def step(depth, carried):
                sums, scales = carried
                s, last = work.stage(j * depths + depth), depth == depths - 1
                plgpu.barrier_wait(full.at[s])
                of_tokens = load(s_smem, (s, warpgroup), layout=OF_ROWS)
                publish(bool(interpret))  # reads of the scales must have completed before TMA writes there again
                # The next step's numbers come from global memory while this one's products are made. `publish` waits for
                # every load on its way.
                e, tile = (jnp.where(last, after, now) for after, now in zip(following, here, strict=True))
                ahead = block_scales(e, tile, jnp.where(last, i32(0), depth + 1))
                added = []
                for b, total in enumerate(sums):

                    def product(acc, b=b):
                        plgpu.wgmma(acc, x_smem.at[s, warpgroup], transpose_ref(w_smem.at[s, b], (1, 0)))
                        return acc[...]

                    part = pl.run_scoped(product, plgpu.ACC((M, GROUP), f32))
                    number = of_tokens * scales[b] if in_blocks else of_tokens
                    # Before the next product begins: there are registers for one.
                    added.append(total + part * over_columns(number, part.shape))
                plgpu.barrier_arrive(free.at[s])
                return tuple(added), ahead

            nothing = plgpu.layout_cast(jnp.zeros((M, GROUP), f32), plgpu.Layout.WGMMA)
            sums, scales = lax.fori_loop(0, depths, step, ((nothing,) * t.blocks, scales))
            if in_blocks:
                return sums, scales
            e, tile = here

            def of_rows(b):
                (at, top, _), (part, row) = work.origin(e), place_of(b, tile)
                own = load(scale, (at, part, pl.ds(top + row, GROUP)), layout=OF_COLUMNS)
                return lax.broadcast_in_dim(own, (M, GROUP), [1])

            return tuple(total * of_rows(b) for b, total in enumerate(sums)), scales

        @pl.when((warpgroup < TOKEN_WARPGROUPS) & (mine > 0))
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            tokens = pl.ds(warpgroup * M, M)

            def expert_and_tile(j):
                slot, tile = work.item(block, lax.min(j, mine - 1))
                return work.expert(expert, num_slots[0], slot), tile

            def make(j, carried):
                (slot, tile), (here, scales) = work.item(block, j), carried
                following = expert_and_tile(j + 1)
                sums, scales = multiplied(j, here, following, scales)
                plgpu.wait_smem_to_gmem(0)  # until the stores before these have read the staging buffer
                if gated:
                    gate, up = sums
                    h = gate * (1.0 / (1.0 + jnp.exp(-gate))) * up
                    scale_T, inverse_T = scale_and_inverse(jnp.abs(h).max(axis=1))
                    out[1][slot, tile, tokens] = scale_T
                    out_smem[warpgroup, 0] = (h * over_columns(inverse_T, h.shape)).astype(e4m3)
                else:
                    for b, total in enumerate(sums):
                        out_smem[warpgroup, b] = total.astype(bf16)
                plgpu.commit_smem()
                for b in range(width // GROUP):
                    at = pl.ds(tile * width + b * GROUP, GROUP)
                    plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, b], out[0].at[slot, tokens, at])
                return following, scales

            e, tile = expert_and_tile(i32(0))
            lax.fori_loop(i32(0), mine, make, ((e, tile), block_scales(e, tile, i32(0))))
            plgpu.wait_smem_to_gmem(0)

    def swizzled(shape, dtype):
        columns = 128 // jnp.dtype(dtype).itemsize
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))

    body.__name__ = "moe_fp8_up" if gated else "moe_fp8_down"
    rows = config.rows
    if gated:
        shapes = [((config.slots, rows, out_rows), e4m3), ((config.slots, out_rows // GROUP, rows), f32)]
    else:
        shapes = [((config.slots, rows, out_rows), bf16)]
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        scratch_types={
            "w_smem": swizzled((t.stages, t.blocks, GROUP, GROUP), e4m3),
            "x_smem": swizzled((t.stages, TOKEN_WARPGROUPS, M, GROUP), e4m3),
            "s_smem": plgpu.SMEM((t.stages, TOKEN_WARPGROUPS, M), f32),
            "out_smem": swizzled((TOKEN_WARPGROUPS, width // GROUP, M, GROUP), shapes[0][1]),
            "full": plgpu.Barrier(num_arrivals=t.blocks + 2 * TOKEN_WARPGROUPS, num_barriers=t.stages),
            "free": plgpu.Barrier(num_arrivals=TOKEN_WARPGROUPS, num_barriers=t.stages),
        },
        grid=(config.grid,),
        grid_names=("block",),
        num_threads=TOKEN_WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        # What a thread reads of shared memory TMA wrote, behind a barrier; what it writes there only TMA reads.
        compiler_params=params(unsafe_no_auto_barriers=True),
    )
