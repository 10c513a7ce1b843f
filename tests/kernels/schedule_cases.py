"""The schedule of split attention from its kernel and from plain XLA, and attention by both: to the bit the same."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tuning
from pallas_kernels.gqa_decode import mosaic as gqa
from pallas_kernels.mla_decode import mosaic as mla
from pallas_kernels.mla_decode.shapes import CACHED, LATENT, SCALE
from pallas_kernels.split_kv import PAGE, make_schedule, num_items
from pallas_kernels.split_schedule import Plan, split_schedule
from tests.kernels.paged_cases import paged_pool, window_bounds

# Requests, tokens of a window, columns of the page table, blocks of an item, blocks that run at once, and of what the number of
# items is a multiple, as well as the least limit to their pages.
CASES = (
    (1, 1, 64, 1, 132, 1),
    (1, 4, 1, 1, 12, 2),  # a single candidate
    (5, 8, 64, 4, 12, 2),  # more requests than one round has
    (12, 1, 300, 1, 12, 1),  # as many items as requests: none can be split
    (33, 3, 2048, 2, 264, 2),
)
MANY_REQUESTS = (130, 1, 64, 1, 132, 1)  # more than a block has threads
HEADS = 20


LENGTHS = (70, 200, 64, 333)  # with SMS one or several items
SMS = 8


def chosen(call: Callable[..., Any], *args: Any, schedule_kernel: bool) -> Any:
    """call(*args) with the choice, of which jitted functions traced before would know nothing."""
    jax.clear_caches()
    with tuning.use(dataclasses.replace(tuning.current(), schedule_kernel=schedule_kernel)):
        out = call(*args)
    jax.clear_caches()
    return out


def check_schedules(case: tuple[int, ...], interpret: Any = False) -> list[Plan]:
    """Lengths differ much, or little, or are all the longest. Returns the kernel's plans."""
    B, n, max_pages, blocks, sms, multiple = case
    least = multiple
    row_blocks = -(-HEADS * n // 64)
    rng = np.random.default_rng(B)
    most = max_pages * PAGE

    def plan(bounds, tables, all_masked):
        return split_schedule(
            bounds,
            max_pages,
            blocks,
            sms,
            heads=HEADS,
            row_blocks=row_blocks,
            page_tables=tables,
            multiple=multiple,
            least=least,
            all_masked=all_masked,
            interpret=interpret,
        )

    def plans(calls):
        run = jax.jit(plan, static_argnums=2)
        return [jax.tree.map(np.asarray, run(*call)) for call in calls]

    calls = []
    for shortest, all_masked in ((1, False), (1, True), (most // 3, False), (most, False)):
        ends = np.exp(rng.uniform(math.log(shortest), math.log(most + 1), (B, 1)))
        bounds = np.clip(ends.astype(np.int32) - rng.integers(0, 9, (B, n)), 1, most).astype(np.int32)
        calls.append((bounds, rng.integers(1, 9999, (B, max_pages)).astype(np.int32), all_masked))
    of_kernel = chosen(plans, calls, schedule_kernel=True)
    for got, want, (bounds, _, all_masked) in zip(
        of_kernel, chosen(plans, calls, schedule_kernel=False), calls, strict=True
    ):
        check_plan(got, want, count=num_items(B, blocks, sms))
        assert got.num_items % multiple == 0
        items = np.array(make_schedule(jnp.asarray(bounds), max_pages, blocks, sms, least).items)
        items[:, 3] *= not all_masked
        np.testing.assert_array_equal(want.items[: len(items), :5], items)
    return of_kernel


def check_plan(got: Plan, want: Plan, count: int) -> None:
    """The rows that count of each array, and the others' promises.

    Args:
        count: items of the schedule.
    """
    assert (got.num_items, got.num_splits) == (want.num_items, want.num_splits)
    np.testing.assert_array_equal(got.items[:count, :5], want.items[:count, :5])
    has_pages = want.items[:count, 2] > want.items[:count, 1]
    np.testing.assert_array_equal(got.items[:count, 5][has_pages], want.items[:count, 5][has_pages])
    for plan in (got, want):
        assert len(plan.items) >= plan.num_items
        assert (plan.items[count:, 1] == plan.items[count:, 2]).all()
        assert not plan.splits[want.num_splits :].any()
    np.testing.assert_array_equal(got.splits[: want.num_splits], want.splits)
    np.testing.assert_array_equal(got.runs[: len(want.runs)], want.runs)
    np.testing.assert_array_equal(got.row_bounds, want.row_bounds)


def check_attention(attend: Callable[[Any], jax.Array], interpret: Any = False) -> list[jax.Array]:
    """Some requests are split. Returns the outputs without the kernel of the schedule, and with it."""
    outputs = [chosen(attend, interpret, schedule_kernel=on) for on in (False, True)]
    without, with_kernel = (np.asarray(out, np.float32) for out in outputs)
    assert np.isfinite(without).all()
    np.testing.assert_array_equal(with_kernel, without)
    return outputs


def gqa_decode(interpret: Any, window: int | None = None) -> jax.Array:
    n, K, G, D = 2, 1, 4, 64
    rng = np.random.default_rng(0)
    pool, tables = paged_pool(rng, LENGTHS, 2 * K * D)
    k, v = (jnp.asarray(part.reshape(-1, PAGE, K, D), jnp.bfloat16) for part in np.split(pool, 2, axis=-1))
    q = jnp.asarray(3 * rng.standard_normal((len(LENGTHS), n, K, G, D)), jnp.bfloat16)
    bounds, options = window_bounds(LENGTHS, n), {"scale": D**-0.5, "sms": SMS // gqa.RESIDENT}
    return gqa.gqa_decode(q, k, v, tables, bounds, window=window, interpret=interpret, **options)


def mla_decode(interpret: Any, n: int = 1, *, values: bool = False) -> jax.Array:
    """Of so few tokens that `values` are made in the kernel that merges."""
    H, V = 4, 64
    rng = np.random.default_rng(1)
    pool, tables = paged_pool(rng, LENGTHS, CACHED)
    q = jnp.asarray(rng.standard_normal((len(LENGTHS), n, H, CACHED)), jnp.bfloat16)
    w_uv = jnp.asarray(rng.standard_normal((H, V, LATENT)) / LATENT**0.5, jnp.bfloat16) if values else None
    latent, bounds = jnp.asarray(pool, jnp.bfloat16), window_bounds(LENGTHS, n)
    return mla.mla_decode(q, latent, tables, bounds, w_uv, scale=SCALE, sms=SMS, interpret=interpret)
