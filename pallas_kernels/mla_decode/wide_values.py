"""As `values.py`, for some tokens more: merging split requests and the up-projection of values in one kernel, on tensor cores.

A block has one head, one granule of tokens or two, and 64 rows of the head's weights, which TMA brings while it merges. The
tokens of a granule are merged at the same time, AT_ONCE items of each in flight. Blocks of the same tokens repeat the merge,
from the L2 cache.
"""

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
# Items of a token that are loaded at once, about as many as a request of a step of 32 rows has.
AT_ONCE = 4
# Blocks that run at once. With more of them merging apart, once for all of a head's rows, and then `head_values` are faster.
MOST_BLOCKS, MOST_GRANULES = 264, 2
WGMMA = plgpu.Layout.WGMMA


def supports(tokens: int, w_uv: jax.Array) -> bool:
    """Whether the kernel runs this many tokens and these weights [H, V, L], and is the faster one."""
    H, V, L = w_uv.shape
    fits = tokens % GRANULE == 0 and V % M == 0 and L % WARPGROUP == 0 and w_uv.dtype == bf16
    return fits and tokens <= current().wide_values_tokens and granules_of_a_block(tokens, H * V // M) is not None


def granules_of_a_block(tokens: int, blocks: int) -> int | None:
    """The fewest with which at most MOST_BLOCKS blocks have these tokens; None if that are more than MOST_GRANULES.

    Args:
        blocks: for the same tokens.
    """
    for granules in range(1, MOST_GRANULES + 1):
        if tokens % (granules * GRANULE) == 0 and blocks * tokens // (granules * GRANULE) <= MOST_BLOCKS:
            return granules
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
    granules = granules_of_a_block(B * tokens, H * V // M)
    assert granules is not None
    own = granules * GRANULE  # tokens of a block
    row_layout = plgpu.Layout.WG_STRIDED((L,), vec_size=L // WARPGROUP)

    def mla_decode_wide_values(whole, partial, lse, runs, w_uv, values, w_s, rows_s, x_s, out_s, arrived):
        def merge_granule(first_token, to_s):
            """Merges a granule of tokens of this block's head into rows of a wgmma's operand."""
            requests = [lax.div(first_token + i, i32(tokens)) for i in range(GRANULE)]
            rows = [lax.rem(first_token + i, i32(tokens)) * head_rows + head for i in range(GRANULE)]
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
                for row, lse_row, first, count in zip(rows, lse_rows, firsts, counts, strict=True):
                    places = [step * AT_ONCE + j for j in range(AT_ONCE)]
                    at = [first + lax.max(lax.min(place, count - 1), i32(0)) for place in places]
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
            carry = tuple((f32(UNSEEN), f32(0), nothing) for _ in range(GRANULE))
            merged = lax.fori_loop(i32(0), lax.div(most + (AT_ONCE - 1), i32(AT_ONCE)), merge, carry)
            for i, (count, each, (_, total, acc)) in enumerate(zip(counts, wholes, merged, strict=True)):

                @pl.when(count > 0)
                def _(i=i, total=total, acc=acc):
                    rows_s[i, :] = acc * (1.0 / total)

                @pl.when(count == 0)
                def _(i=i, each=each):
                    rows_s[i, :] = each.astype(f32)

            # Tokens become columns, and from there the rows of a wgmma's operand.
            column = plgpu.broadcasted_iota(i32, (L, GRANULE), 1, layout=WGMMA)
            first, *others = (
                over_columns(load(rows_s, (i, slice(None)), layout=WGMMA.reduce(1)), (L, GRANULE))
                for i in range(GRANULE)
            )
            tile = first
            for i, mine in enumerate(others, 1):
                tile = jnp.where(column == i, mine, tile)
            transpose_ref(to_s, (1, 0))[...] = plgpu.layout_cast(tile.astype(bf16), plgpu.Layout.WGMMA_TRANSPOSED)

        head, part, first_token = lax.axis_index("head"), lax.axis_index("part"), lax.axis_index("group") * own
        plgpu.copy_gmem_to_smem(w_uv.at[head, pl.ds(part * M, M)], w_s, arrived)

        @pl.loop(0, granules)
        def _granule(granule):
            merge_granule(first_token + granule * GRANULE, x_s.at[pl.ds(granule * GRANULE, GRANULE)])

        plgpu.commit_smem()
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
            "rows_s": plgpu.SMEM((GRANULE, L), f32),
            "x_s": plgpu.SMEM((own, L), bf16, transforms=swizzled),
            "out_s": plgpu.SMEM((own, M), bf16, transforms=swizzled),
            "arrived": plgpu.Barrier(),
        },
        grid=(H, V // M, B * tokens // own),
        grid_names=("head", "part", "group"),
        compiler_params=params(),
        interpret=interpret,
    )(out, partial, lse, plan.runs, w_uv)
    return values.reshape(B, tokens, H, V)
