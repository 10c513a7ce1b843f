"""Absorbed paged MLA for Hopper, in Pallas Mosaic GPU.

A thread block attends with up to 64 query rows (tokens of the window times heads) to a run of pages. The page is the
tile: 64 keys of 576 columns, of which the first 512 are the values too, so each page is read once.

- Warpgroup 0: scores, online softmax (base 2), the left half of the output.
- Warpgroup 1: the right half of the output.
- A warp of warpgroup 2: copies pages into shared memory, two ahead, in two parts: scores start when the left one has landed.
  Or all of the warpgroup, which gathers latents from anywhere in the cache (`gathered_pages`).

Latents in FP8 have a kernel of their own (`fp8.py`), which gives the same bits. So weights are added up in products with ones,
rounded to bfloat16 as they are multiplied: tensor cores do it in the same order in both.

Requests whose context is split over several thread blocks have partial outputs with their log-sum-exp, which a second kernel
merges into the output. With few tokens it makes the values too (`values.py`, `wide_values.py`), else `head_values.py` does.
"""

import functools
import math
from typing import Any, Literal, TypeAlias

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.latents import Fp8Latents, Latents
from pallas_kernels.mla_decode import fp8, head_values, reference, values, wide_values
from pallas_kernels.mla_decode.gathered_pages import gather_pages
from pallas_kernels.mla_decode.outputs import KEY_DIM, VALUE_DIM, output_types
from pallas_kernels.mosaic_attention import (
    MASKED,
    ONES,
    ROWS,
    accumulate,
    accumulate_each,
    merge,
    over_columns,
    params,
    write_ones,
)
from pallas_kernels.split_kv import PAGE
from pallas_kernels.split_schedule import split_schedule

# Columns of a page that are copied together; the right part ends with the 64 columns that are no value.
LEFT, RIGHT = 256, 320
HALF = VALUE_DIM // 2
STAGES = 2

# How pages come into shared memory: by TMA, or token by token.
Pages: TypeAlias = Literal["copied", "gathered"]

WGMMA = plgpu.Layout.WGMMA
OF_ROWS = WGMMA.reduce(1)
i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


def layout_unsupported_reason(q: jax.Array | jax.ShapeDtypeStruct, latent: Latents, value_dim: int) -> str | None:
    """Why no kernel supports these widths and pages, or None if one may."""
    if q.shape[-1] != KEY_DIM or value_dim != VALUE_DIM:
        return (
            f"it supports latents of {VALUE_DIM} + {KEY_DIM - VALUE_DIM}, not {value_dim} + {q.shape[-1] - value_dim}"
        )
    if latent.shape[1] != PAGE:
        return f"it supports pages of {PAGE} tokens, not {latent.shape[1]}"
    return None


def unsupported_reason(q: jax.Array | jax.ShapeDtypeStruct, latent: Latents, value_dim: int) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    plain = latent.rope if isinstance(latent, Fp8Latents) else latent
    return layout_unsupported_reason(q, latent, value_dim) or hopper_unsupported_reason(q.dtype, plain.dtype)


@functools.partial(jax.jit, static_argnames=("scale", "gathered", "sms", "interpret"))
def mla_decode(
    q: jax.Array,
    latent: Latents,
    page_tables: jax.Array,
    bounds: jax.Array,
    w_uv: jax.Array | None = None,
    *,
    scale: float,
    gathered: bool = False,
    sms: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See api.py. Jitted, so that the layers of a model share one lowering: it takes half a second.

    Args:
        gathered: a context is not in pages of its own. `page_tables` has for each of its places, whole pages of them, the token
            of the cache, counted through the cache's pages. Not of FP8 latents.
        sms: thread blocks to run at once (default: those of the device).
        interpret: passed to Pallas.
    """
    B, n, H, _ = q.shape
    live = n * H
    blocks = -(-live // ROWS)
    rows = padded_rows(live) // blocks
    padding = blocks * rows - live
    sms = sms or jax.devices()[0].core_count
    at_once = fp8.items_of_a_block(B, rows) if isinstance(latent, Fp8Latents) else 1
    plan = split_schedule(
        bounds,
        page_tables.shape[1] // (PAGE if gathered else 1),
        blocks,
        sms * at_once,
        heads=H,
        row_blocks=blocks,
        # An item that holds its first page waits for one load less before it can begin.
        page_tables=None if gathered else page_tables,
        multiple=at_once,
        # Two pages take hardly longer than one, which makes twice as many items to merge; few tokens' are merged at once.
        least=1 if B * n <= values.MOST_TOKENS else 2,
        interpret=interpret,
    )

    q = jnp.pad(q.reshape(B, live, KEY_DIM), ((0, 0), (0, padding), (0, 0)))
    sizes = B, blocks, rows, live, plan.num_items, scale / math.log(2)
    if isinstance(latent, Fp8Latents):
        assert not gathered
        attend = fp8.attend_kernel(*sizes, interpret)
    else:
        attend = _attend_kernel(*sizes, "gathered" if gathered else "copied", interpret)
    out, partial, lse = attend(q, *jax.tree.leaves(latent), page_tables, plan.items, plan.row_bounds)
    if plan.num_splits and w_uv is not None:
        for ending in (values, wide_values):
            if ending.supports(B * n, w_uv):
                return ending.merged_values(out, partial, lse, plan, w_uv, (n, H), interpret)
    if plan.num_splits:
        out = merge("mla_decode_merge", out, partial, lse, plan.splits, plan.num_splits, live, interpret)
    if w_uv is not None and live == blocks * rows and head_values.supports(B * n, w_uv):
        of_tokens = head_values.head_values(out.reshape(B * n, H, VALUE_DIM), w_uv, interpret=interpret)
        return of_tokens.reshape(B, n, *w_uv.shape[:2])
    out = out[:, :live].reshape(B, n, H, VALUE_DIM)
    return out if w_uv is None else reference.values(out[:, :, : w_uv.shape[0]], w_uv)


def padded_rows(rows: int) -> int:
    """Of a request, with those of padding: whole blocks, or one of whole granules of TMA's."""
    unit = 8 if rows <= ROWS else ROWS
    return -(-rows // unit) * unit


@functools.cache
def _attend_kernel(
    B: int, blocks: int, rows: int, live: int, num_items: int, log2_scale: float, pages: Pages, interpret: Any
) -> Any:
    """kernel(q [B, blocks * rows, 576], latent, page_tables, items, bounds [B, blocks * 64]) -> out, partial, lse.

    For `page_tables` with "gathered" see `mla_decode`, for what it writes `output_types`.
    """
    # Registers of a thread of each warpgroup, together at most what the launch gives three: 3 * 168. With more the first that
    # asks for some waits forever.
    score_registers, sum_registers, page_registers = (248, 216, 40) if pages == "copied" else (240, 160, 104)
    assert score_registers + sum_registers + page_registers <= 3 * 168

    def body(
        q, latent, page_tables, items, bounds, out, partial, lse, *,
        q_s, pages_or_out, p_s, ones_s, rows_s, q_full, left_full, right_full, free, p_full, p_free, finished,
    ):  # fmt: skip
        (left_s, right_s), (out_s,) = pages_or_out
        warpgroup, item, block = lax.axis_index("warpgroup"), lax.axis_index("item"), lax.axis_index("block")
        request, first, end, unmasked, alone = (items[item, j] for j in range(5))
        n = end - first

        def zeros(columns=HALF):
            return plgpu.layout_cast(jnp.zeros((ROWS, columns), f32), WGMMA)

        def copy_queries():
            # A tile with fewer rows than 64: TMA reads zeros past the last one.
            plgpu.copy_gmem_to_smem(q.at[request, pl.ds(block * rows, ROWS), :], q_s, q_full)

        def drain():
            """Every completion must be awaited before the kernel ends."""

            @pl.loop(lax.max(n - STAGES, i32(0)), n)
            def _(i):
                stage = lax.rem(i, i32(STAGES))
                plgpu.barrier_wait(free.at[stage])

        def copy_pages():
            copy_queries()

            def copy(i, page):
                stage = lax.rem(i, i32(STAGES))

                @pl.when(i >= STAGES)
                def _():
                    plgpu.barrier_wait(free.at[stage])

                # Both at once: parts of the same rows of memory.
                left = latent.at[page, :, pl.ds(0, LEFT)]
                plgpu.copy_gmem_to_smem(left, left_s.at[stage], left_full.at[stage])
                rest = latent.at[page, :, pl.ds(LEFT, RIGHT)]
                plgpu.copy_gmem_to_smem(rest, right_s.at[stage], right_full.at[stage])
                # Loaded before the wait that the next copy begins with.
                return page_tables[request, lax.min(first + i + 1, end - 1)]

            lax.fori_loop(i32(0), n, copy, items[item, 5])
            drain()

        def gather():
            copy_queries()
            parts = (left_s, left_full), (right_s, right_full)
            gather_pages(latent, page_tables, request, parts, free, first, n, bool(interpret))
            drain()

        def clear_unowned(part, keys):
            """Zeroes the values after the last key of the request: 0 times NaN is NaN."""
            for column in range(0, HALF, PAGE):
                tile = part.at[:, pl.ds(column, PAGE)]
                values = load(part, (slice(None), pl.ds(column, PAGE)), layout=WGMMA)
                row = plgpu.broadcasted_iota(i32, values.shape, 0, layout=WGMMA)
                tile[...] = jnp.where(row < keys, values.astype(f32), 0.0).astype(bf16)

        def store(half, acc):
            plgpu.barrier_arrive(finished)  # both halves are done with the pages, whose memory the output reuses
            plgpu.barrier_wait(finished)
            out_s[half] = acc.astype(bf16)
            plgpu.commit_smem()
            source, columns = out_s.at[half, pl.ds(0, rows), :], pl.ds(half * HALF, HALF)

            @pl.when(alone == 1)
            def _():
                plgpu.copy_smem_to_gmem(source, out.at[request, pl.ds(block * rows, rows), columns])

            @pl.when(alone == 0)
            def _():
                plgpu.copy_smem_to_gmem(source, partial.at[pl.ds(block * rows, rows), item, columns])

            plgpu.wait_smem_to_gmem(0)

        def score_and_sum_left():
            bound_R = load(bounds, (request, pl.ds(block * ROWS, ROWS)), layout=OF_ROWS)
            keys = bounds[request, blocks * ROWS - 1]
            write_ones(ones_s)
            plgpu.commit_smem()
            plgpu.barrier_wait(q_full)

            def step(i, carry, masked):
                acc, top_R, total = carry
                stage = lax.rem(i, i32(STAGES))
                plgpu.barrier_wait(left_full.at[stage])

                def scores(s_acc):
                    plgpu.wgmma(s_acc, q_s.at[:, pl.ds(0, LEFT)], transpose_ref(left_s.at[stage], (1, 0)))
                    plgpu.barrier_wait(right_full.at[stage])
                    plgpu.wgmma(s_acc, q_s.at[:, pl.ds(LEFT, RIGHT)], transpose_ref(right_s.at[stage], (1, 0)))
                    return s_acc[...]

                x = pl.run_scoped(scores, plgpu.ACC((ROWS, PAGE), f32))
                if masked:
                    key = plgpu.broadcasted_iota(i32, x.shape, 1, layout=WGMMA) + (first + i) * PAGE
                    x = jnp.where(key < over_columns(bound_R, x.shape), x, MASKED)
                new_top_R = jnp.maximum(top_R, x.max(axis=1))
                shrink_R = jnp.exp2((top_R - new_top_R) * log2_scale)
                p = jnp.exp2((x - over_columns(new_top_R, x.shape)) * log2_scale)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(p_free)

                p_s[...] = p.astype(bf16)
                rows_s[0, :] = shrink_R
                if masked:
                    clear_unowned(left_s.at[stage], keys - (first + i) * PAGE)
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_full)
                before = tuple(x * over_columns(shrink_R, x.shape) for x in (acc, total))
                ones = transpose_ref(ones_s, (1, 0))
                acc, total = accumulate_each(before, p_s, (left_s.at[stage], ones), interpret)
                plgpu.barrier_arrive(free.at[stage])
                return acc, new_top_R, total

            # Rows of padding get a maximum that leaves their weights 0. With zeros in all their operands tensor cores need
            # less power, which is what limits the clock in a full batch.
            row_R = plgpu.broadcasted_iota(i32, (ROWS,), 0, layout=OF_ROWS) + block * ROWS
            low_R = jnp.where(row_R < live, f32(MASKED), f32(-MASKED))
            carry = zeros(), low_R, zeros(ONES)
            carry = lax.fori_loop(i32(0), unmasked, functools.partial(step, masked=False), carry)
            acc, top_R, total = lax.fori_loop(unmasked, n, functools.partial(step, masked=True), carry)
            sum_R = total.max(axis=1)
            plgpu.barrier_wait(p_free)
            rows_s[1, :] = 1.0 / sum_R
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_full)
            lse[pl.ds(block * ROWS, ROWS), item] = top_R * log2_scale + jnp.log2(sum_R)
            store(0, acc * over_columns(1.0 / sum_R, acc.shape))

        def sum_right():
            keys = bounds[request, blocks * ROWS - 1]

            def step(i, acc, masked):
                stage = lax.rem(i, i32(STAGES))
                plgpu.barrier_wait(right_full.at[stage])
                plgpu.barrier_wait(p_full)
                if masked:
                    clear_unowned(right_s.at[stage], keys - (first + i) * PAGE)
                    plgpu.commit_smem()
                shrink_R = load(rows_s, (0,), layout=OF_ROWS)
                values = right_s.at[stage, :, pl.ds(0, HALF)]
                acc = accumulate(acc * over_columns(shrink_R, acc.shape), p_s, values, interpret)
                plgpu.barrier_arrive(p_free)
                plgpu.barrier_arrive(free.at[stage])
                return acc

            acc = lax.fori_loop(i32(0), unmasked, functools.partial(step, masked=False), zeros())
            acc = lax.fori_loop(unmasked, n, functools.partial(step, masked=True), acc)
            plgpu.barrier_wait(p_full)
            store(1, acc * over_columns(load(rows_s, (1,), layout=OF_ROWS), acc.shape))

        # An item without pages has no work, and would wait forever.
        @pl.when((warpgroup == 2) & (n > 0))
        def _():
            plgpu.set_max_registers(page_registers, action="decrease")
            if pages == "gathered":
                gather()
                return

            # One warp: waiting takes power, and in a full batch power is what limits the clock.
            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    copy_pages()

        @pl.when((warpgroup == 0) & (n > 0))
        def _():
            plgpu.set_max_registers(score_registers, action="increase")
            score_and_sum_left()

        @pl.when((warpgroup == 1) & (n > 0))
        def _():
            plgpu.set_max_registers(sum_registers, action="increase" if pages == "copied" else "decrease")
            sum_right()

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    matrix = functools.partial(plgpu.SMEM, dtype=bf16, transforms=tiled)
    of_stages = functools.partial(plgpu.Barrier, num_barriers=STAGES)
    body.__name__ = "mla_decode" if pages == "copied" else f"mla_decode_{pages}"
    return plgpu.kernel(
        body,
        out_type=output_types(B, blocks, rows, num_items),
        scratch_types={
            "q_s": matrix((ROWS, KEY_DIM)),
            "pages_or_out": plgpu.RefUnion(
                [matrix((STAGES, PAGE, width)) for width in (LEFT, RIGHT)],
                [matrix((2, ROWS, HALF))],
            ),
            "p_s": matrix((ROWS, PAGE)),
            "ones_s": matrix((ONES, PAGE)),
            "rows_s": plgpu.SMEM((2, ROWS), f32),
            "q_full": plgpu.Barrier(),
            "left_full": of_stages(),
            "right_full": of_stages(),
            "free": of_stages(num_arrivals=2),
            "p_full": plgpu.Barrier(),
            "p_free": plgpu.Barrier(),
            "finished": plgpu.Barrier(num_arrivals=2),
        },
        grid=(num_items, blocks),
        grid_names=("item", "block"),  # blocks of an item run together and share its pages in the L2 cache
        num_threads=3,
        thread_name="warpgroup",
        # A thread reads only shared memory that it wrote itself, that TMA wrote, or that a barrier or commit_smem made
        # visible. The barriers that Pallas would add around each access cost 4 %.
        compiler_params=params(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
