"""Paged grouped-query attention over decode windows for Hopper, in Pallas Mosaic GPU.

No maintained library kernel has page tables and a causal bound for each token of a window: cuDNN, which
`jax.nn.dot_product_attention` calls, needs contiguous keys.

A thread block of one warpgroup attends with up to 64 query rows (tokens of the window times the query heads of one key
head) to a run of pages. It copies pages ahead of itself: the keys of a later page as soon as it has the scores of this
one, its values as soon as it has summed these. Two thread blocks share a multiprocessor, so that one computes while the
other waits. Requests whose context is split over several thread blocks are merged by a second kernel.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.mosaic_attention import MASKED, ROWS, WARPGROUP, accumulate, merge, over_columns, params
from pallas_kernels.split_kv import PAGE
from pallas_kernels.split_schedule import split_schedule

HEAD_DIMS = (64, 128, 256)
# Thread blocks on a multiprocessor. Each has 64 KiB for pages: one of 256 columns, two of 128, or four of 64.
RESIDENT = 2
PAGES_BYTES = 64 * 2**10
GRANULE = 8  # Rows of a tile of shared memory.
# The most columns with which queries and outputs in memory of their own leaves room for RESIDENT thread blocks.
PACKED_COLUMNS = 128

WGMMA = plgpu.Layout.WGMMA
OF_ROWS = WGMMA.reduce(1)
i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


def layout_unsupported_reason(q: jax.Array, k: jax.Array, head_dims: tuple[int, ...] = HEAD_DIMS) -> str | None:
    """Why a kernel for heads of these sizes does not support this head size and these pages, or None if it may."""
    if q.shape[-1] not in head_dims:
        *others, last = map(str, head_dims)
        return f"it supports heads of {', '.join(others)} or {last}, not {q.shape[-1]}"
    if k.shape[1] != PAGE:
        return f"it supports pages of {PAGE} tokens, not {k.shape[1]}"
    return None


def unsupported_reason(q: jax.Array, k: jax.Array, v: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    return layout_unsupported_reason(q, k) or hopper_unsupported_reason(q.dtype, k.dtype, v.dtype)


@functools.partial(jax.jit, static_argnames=("scale", "window", "sms", "interpret"))
def gqa_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_tables: jax.Array,
    bounds: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    sms: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See api.py. Jitted, so that the layers of a model share one lowering.

    Args:
        page_tables, bounds: with a window those that `sliding_window.window_pages` has cut.
        sms: multiprocessors (default: those of the device).
        interpret: passed to Pallas.
    """
    B, n, K, G, D = q.shape
    live = n * G
    row_blocks = -(-live // ROWS)
    rows = -(-live // GRANULE) * GRANULE if row_blocks == 1 else ROWS
    blocks = K * row_blocks
    # Rows of padding would need a kernel before this one and another after it.
    packed = n == 1 and rows != live and row_blocks == 1 and D <= PACKED_COLUMNS
    stored = live if packed else rows
    sms = sms or jax.devices()[0].core_count
    plan = split_schedule(
        bounds,
        page_tables.shape[1],
        blocks,
        sms * RESIDENT,
        heads=G,
        row_blocks=row_blocks,
        page_tables=page_tables,
        all_masked=window is not None,  # every page may begin before a row's window
        interpret=interpret,
    )

    q_BKRD = q.transpose(0, 2, 1, 3, 4).reshape(B, K, live, D)
    q_BKRD = jnp.pad(q_BKRD, ((0, 0), (0, 0), (0, row_blocks * stored - live), (0, 0)))
    inputs = [q_BKRD.reshape(B, blocks * stored, D), k, v, page_tables, plan.items, plan.row_bounds]
    if sinks is not None:  # one a row, in the units of unscaled scores
        inputs.append(jnp.tile(sinks / scale, (1, -(-row_blocks * ROWS // G)))[:, : row_blocks * ROWS])
    attend = _attend_kernel(B, K, D, row_blocks, stored, plan.num_items, scale / math.log(2), window, interpret)
    out, partial, lse = attend(*inputs)
    if plan.num_splits:
        out = merge("gqa_decode_merge", out, partial, lse, plan.splits, plan.num_splits, blocks * stored, interpret)
    out = out.reshape(B, K, row_blocks * stored, D)[:, :, :live]
    return out.reshape(B, K, n, G, D).transpose(0, 2, 1, 3, 4)


@functools.cache
def _attend_kernel(
    B: int,
    K: int,
    D: int,
    row_blocks: int,
    stored: int,
    num_items: int,
    log2_scale: float,
    window: int | None,
    interpret: Any,
) -> Any:
    """kernel(q [B, blocks * stored, D], k, v, page_tables, items, bounds [B, row_blocks * 64], *sinks) -> out, partial, lse.

    sinks: float32 [K, row_blocks * 64], or none. A row begins with its sink in the item of the request's first
    page, so that it counts once however the request is split.

    There are `row_blocks` blocks of rows for each of the K key heads, one key head after another. out [B, blocks *
    stored, D] holds the requests of one item; partial [blocks * stored, I, D] and the base-2 log-sum-exp lse float32
    [blocks * 64, I padded] hold the items of the others.

    Shared memory is tiled by GRANULE rows. Where `stored`, a block's rows of queries and outputs, is no multiple of it, both
    pass through memory that is not: the copy engine sees tiles in global memory too, and a row that begins inside one is
    followed by zeros at its end, not by the next tile. What a block computes beside these rows is nobody's.
    """
    blocks = K * row_blocks
    packed = stored % GRANULE != 0
    padded_items = -(-num_items // WARPGROUP) * WARPGROUP
    stages = PAGES_BYTES // (2 * PAGE * D * 2)

    def body(q, k, v, page_tables, items, bounds, *refs, q_s, k_s, v_s, p_s, q_full, k_full, v_full, **plain):
        *sinks, out, partial, lse = refs
        item, block = lax.axis_index("item"), lax.axis_index("block")
        request, first, end, unmasked, alone, first_page = (items[item, j] for j in range(6))
        n = end - first
        head, bounds_at = lax.div(block, i32(row_blocks)), lax.rem(block, i32(row_blocks)) * ROWS
        own_rows = pl.ds(block * stored, stored)
        # The memory of the queries is free at the end. A copy of single rows needs them one after the other instead.
        staging = plain["rows_s"] if packed else q_s

        def number(i):
            return page_tables[request, lax.min(first + i, end - 1)]

        def copy_keys(page, stage):
            plgpu.copy_gmem_to_smem(k.at[page, :, head], k_s.at[stage], k_full.at[stage])

        def copy_values(page, stage):
            plgpu.copy_gmem_to_smem(v.at[page, :, head], v_s.at[stage], v_full.at[stage])

        def clear_unowned(values_s, keys):
            """Zeroes the values after the last key of the request: 0 times NaN is NaN."""
            for column in range(0, D, PAGE):
                tile = values_s.at[:, pl.ds(column, PAGE)]
                values = load(values_s, (slice(None), pl.ds(column, PAGE)), layout=WGMMA)
                row = plgpu.broadcasted_iota(i32, values.shape, 0, layout=WGMMA)
                tile[...] = jnp.where(row < keys, values.astype(f32), 0.0).astype(bf16)

        def step(i, carry, *, bound_R, keys, masked):
            acc, top_R, sum_R, later_page = carry
            stage, later = lax.rem(i, i32(stages)), i + stages

            def scores(ref):
                plgpu.barrier_wait(k_full.at[stage])
                plgpu.wgmma(ref, q_s, transpose_ref(k_s.at[stage], (1, 0)))
                return ref[...]

            x = pl.run_scoped(scores, plgpu.ACC((ROWS, PAGE), f32))

            @pl.when(later < n)
            def _():
                copy_keys(later_page, stage)

            if masked:
                key = plgpu.broadcasted_iota(i32, x.shape, 1, layout=WGMMA) + (first + i) * PAGE
                bound = over_columns(bound_R, x.shape)
                seen = key < bound if window is None else (key < bound) & (key >= bound - window)
                x = jnp.where(seen, x, MASKED)
            new_top_R = jnp.maximum(top_R, x.max(axis=1))
            shrink_R = jnp.exp2((top_R - new_top_R) * log2_scale)
            p = jnp.exp2((x - over_columns(new_top_R, x.shape)) * log2_scale)
            sum_R = sum_R * shrink_R + p.sum(axis=1)
            p_s[...] = p.astype(bf16)

            plgpu.barrier_wait(v_full.at[stage])
            if masked:
                clear_unowned(v_s.at[stage], keys - (first + i) * PAGE)
            plgpu.commit_smem()
            acc = accumulate(acc * over_columns(shrink_R, acc.shape), p_s, v_s.at[stage], interpret)

            @pl.when(later < n)
            def _():
                copy_values(later_page, stage)

            # A round before it is needed: otherwise each copy would wait for its page's number.
            return acc, new_top_R, sum_R, number(later + 1)

        # An item without pages has no work.
        @pl.when(n > 0)
        def _():
            # The first page's number is among the item's, so that its copies do not wait for the page table.
            copy_keys(first_page, 0)
            copy_values(first_page, 0)
            plgpu.copy_gmem_to_smem(q.at[request, own_rows, :], staging.at[pl.ds(0, stored), :], q_full)

            @pl.loop(1, lax.min(n, i32(stages)))
            def _(i):
                page = number(i)
                copy_keys(page, i)
                copy_values(page, i)

            bound_R = load(bounds, (request, pl.ds(bounds_at, ROWS)), layout=OF_ROWS)
            attend = functools.partial(step, bound_R=bound_R, keys=bounds[request, row_blocks * ROWS - 1])
            top_R = plgpu.layout_cast(jnp.full((ROWS,), MASKED, f32), OF_ROWS)
            sum_R = plgpu.layout_cast(jnp.zeros((ROWS,), f32), OF_ROWS)
            if sinks:
                begins_R = plgpu.layout_cast(lax.broadcast_in_dim(first, (ROWS,), ()), OF_ROWS) == 0
                sink_R = load(sinks[0], (head, pl.ds(bounds_at, ROWS)), layout=OF_ROWS)
                top_R = jnp.where(begins_R, sink_R, top_R)
                sum_R = jnp.where(begins_R, 1.0, sum_R)
            zeros = plgpu.layout_cast(jnp.zeros((ROWS, D), f32), WGMMA)
            carry = zeros, top_R, sum_R, number(i32(stages))
            plgpu.barrier_wait(q_full)
            if packed:
                q_s[...] = load(staging, (slice(None), slice(None)), layout=WGMMA)
                plgpu.commit_smem()
            carry = lax.fori_loop(i32(0), unmasked, functools.partial(attend, masked=False), carry)
            acc, top_R, sum_R, _ = lax.fori_loop(unmasked, n, functools.partial(attend, masked=True), carry)

            lse[pl.ds(block * ROWS, ROWS), item] = top_R * log2_scale + jnp.log2(sum_R)
            staging[...] = (acc * over_columns(1.0 / sum_R, acc.shape)).astype(bf16)
            plgpu.commit_smem()
            source = staging.at[pl.ds(0, stored), :]

            @pl.when(alone == 1)
            def _():
                plgpu.copy_smem_to_gmem(source, out.at[request, own_rows, :])

            @pl.when(alone == 0)
            def _():
                plgpu.copy_smem_to_gmem(source, partial.at[own_rows, item, :])

            plgpu.wait_smem_to_gmem(0)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    matrix = functools.partial(plgpu.SMEM, dtype=bf16, transforms=tiled)
    body.__name__ = "gqa_decode"
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, blocks * stored, D), bf16),
            jax.ShapeDtypeStruct((blocks * stored, num_items, D), bf16),
            jax.ShapeDtypeStruct((blocks * ROWS, padded_items), f32),
        ),
        scratch_types={
            "q_s": matrix((ROWS, D)),
            "k_s": matrix((stages, PAGE, D)),
            "v_s": matrix((stages, PAGE, D)),
            "p_s": matrix((ROWS, PAGE)),
            "q_full": plgpu.Barrier(),
            "k_full": plgpu.Barrier(num_barriers=stages),
            "v_full": plgpu.Barrier(num_barriers=stages),
            **({"rows_s": plgpu.SMEM((ROWS, D), bf16)} if packed else {}),
        },
        grid=(num_items, blocks),
        grid_names=("item", "block"),  # blocks of a key head run together and share its pages in the L2 cache
        # With Pallas' automatic barriers: a page overwrites one that all four warps must have read.
        compiler_params=params(),
        interpret=interpret,
    )
