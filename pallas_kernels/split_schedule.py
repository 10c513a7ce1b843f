"""The schedule of `split_kv.make_schedule` and what kernels for Hopper derive from it: by XLA, or where
`Tuning.schedule_kernel` is on, as one Mosaic GPU kernel (`split_schedule` in traces).

XLA makes five to nine kernels of these integers, each of which mostly waits, before a step's first attention. In the kernel
one thread block makes the schedule: a thread is a request, then a candidate for the most pages of an item, then an item, and
looks up in shared memory what the other threads found. All layers of a step have equal calls, which XLA joins in both cases.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.compat import load
from pallas_kernels.inline_code import elements
from pallas_kernels.mosaic_attention import ROWS, WARPGROUP
from pallas_kernels.split_kv import PAGE, make_schedule, num_items, page_limits
from pallas_kernels.tuning import current

# An element to a thread, and the next one to the same thread WARPGROUP further on.
OF_THREADS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPGROUP,), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
OF_ROWS = plgpu.Layout.WGMMA.reduce(1)
# Requests whose pages a candidate's thread loads at once.
AT_ONCE = 8
# One sum is two: of numbers of items in the lower bits, and of requests with several in the upper ones.
COUNT_BITS = 16

i32, f32 = jnp.int32, jnp.float32


class Plan(NamedTuple):
    """What the kernels of split attention read. From the kernel `items`, `splits` and `runs` have more rows than count.

    Attributes:
        items: int32 [>= num_items, 5 or 6], `split_kv.Schedule.items`; then the first page's number in the cache, if asked for.
            The rows after the schedule's have no pages.
        splits: int32 [>= num_splits, 3], `split_kv.Schedule.splits`. The rows after the schedule's are 0.
        runs: int32 [>= B, 2], first item and number of items of each request with several, 0 of others.
        row_bounds: int32 [B, blocks of rows * ROWS], the bound of each query row. Rows of padding see what the last token
            sees: a smaller bound would need a mask.
    """

    items: jax.Array
    splits: jax.Array
    runs: jax.Array
    row_bounds: jax.Array
    num_items: int
    num_splits: int


def split_schedule(
    bounds: jax.Array,
    max_pages: int,
    blocks: int,
    sms: int,
    *,
    heads: int,
    row_blocks: int,
    page_tables: jax.Array | None = None,
    multiple: int = 1,
    least: int = 1,
    all_masked: bool = False,
    interpret: Any = False,
) -> Plan:
    """The integers of `split_kv.make_schedule`, whose arguments the first four are, and what kernels derive from them.

    Args:
        heads: query rows of a token.
        row_blocks: blocks of ROWS rows that hold the window's.
        page_tables: int32 [B, max_pages], for the items' first pages.
        multiple: a power of two, of which the number of items is a multiple; those past the schedule's have no pages.
        least: see `split_kv.make_schedule`.
        all_masked: every page of an item counts as one that needs a mask.
    """
    if not current().schedule_kernel:
        schedule = make_schedule(bounds, max_pages, blocks, sms, least)
        return _plan_of(*schedule, bounds, page_tables, heads, row_blocks, multiple, all_masked=all_masked)
    B, n = bounds.shape
    count = num_items(B, blocks, sms)
    sizes = _Sizes(B, n, max_pages, blocks, sms, heads, row_blocks, current().split_overhead_pages, all_masked)
    limits = page_limits(max_pages, least)
    limits = np.pad(limits, (0, -len(limits) % WARPGROUP), mode="edge")
    tables = [] if page_tables is None else [page_tables]
    kernel = _kernel(sizes, len(limits), bool(tables), interpret)
    items, splits, runs, row_bounds = kernel(bounds, limits, *tables)
    return Plan(items, splits, runs, row_bounds, -(-count // multiple) * multiple, min(B, count - B))


def _plan_of(
    items: jax.Array,
    splits: jax.Array,
    bounds: jax.Array,
    page_tables: jax.Array | None,
    heads: int,
    row_blocks: int,
    multiple: int,
    *,
    all_masked: bool,
) -> Plan:
    """The same of a schedule's items and splits, in plain XLA."""
    B, n = bounds.shape
    if all_masked:
        items = items.at[:, 3].set(0)
    items = jnp.pad(items, ((0, -items.shape[0] % multiple), (0, 0)))
    if page_tables is not None:
        items = jnp.concatenate([items, page_tables[items[:, 0], items[:, 1], None].astype(i32)], axis=1)
    mine = (splits[None, :, 0] == jnp.arange(B)[:, None]) & (splits[None, :, 2] > 0)
    runs = jnp.where(mine[..., None], splits[None, :, 1:], 0).sum(axis=1).astype(i32)
    row_bounds = jnp.repeat(bounds, heads, axis=1)
    row_bounds = jnp.pad(row_bounds, ((0, 0), (0, row_blocks * ROWS - n * heads)), mode="edge")
    return Plan(items, splits, runs, row_bounds, items.shape[0], splits.shape[0])


class _Sizes(NamedTuple):
    """See `split_schedule`."""

    B: int
    n: int
    max_pages: int
    blocks: int
    sms: int
    heads: int
    row_blocks: int
    overhead_pages: int
    all_masked: bool


def _padded(size: int) -> int:
    """To as many for each thread."""
    return -(-size // WARPGROUP) * WARPGROUP


@functools.cache
def _kernel(sizes: _Sizes, candidates: int, with_pages: bool, interpret: Any) -> Any:
    """kernel(bounds, limits [candidates], *page_tables) -> items, splits, runs, row_bounds of `Plan`."""
    B, n, max_pages, blocks, sms, heads, row_blocks, overhead_pages, all_masked = sizes
    most_items = num_items(B, blocks, sms)
    # Products with reciprocals find the right quotients below 2^21, and each sum has room in its bits.
    assert max_pages < 2**20
    assert most_items < 2**COUNT_BITS
    # A search in a power of two of them need not look where they end.
    requests = _padded(pl.next_power_of_2(B))
    emulated = bool(interpret)
    look_up = functools.partial(_look_up, emulated=emulated)

    def body(bounds, limits, *refs, pages_s, whole_s, middles_s, splits_s, sums_s):
        *page_tables, items, splits, runs, row_bounds = refs
        block = lax.axis_index("block")

        def write_row_bounds(request):
            row = plgpu.broadcasted_iota(i32, (row_blocks * ROWS,), 0, layout=OF_ROWS)
            token = jnp.minimum(lax.div(row, jnp.full(row.shape, heads, i32)), n - 1)
            row_bounds[request, :] = look_up(bounds.at[request], token, layout=OF_ROWS)

        def write_schedule():
            limit_C = load(limits, (pl.ds(0, candidates),), layout=OF_THREADS)
            request_B = _numbers(requests)
            own_B = jnp.minimum(request_B, B - 1)
            bounds_nB = [look_up(bounds.at[:, token], own_B) for token in range(n)]
            pages_B = lax.div(functools.reduce(jnp.maximum, bounds_nB) + (PAGE - 1), _all(PAGE, own_B))
            pages_B = jnp.where(request_B < B, pages_B, _all(0, pages_B))
            pages_s[...] = pages_B
            whole_s[...] = lax.div(functools.reduce(jnp.minimum, bounds_nB), _all(PAGE, own_B))
            middles_s[...] = pages_B.astype(f32) - 0.5
            limit = cheapest(limit_C)
            splits_B = lax.div(pages_B + (limit - 1), _all(limit, pages_B))
            splits_s[...] = splits_B
            sums_s[...] = sums_up_to(request_B, splits_B)
            # All loads come first, so that they are in flight together.
            tables = (items, item_columns()), (splits, split_columns()), (runs, run_columns())
            for ref, columns in tables:
                _write_columns(ref, columns, emulated)

        def cheapest(limit_C):
            """The candidate of the least cost, the smallest of several."""
            # Pages less a half, divided by a limit and rounded down: one less than the quotient rounded up, since it is farther
            # from whole numbers than the product errs. It is 0 past the last request, where pages are 0.
            reciprocal_C = 1.0 / limit_C.astype(f32)

            def add(step, count_C):
                for middle in [middles_s[step * AT_ONCE + i] for i in range(AT_ONCE)]:
                    count_C += (middle * reciprocal_C).astype(i32)
                return count_C

            count_C = lax.fori_loop(i32(0), i32(-(-B // AT_ONCE)), add, _all(B, limit_C))
            rounds_C = lax.div(count_C * blocks + (sms - 1), _all(sms, count_C))
            cost_C = rounds_C * (limit_C + overhead_pages)
            cost_C = jnp.where(count_C <= most_items, cost_C, _all(np.iinfo(np.int32).max, cost_C))
            return jnp.where(cost_C == cost_C.min(), limit_C, _all(max_pages, limit_C)).min()

        def sums_up_to(request_B, splits_B):
            """Of each request and those before it: items, and in the upper bits requests with several."""
            sums_B = splits_B + jnp.where(splits_B > 1, _all(1 << COUNT_BITS, splits_B), _all(0, splits_B))
            for distance in (1 << bit for bit in range((B - 1).bit_length())):
                sums_s[...] = sums_B
                before_B = look_up(sums_s, jnp.maximum(request_B - distance, 0))
                sums_B = jnp.where(request_B >= distance, sums_B + before_B, sums_B)
            return sums_B

        def ends(request):
            return look_up(sums_s, request) & ((1 << COUNT_BITS) - 1)

        def ranks(request):
            sums = look_up(sums_s, request)
            return lax.shift_right_logical(sums, _all(COUNT_BITS, sums))

        def passed(ends, number):
            """How many requests end at the number or before it: whose it is, and the last one of those past all."""
            request = _all(0, number)
            for step in (1 << bit for bit in reversed(range((B - 1).bit_length()))):
                request = jnp.where(ends(request + (step - 1)) <= number, request + step, request)
            return jnp.minimum(request, B - 1)

        def item_columns():
            item_I = _numbers(items.shape[0])
            request_I = passed(ends, item_I)
            splits_I, pages_I = look_up(splits_s, request_I), look_up(pages_s, request_I)
            each_I = lax.div(pages_I + splits_I - 1, splits_I)
            start_I = (item_I - ends(request_I) + splits_I) * each_I
            end_I = jnp.minimum(start_I + each_I, pages_I)
            start_I = jnp.minimum(start_I, end_I)
            whole_I = _all(0, item_I) if all_masked else look_up(whole_s, request_I)
            unmasked_I = jnp.minimum(jnp.maximum(whole_I - start_I, 0), end_I - start_I)
            alone_I = jnp.where(splits_I == 1, _all(1, splits_I), _all(0, splits_I))
            columns = [request_I, start_I, end_I, unmasked_I, alone_I]
            if page_tables:
                columns.append(look_up(page_tables[0], request_I, jnp.minimum(start_I, max_pages - 1)))
            return columns

        def split_columns():
            rank_K = _numbers(splits.shape[0])
            request_K = passed(ranks, rank_K)
            splits_K = look_up(splits_s, request_K)
            exists_K = rank_K < lax.shift_right_logical(sums_s[B - 1], i32(COUNT_BITS))
            columns = request_K, ends(request_K) - splits_K, splits_K
            return [jnp.where(exists_K, column, _all(0, column)) for column in columns]

        def run_columns():
            request_B = _numbers(requests)
            splits_B = look_up(splits_s, request_B)
            columns = ends(request_B) - splits_B, splits_B
            return [jnp.where(splits_B > 1, column, _all(0, column)) for column in columns]

        @pl.when(block == 0)
        def _():
            write_schedule()

        @pl.when(block > 0)
        def _():
            write_row_bounds(block - 1)

    def whole(*shape):
        return jax.ShapeDtypeStruct(shape, i32)

    of_requests = functools.partial(plgpu.SMEM, (requests,))
    body.__name__ = "split_schedule"
    return plgpu.kernel(
        body,
        out_type=(
            whole(_padded(most_items), 6 if with_pages else 5),
            whole(_padded(max(min(B, most_items - B), 1)), 3),
            whole(requests, 2),
            whole(B, row_blocks * ROWS),
        ),
        scratch_types={
            "pages_s": of_requests(i32),
            "whole_s": of_requests(i32),
            "middles_s": of_requests(f32),
            "splits_s": of_requests(i32),
            "sums_s": of_requests(i32),
        },
        # The schedule, and the rows' bounds of each request.
        grid=(1 + B,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048
        ),
        interpret=interpret,
    )


def _numbers(size: int) -> jax.Array:
    """0 ... size - 1, each in the thread that has the element."""
    return plgpu.broadcasted_iota(i32, (size,), 0, layout=OF_THREADS)


def _all(value: int | jax.Array, like: jax.Array) -> jax.Array:
    return plgpu.layout_cast(jnp.full(like.shape, value, i32), OF_THREADS)


def _look_up(ref: Any, *at: jax.Array, layout: Any = OF_THREADS, emulated: bool) -> jax.Array:
    """ref[*at] of an int32 reference, `at` int32 [N] for each of its axes, which Pallas' loads cannot say.

    Args:
        layout: of `at`, in which a register is one element.
        emulated: for the interpreter, which has no such loads.
    """
    if emulated:
        return ref[...][at]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[layout] * len(at)),
        return_type=plgpu.ShapeDtypeStruct(at[0].shape, i32, layout=layout),
    )
    def read(_: Any, ref: Any, *at: Any) -> mgpu.FragmentedArray:
        found = np.empty_like(at[0].registers)
        for place, register in np.ndenumerate(at[0].registers):
            value = memref.load(ref, [_index(axis.registers[place]) for axis in at])
            found[place] = vector.broadcast(register.type, value)
        return mgpu.FragmentedArray(_registers=found, _layout=at[0].layout, _is_signed=True)

    return read(ref, *at)


def _write_columns(ref: Any, columns: list[jax.Array], emulated: bool) -> None:
    """ref[:, j] = columns[j], without the two barriers of each of Pallas' stores. `emulated`: see `_look_up`."""
    if emulated:
        for j, column in enumerate(columns):
            ref[:, j] = column
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[OF_THREADS] * (1 + len(columns))))
    def write(_: Any, ref: Any, rows: Any, *columns: Any) -> None:
        for place, row in np.ndenumerate(rows.registers):
            for j, column in enumerate(columns):
                index = [_index(row), mgpu.utils.c(j, ir.IndexType.get())]
                memref.store(_element(column.registers[place]), ref, index)

    write(ref, _numbers(ref.shape[0]), *columns)


def _element(register: Any) -> Any:
    """The only one of a register."""
    (element,) = elements(register)
    return element


def _index(register: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), _element(register))
