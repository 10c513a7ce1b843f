"""As `values.py`, for some tokens more: merging split requests and the up-projection of values in one kernel, on tensor cores.

A block has one head, one granule of tokens or two, and 64 rows of the head's weights, which TMA brings while it merges. Its
warpgroups share the tokens, of each of which they have several items in flight. Blocks of the same tokens repeat the merge,
from the L2 cache.
"""

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.mosaic_attention import MASKED, ROWS, UNSEEN, WARPGROUP, bf16, f32, i32, over_columns, params
from pallas_kernels.split_schedule import Plan
from pallas_kernels.tuning import current

M = 64  # Rows of a wgmma: rows of the weights.
GRANULE = 8  # Of a wgmma's columns, the tokens.
GRANULES = 1, 2  # Of a block.
# By the tokens that a warpgroup merges at the same time: items of each that are in flight, as many as registers hold.
ITEMS = {2: 16, 4: 8, 8: 4}
# Warpgroups that share a block's tokens, where each multiprocessor has one block, and where it has two.
MULTIPROCESSORS, WARPGROUPS = 132, (4, 1)
WGMMA = plgpu.Layout.WGMMA


def supports(tokens: int, w_uv: jax.Array) -> bool:
    """Whether the kernel runs this many tokens and these weights [H, V, L], and is the faster one."""
    H, V, L = w_uv.shape
    fits = tokens % GRANULE == 0 and V % M == 0 and L % WARPGROUP == 0 and w_uv.dtype == bf16
    return fits and tokens <= current().wide_values_tokens and granules_and_warpgroups(tokens, H * V // M) is not None


def granules_and_warpgroups(tokens: int, blocks: int) -> tuple[int, int] | None:
    """Of a block: granules, the fewest with which each multiprocessor has one block at most, or else two, and warpgroups.

    None if the blocks are more than that: merging apart, once for all of a head's rows, and then `head_values` are faster.

    Args:
        blocks: for the same tokens.
    """
    for of_a_multiprocessor, warpgroups in enumerate(WARPGROUPS, 1):
        for granules in GRANULES:
            groups, rest = divmod(tokens, granules * GRANULE)
            if rest == 0 and blocks * groups <= of_a_multiprocessor * MULTIPROCESSORS:
                return granules, warpgroups
    return None


def merged_values(
    out: jax.Array,
    partial: jax.Array,
    lse: jax.Array,
    plan: Plan,
    w_uv: jax.Array,
    window: tuple[int, int],
    interpret: Any,
) -> jax.Array:
    """As `values.merged_values`."""
    B, L = out.shape[0], out.shape[2]
    (H, V, _), (tokens, head_rows) = w_uv.shape, window
    block_rows = partial.shape[0] * ROWS // lse.shape[0]
    of_a_block = granules_and_warpgroups(B * tokens, H * V // M)
    assert of_a_block is not None
    granules, warpgroups = of_a_block
    own = granules * GRANULE  # tokens of a block
    warpgroups = math.gcd(warpgroups, L // M)  # each turns at least 64 of the columns
    at_once = min(own // warpgroups, GRANULE)  # tokens of a warpgroup that it merges at the same time
    # A request has about as many, where its context is split over its share of the multiprocessors.
    items_at_once = min(ITEMS[at_once], max(2, 1 << (MULTIPROCESSORS // B).bit_length()))
    row_layout = plgpu.Layout.WG_STRIDED((L,), vec_size=L // WARPGROUP)

    def mla_decode_wide_values(
        whole, partial, lse, runs, w_uv, values, w_s, rows_s, x_s, out_s, arrived, merged, turned
    ):
        def merge_some(first):
            """Merges tokens of this block's head, from the block's token `first` on, into shared memory."""
            tokens_here = [first_token + first + i for i in range(at_once)]
            requests = [lax.div(token, i32(tokens)) for token in tokens_here]
            rows = [lax.rem(token, i32(tokens)) * head_rows + head for token in tokens_here]
            lse_rows = [lax.div(row, i32(block_rows)) * ROWS + lax.rem(row, i32(block_rows)) for row in rows]
            firsts, counts = ([runs[request, j] for request in requests] for j in range(2))
            # Of requests in one piece; for others uninitialised, and not used.
            wholes = [
                load(whole, (at, row, slice(None)), layout=row_layout) for at, row in zip(requests, rows, strict=True)
            ]
            most = counts[0]
            for count in counts[1:]:
                most = lax.max(most, count)

            def merge(step, carry):
                # All loads come first, so that they are in flight together. Past the last item they repeat it.
                loaded = []
                for row, lse_row, first_item, count in zip(rows, lse_rows, firsts, counts, strict=True):
                    places = [step * items_at_once + j for j in range(items_at_once)]
                    at = [first_item + lax.max(lax.min(place, count - 1), i32(0)) for place in places]
                    sizes = [
                        jnp.where(place < count, lse[lse_row, i], MASKED) for place, i in zip(places, at, strict=True)
                    ]
                    loaded.append((sizes, [load(partial, (row, i, slice(None)), layout=row_layout) for i in at]))
                merged = []
                for (top, old_total, old_acc), (sizes, parts) in zip(carry, loaded, strict=True):
                    new_top = top
                    for size in sizes:
                        new_top = jnp.maximum(new_top, size)
                    shrink = jnp.exp2(top - new_top)
                    weights = [jnp.exp2(size - new_top) for size in sizes]
                    total, acc = old_total * shrink, old_acc * shrink
                    for weight, each in zip(weights, parts, strict=True):
                        total, acc = total + weight, acc + each.astype(f32) * weight
                    merged.append((new_top, total, acc))
                return tuple(merged)

            nothing = plgpu.layout_cast(jnp.zeros((L,), f32), row_layout)
            carry = tuple((f32(UNSEEN), f32(0), nothing) for _ in range(at_once))
            rounds = lax.div(most + (items_at_once - 1), i32(items_at_once))
            sums = lax.fori_loop(i32(0), rounds, merge, carry)
            for i, (count, each, (_, total, acc)) in enumerate(zip(counts, wholes, sums, strict=True)):

                @pl.when(count > 0)
                def _(i=i, total=total, acc=acc):
                    rows_s[first + i, :] = (acc * (1.0 / total)).astype(bf16)

                @pl.when(count == 0)
                def _(i=i, each=each):
                    rows_s[first + i, :] = each

        def turn(granule, mine):
            """Tokens become columns, and from there the rows of a wgmma's operand: some columns of the latents."""
            column = plgpu.broadcasted_iota(i32, (L // warpgroups, GRANULE), 1, layout=WGMMA)
            first, *others = (
                over_columns(load(rows_s, (granule * GRANULE + i, mine), layout=WGMMA.reduce(1)), column.shape)
                for i in range(GRANULE)
            )
            tile = first
            for i, each in enumerate(others, 1):
                tile = jnp.where(column == i, each, tile)
            to_s = transpose_ref(x_s.at[pl.ds(granule * GRANULE, GRANULE), mine], (1, 0))
            to_s[...] = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)

        head, part, warpgroup = (lax.axis_index(axis) for axis in ("head", "part", "warpgroup"))
        first_token = lax.axis_index("group") * own

        @pl.when(warpgroup == 0)
        def _copy():
            plgpu.copy_gmem_to_smem(w_uv.at[head, pl.ds(part * M, M)], w_s, arrived)

        first_of_warpgroup = warpgroup * (own // warpgroups)
        pl.loop(0, own // warpgroups // at_once)(lambda some: merge_some(first_of_warpgroup + some * at_once))
        plgpu.barrier_arrive(merged)
        plgpu.barrier_wait(merged)
        columns = pl.ds(warpgroup * (L // warpgroups), L // warpgroups)
        pl.loop(0, granules)(lambda granule: turn(granule, columns))
        plgpu.commit_smem()
        plgpu.barrier_arrive(turned)

        @pl.when(warpgroup == 0)
        def _multiply():
            plgpu.barrier_wait(turned)
            plgpu.barrier_wait(arrived)

            def multiply(total):
                plgpu.wgmma(total, w_s, transpose_ref(x_s, (1, 0)))
                return total[...]

            y = pl.run_scoped(multiply, plgpu.ACC((M, own), f32))
            transpose_ref(out_s, (1, 0))[...] = plgpu.layout_cast(y.astype(bf16), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, values.at[pl.ds(first_token, own), head, pl.ds(part * M, M)])
            plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    values = plgpu.kernel(
        mla_decode_wide_values,
        out_type=jax.ShapeDtypeStruct((B * tokens, H, V), bf16),
        scratch_types={
            "w_s": plgpu.SMEM((M, L), bf16, transforms=swizzled),
            "rows_s": plgpu.SMEM((own, L), bf16),
            "x_s": plgpu.SMEM((own, L), bf16, transforms=swizzled),
            "out_s": plgpu.SMEM((own, M), bf16, transforms=swizzled),
            "arrived": plgpu.Barrier(),
            "merged": plgpu.Barrier(num_arrivals=warpgroups),
            "turned": plgpu.Barrier(num_arrivals=warpgroups),
        },
        grid=(H, V // M, B * tokens // own),
        grid_names=("head", "part", "group"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=params(),
        interpret=interpret,
    )(out, partial, lse, plan.runs, w_uv)
    return values.reshape(B, tokens, H, V)
