"""Absorbed paged MLA over latents in FP8, for Hopper, in Pallas Mosaic GPU.

As `mosaic.py`, with rows and columns exchanged: tokens of a page are the rows of a product and query rows its columns, as few
as there are. So codes can be what a wgmma takes from registers, where they become bfloat16 (`fp8_fragments.py`), and
shared memory holds nothing but codes, several pages of them.

- Warpgroups 0 and 1: each the scores of one page of a pair, then of both pages the sums of one half of the columns. With few
  query rows and several requests each has an item of its own instead, page after page, and waits for nobody.
- A warp of warpgroup 2 for each item: copies its pages into shared memory.

Every sum and product is that of `mosaic.py` in the same order, so on the dequantised cache it gives the same bits.
"""

import functools
import itertools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.latents import GROUP
from pallas_kernels.mla_decode.fp8_fragments import (
    BLOCKS,
    GROUPS,
    HALF,
    UNIT,
    Codes,
    keys,
    largest_of_columns,
    load_keys,
    load_values,
    store_rows,
    tile_transforms,
    value_scales,
    values,
)
from pallas_kernels.mla_decode.outputs import KEY_DIM, VALUE_DIM, output_types
from pallas_kernels.mosaic_attention import MASKED, ONES, ROWS, over_columns, params, write_ones
from pallas_kernels.split_kv import PAGE

# Shared memory of a block, less what barriers and alignment take; of that what ones, bounds and numbers of the rows take.
SHARED_BYTES, SMALL_BYTES = 224 * 1024, 5 * 1024
PAGE_BYTES = PAGE * (VALUE_DIM + 4 * GROUPS + 2 * (KEY_DIM - VALUE_DIM))
# With more query rows a thread has no registers for the sums of all columns. A single short request, split into many items, was
# slower with own items; where that ends has not been measured.
MOST_OWN_ROWS, FEWEST_REQUESTS = 16, 8
# Products under way while the next one's operand is made, with all columns in one warpgroup: more spill.
UNDER_WAY = 2

WGMMA, COLUMNS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)
OF_ROWS = WGMMA.reduce(1)
i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


def over_rows(x_N: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x_N, shape, [1])


def items_of_a_block(requests: int, rows: int) -> int:
    """How many items a thread block works on at once, each with `rows` query rows."""
    return 2 if rows <= MOST_OWN_ROWS and requests >= FEWEST_REQUESTS else 1


def stages_of(rows: int, items: int) -> int:
    """Pages in shared memory of each of so many items, beside their queries and weights."""
    return (SHARED_BYTES - items * 2 * rows * KEY_DIM - 2 * 2 * ROWS * PAGE - SMALL_BYTES) // PAGE_BYTES // items


@functools.cache
def attend_kernel(B: int, blocks: int, rows: int, live: int, num_items: int, log2_scale: float, interpret: Any) -> Any:
    """As `mosaic._attend_kernel`; the latents are the arrays of `Fp8Latents`.

    `num_items` is a multiple of `items_of_a_block`.
    """
    at_once = items_of_a_block(B, rows)
    mates = 2 // at_once  # Warpgroups that share an item, and pages that they take together.
    stages = stages_of(rows, at_once)
    # Blocks of columns whose codes a thread holds: with many query rows it has no registers for more.
    held = BLOCKS if rows <= 32 else 2

    def body(
        q, codes, scale, rope, page_tables, items, bounds, out, partial, lse, *, q_s, codes_s, scale_s, rope_s, p_s, ones_s,
        tops_s, rows_s, bounds_s, q_full, full, free, **only,
    ):  # fmt: skip
        warpgroup, place, block = lax.axis_index("warpgroup"), lax.axis_index("place"), lax.axis_index("block")
        # Which of the block's items is this warpgroup's, and which half of the columns.
        mine = lax.rem(warpgroup, i32(at_once))
        halves = (warpgroup,) if mates == 2 else (i32(0), i32(1))
        item = place * at_once + mine
        request, first, end, unmasked, alone = (items[item, j] for j in range(5))
        n = end - first

        def stage_of(i, which=mine):
            return which * stages + lax.rem(i, i32(stages))

        def copy_pages(which):
            item = place * at_once + which
            request, first, end = (items[item, j] for j in range(3))
            n = end - first
            plgpu.copy_gmem_to_smem(q.at[request, pl.ds(block * rows, rows), :], q_s.at[which], q_full.at[which])

            def copy(i, page):
                stage = stage_of(i, which)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(free.at[stage])

                for array, into in ((codes, codes_s), (rope, rope_s), (scale, scale_s)):
                    plgpu.copy_gmem_to_smem(array.at[page], into.at[stage], full.at[stage])
                # Loaded before the wait that the next copy begins with.
                return page_tables[request, lax.min(first + i + 1, end - 1)]

            lax.fori_loop(i32(0), n, copy, items[item, 5])

            # Every completion must be awaited before the kernel ends.
            @pl.loop(lax.max(n - stages, i32(0)), n)
            def _(i):
                plgpu.barrier_wait(free.at[stage_of(i, which)])

        def met(barrier):
            """All threads that share the item."""
            if mates == 1:
                plgpu.commit_smem()
                return
            plgpu.barrier_arrive(only[barrier])
            plgpu.barrier_wait(only[barrier])

        def dequantised(stage, columns, owned=None):
            """Of a page, for the interpreter, which has no operands in registers."""
            numbers = codes_s.at[stage][...].astype(f32) * jnp.repeat(scale_s.at[stage][...], GROUP, axis=1)
            if owned is not None:
                numbers = jnp.where(jnp.arange(PAGE)[:, None] < owned, numbers, 0.0)
            return lax.dynamic_slice_in_dim(numbers, columns, UNIT, axis=1).astype(bf16)

        def operand(tile):
            own = only["operand_s"].at[warpgroup]
            own[...] = tile
            plgpu.commit_smem()
            return own

        def scores(stage):
            """x [PAGE, rows]."""

            def multiply(x_acc):
                # A loop, because unrolled the compiler loads everything at once and spills.
                @pl.loop(0, GROUPS)
                def _(group):
                    for unit in range(GROUP // UNIT):
                        columns = group * GROUP + unit * UNIT
                        if interpret:
                            keys_PU = operand(dequantised(stage, columns))
                        else:
                            keys_PU = keys(load_keys(codes_s.at[stage], scale_s.at[stage], group, unit))
                        plgpu.wgmma(x_acc, keys_PU, transpose_ref(q_s.at[mine, :, pl.ds(columns, UNIT)], (1, 0)))
                        # While one is multiplied the next is made.
                        plgpu.wgmma_wait(0 if interpret else 1)

                queries = transpose_ref(q_s.at[mine, :, pl.ds(VALUE_DIM, KEY_DIM - VALUE_DIM)], (1, 0))
                plgpu.wgmma(x_acc, rope_s.at[stage], queries)
                plgpu.wgmma_wait(0)
                return x_acc[...]

            return pl.run_scoped(multiply, plgpu.ACC((PAGE, rows), f32))

        def summed(accs, total, stage, slot, owned):
            """The sums [UNIT, rows] of the halves' blocks of columns, and of the weights [ROWS, ONES], with a page's."""
            weights, ones = p_s.at[slot], ones_s.at[mine]
            operands = weights.at[pl.ds(0, rows), :]
            if interpret:
                columns = [half * HALF + b * UNIT for half in halves for b in range(BLOCKS)]
                tiles = [dequantised(stage, first, owned).T for first in columns]
                accs = tuple(
                    acc + pl.run_scoped(functools.partial(product, operand(tile), operands), plgpu.ACC(acc.shape, f32))
                    for acc, tile in zip(accs, tiles, strict=True)
                )
                return accs, total + pl.run_scoped(
                    functools.partial(product, weights, ones), plgpu.ACC(total.shape, f32)
                )
            scales = [value_scales(scale_s.at[stage], half, owned) for half in halves]

            def multiply(refs):
                *of_blocks, of_weights = refs
                plgpu.wgmma(of_weights, weights, transpose_ref(ones, (1, 0)))
                for h, first in itertools.product(range(len(halves)), range(0, BLOCKS, held)):
                    part = Codes(load_values(codes_s.at[stage], halves[h], first, held), scales[h])
                    for b in range(held):
                        tile = values(part, b)
                        if first + b and held < BLOCKS:
                            # Made before the wait for the one before it, which ends before the next begins.
                            tile = lax.optimization_barrier(tile)
                            plgpu.wgmma_wait(0)
                        plgpu.wgmma(of_blocks[h * BLOCKS + first + b], tile, transpose_ref(operands, (1, 0)))
                        if mates == 1:
                            plgpu.wgmma_wait(UNDER_WAY)
                plgpu.wgmma_wait(0)

            *accs, total = pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc in (*accs, total)))
            return tuple(accs), total

        def product(a, b, ref):
            plgpu.wgmma(ref, a, transpose_ref(b, (1, 0)))
            plgpu.wgmma_wait(0)
            return ref[...]

        def by_one_of_an_item(write):
            """By the first warpgroup of those that share an item: another one would write the same."""
            write() if mates == 1 else pl.when(warpgroup == 0)(write)

        def attend():
            def columns_of(number):
                """Numbers of the query rows, from shared memory: in registers they would be as many as N / 4."""
                return load(rows_s, (warpgroup, number, pl.ds(0, rows)), layout=COLUMNS)

            keys_seen = bounds[request, blocks * ROWS - 1]
            bounds_s[warpgroup, :] = load(bounds, (request, pl.ds(block * ROWS, ROWS)), layout=OF_ROWS)

            by_one_of_an_item(functools.partial(write_ones, ones_s.at[mine]))
            # Each thread has written some of the bounds and reads others; the ones are read after a barrier of all that share
            # them.
            plgpu.commit_smem()
            plgpu.barrier_wait(q_full.at[mine])

            def step(j, carry, masked, pages):
                """Of `pages` pages from page j * mates on; the scores of one that is left over are those of both warpgroups."""
                accs, total, top_R = carry
                own = j * mates + (warpgroup if pages == 2 else 0)
                plgpu.barrier_wait(full.at[stage_of(own)])
                x = scores(stage_of(own))
                if masked:
                    key = plgpu.broadcasted_iota(i32, x.shape, 0, layout=WGMMA) + (first + own) * PAGE
                    bound_N = load(bounds_s, (warpgroup, pl.ds(0, rows)), layout=COLUMNS)
                    x = jnp.where(key < over_rows(bound_N, x.shape), x, MASKED)
                slot = warpgroup if pages == mates else 0

                def slot_of(page):
                    return warpgroup if mates == 1 else page

                def by_owner(write):
                    write() if pages == mates else by_one_of_an_item(write)

                def write_tops():
                    if interpret:
                        for warp in range(4):
                            tops_s[slot, warp, pl.ds(0, rows)] = x.max(axis=0)
                    else:
                        largest_of_columns(x, tops_s.at[slot])

                by_owner(write_tops)
                met("topped")
                tops, shrinks = [top_R], []
                for page in range(pages):
                    of_warps = [load(tops_s, (slot_of(page), warp, slice(None)), layout=OF_ROWS) for warp in range(4)]
                    tops.append(functools.reduce(jnp.maximum, of_warps, tops[-1]))
                    shrinks.append(jnp.exp2((tops[page] - tops[page + 1]) * log2_scale))
                    rows_s[warpgroup, page, :] = shrinks[page]
                rows_s[warpgroup, 2, :] = jnp.where(warpgroup == 0, tops[1], tops[-1])
                plgpu.commit_smem()
                p = jnp.exp2((x - over_rows(columns_of(2), x.shape)) * log2_scale).astype(bf16)

                def write_weights():
                    staged = transpose_ref(p_s.at[slot, pl.ds(0, rows), :], (1, 0))
                    staged[...] = plgpu.layout_cast(p, plgpu.Layout.WGMMA_TRANSPOSED)
                    if mates == 2:
                        plgpu.commit_smem()

                by_owner(write_weights)
                met("weighted")
                for page in range(pages):
                    i = j * mates + page
                    if pages == 2:
                        wait_for_page = functools.partial(plgpu.barrier_wait, full.at[stage_of(i)])
                        pl.when(warpgroup != page)(wait_for_page)
                    accs = tuple(acc * over_rows(columns_of(page), acc.shape) for acc in accs)
                    total = total * over_columns(shrinks[page], total.shape)
                    owned = keys_seen - (first + i) * PAGE if masked else None
                    accs, total = summed(accs, total, stage_of(i), slot_of(page), owned)
                    plgpu.barrier_arrive(free.at[stage_of(i)])
                return accs, total, tops[-1]

            # As in `mosaic.py`: rows of padding get a maximum that leaves their weights 0.
            row_R = plgpu.broadcasted_iota(i32, (ROWS,), 0, layout=OF_ROWS) + block * ROWS
            low_R = jnp.where(row_R < live, f32(MASKED), f32(-MASKED))

            def zeros(*shape):
                return plgpu.layout_cast(jnp.zeros(shape, f32), WGMMA)

            carry = (zeros(UNIT, rows),) * (BLOCKS * len(halves)), zeros(ROWS, ONES), low_R
            whole, steps = lax.div(unmasked, i32(mates)), lax.div(n, i32(mates))
            carry = lax.fori_loop(i32(0), whole, functools.partial(step, masked=False, pages=mates), carry)
            carry = lax.fori_loop(whole, steps, functools.partial(step, masked=True, pages=mates), carry)
            if mates == 2:
                last = functools.partial(step, masked=True, pages=1)
                carry = lax.fori_loop(steps, lax.div(n + 1, i32(2)), last, carry)
            accs, total, top_R = carry
            sum_R = total.max(axis=1)
            rows_s[warpgroup, 2, :] = 1.0 / sum_R
            plgpu.commit_smem()
            factor_N = columns_of(2)

            def write_lse():
                lse[pl.ds(block * ROWS, ROWS), item] = top_R * log2_scale + jnp.log2(sum_R)

            by_one_of_an_item(write_lse)
            results = [(acc * over_rows(factor_N, acc.shape)).astype(bf16) for acc in accs]

            def store(to, row_bytes):
                for h, half in enumerate(halves):
                    of_half = results[h * BLOCKS : (h + 1) * BLOCKS]
                    if not interpret:
                        store_rows(to, half, of_half, row_bytes)
                        continue
                    for b, result in enumerate(of_half):
                        to[:, pl.ds(half * HALF + b * UNIT, UNIT)] = result.T

            @pl.when(alone == 1)
            def _():
                store(out.at[request, pl.ds(block * rows, rows), :], 2 * VALUE_DIM)

            @pl.when(alone == 0)
            def _():
                store(partial.at[pl.ds(block * rows, rows), item, :], 2 * VALUE_DIM * num_items)

        # An item without pages has no work, and would wait forever.
        has_work = [items[place * at_once + which, 2] > items[place * at_once + which, 1] for which in range(at_once)]

        @pl.when((warpgroup == 2) & functools.reduce(jnp.logical_or, has_work))
        def _():
            plgpu.set_max_registers(40, action="decrease")

            # One warp an item: waiting takes power, and in a full batch power is what limits the clock.
            @plgpu.warp_map
            def _(warp):
                for which in range(at_once):
                    pl.when((warp == which) & has_work[which])(functools.partial(copy_pages, i32(which)))

        @pl.when((warpgroup < 2) & (n > 0))
        def _():
            plgpu.set_max_registers(232, action="increase")
            attend()

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    matrix = functools.partial(plgpu.SMEM, dtype=bf16, transforms=tiled)
    places = at_once * stages
    of_stages = functools.partial(plgpu.Barrier, num_barriers=places)
    body.__name__ = "mla_decode_fp8"
    return plgpu.kernel(
        body,
        out_type=output_types(B, blocks, rows, num_items),
        scratch_types={
            "q_s": matrix((at_once, rows, KEY_DIM)),
            "codes_s": plgpu.SMEM((places, PAGE, VALUE_DIM), jnp.float8_e4m3fn, transforms=tile_transforms()),
            "rope_s": matrix((places, PAGE, KEY_DIM - VALUE_DIM)),
            "scale_s": plgpu.SMEM((places, PAGE, GROUPS), f32),
            # Past the query rows there is anything: rows of the weights' sums that nobody reads.
            "p_s": matrix((2, ROWS, PAGE)),
            "ones_s": matrix((at_once, ONES, PAGE)),
            "tops_s": plgpu.SMEM((2, 4, ROWS), f32),
            # Of each warpgroup: by what its sums shrink before each page of a pair; the largest scores of its own page, at
            # the end by what its sums are multiplied.
            "rows_s": plgpu.SMEM((2, 3, ROWS), f32),
            "bounds_s": plgpu.SMEM((2, ROWS), i32),
            "q_full": plgpu.Barrier(num_barriers=at_once),
            "full": of_stages(num_arrivals=3),
            "free": of_stages(num_arrivals=mates),
            **({name: plgpu.Barrier(num_arrivals=2) for name in ("topped", "weighted")} if mates == 2 else {}),
            **({"operand_s": matrix((2, UNIT, UNIT))} if interpret else {}),
        },
        grid=(num_items // at_once, blocks),
        grid_names=("place", "block"),  # blocks of an item run together and share its pages in the L2 cache
        num_threads=3,
        thread_name="warpgroup",
        # As in `mosaic.py`: all that a thread reads, a barrier or commit_smem has made visible.
        compiler_params=params(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
