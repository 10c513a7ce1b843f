"""The end of decode attention for a few tokens: merging split requests and the up-projection of values, in one kernel.

Separately they are two launches, each of which mostly waits. Here a thread block merges a row while TMA brings its share
of the head's weights; blocks of the same row repeat the merge, from the L2 cache.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.matvec import WARPS, row_products, warp_per_row
from pallas_kernels.mosaic_attention import Merging, bf16, f32, i32
from pallas_kernels.split_schedule import Plan

# With more tokens tensor cores are faster.
MOST_TOKENS = 4
# Rows of the weights to a block, and columns that a warp loads at once, 16 bytes a lane.
ROWS, COLUMNS = 32, 256
WARP_PER_ROW = warp_per_row(COLUMNS)


def supports(tokens: int, w_uv: jax.Array) -> bool:
    """Whether the kernel supports this many tokens and these weights [H, V, L]."""
    return tokens <= MOST_TOKENS and w_uv.shape[1] % ROWS == 0 and w_uv.dtype == bf16


def merged_values(
    out: jax.Array,
    partial: jax.Array,
    lse: jax.Array,
    plan: Plan,
    w_uv: jax.Array,
    window: tuple[int, int],
    interpret: Any,
) -> jax.Array:
    """Values [B, tokens, H, V] of attention outputs, merged where requests are split.

    Args:
        out: [B, rows, L], of which the rows of the window count, for requests that are one item.
        partial, lse: see `Merging`.
        plan: of the call that wrote them.
        w_uv: [H, V, L].
        window: tokens of each request, and rows of a token, at least H.
    """
    B, L = out.shape[0], out.shape[2]
    (H, V, _), (tokens, head_rows) = w_uv.shape, window
    merging, columns = Merging(partial, lse, B), range(0, L, COLUMNS)

    def mla_decode_values(whole, partial, lse, splits, w_uv, values, weights_s, row_s, w_s, arrived):
        request, head = lax.axis_index("request"), lax.axis_index("head")
        token, part = lax.axis_index("token"), lax.axis_index("part")
        for i, column in enumerate(columns):
            source = w_uv.at[head, pl.ds(part * ROWS, ROWS), pl.ds(column, COLUMNS)]
            plgpu.copy_gmem_to_smem(source, w_s.at[i], arrived)
        first, n = i32(0), i32(0)
        for split in range(plan.num_splits):
            mine = (splits[split, 0] == request) & (splits[split, 2] > 0)
            first, n = (jnp.where(mine, splits[split, j], old) for j, old in ((1, first), (2, n)))
        row = token * head_rows + head

        @pl.when(n > 0)
        def _():
            row_s[...] = merging.row(partial, lse, weights_s, row, first, n).astype(bf16)

        @pl.when(n == 0)
        def _():
            row_s[...] = load(whole, (request, row, slice(None)), layout=merging.values_layout)

        plgpu.barrier_wait(arrived)
        vectors = [load(row_s, (pl.ds(column, COLUMNS),), layout=WARP_PER_ROW.reduce(0)) for column in columns]
        for start in range(0, ROWS, WARPS):
            total = None
            for i, vector in enumerate(vectors):
                tile = load(w_s, (i, pl.ds(start, WARPS), slice(None)), layout=WARP_PER_ROW)
                product = row_products(tile, vector.astype(f32), WARP_PER_ROW)
                total = product if total is None else total + product
            assert total is not None
            values[request, token, head, pl.ds(part * ROWS + start, WARPS)] = total.sum(axis=1).astype(bf16)

    return plgpu.kernel(
        mla_decode_values,
        out_type=jax.ShapeDtypeStruct((B, tokens, H, V), bf16),
        scratch_types={
            "weights_s": merging.weights_s,
            "row_s": plgpu.SMEM((L,), bf16),
            "w_s": plgpu.SMEM((len(columns), ROWS, COLUMNS), bf16),
            "arrived": plgpu.Barrier(num_arrivals=len(columns)),
        },
        grid=(B, tokens, H, V // ROWS),
        grid_names=("request", "token", "head", "part"),
        compiler_params=merging.params,
        interpret=interpret,
    )(out, partial, lse, plan.splits, w_uv)
