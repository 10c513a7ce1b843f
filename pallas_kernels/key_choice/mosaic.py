"""Scores of index keys on Hopper, in Pallas Mosaic GPU; `places` chooses among them.

A thread block of one warpgroup scores a run of pages for one query token. The 64 keys of a page are the rows of a product and
the indexer's heads its columns, so the weighted sum over heads is one along a row, and a score is written once. Pages are
copied ahead, a page a stage; the tokens of a window read the same ones, which the L2 cache has after the first.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.key_choice.places import key_of, padded, places
from pallas_kernels.key_choice.shapes import HEAD_DIM, HEADS
from pallas_kernels.mosaic_attention import params
from pallas_kernels.split_kv import PAGE, make_schedule
from pallas_kernels.unrolling import by_queries

# Thread blocks on a multiprocessor, and pages of 16 KiB that each has in flight.
RESIDENT, STAGES = 2, 4
# Tokens whose scores are in memory at a time.
TOKENS = 128

OF_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


def unsupported_reason(q: jax.Array | jax.ShapeDtypeStruct, keys: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    heads, width = q.shape[1:]
    if width != HEAD_DIM or heads not in HEADS.values():
        *others, last = map(str, sorted(set(HEADS.values())))
        return f"it supports {', '.join(others)} or {last} heads of {HEAD_DIM}, not {heads} of {width}"
    if keys.shape[1] != PAGE:
        return f"it supports pages of {PAGE} tokens, not {keys.shape[1]}"
    return hopper_unsupported_reason(q.dtype, keys.dtype)


@functools.partial(jax.jit, static_argnames=("count", "sms", "interpret"))
def choose_keys(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    page_tables: jax.Array,
    rows: jax.Array,
    bounds: jax.Array,
    *,
    count: int,
    sms: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See api.py; `sms` and `interpret` as in `scores`. Jitted, so that the layers of a model share one lowering."""
    count = min(count, page_tables.shape[1] * PAGE)

    def choose(q: jax.Array, weights: jax.Array, rows: jax.Array, bounds: jax.Array) -> jax.Array:
        found = scores(q, weights, keys, page_tables[rows], bounds, sms=sms, interpret=interpret)
        return places(found, bounds, count, interpret=interpret)

    return by_queries(choose, TOKENS, q, weights, rows, bounds, straight=True)


@functools.partial(jax.jit, static_argnames=("sms", "interpret"))
def scores(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    page_tables: jax.Array,
    bounds: jax.Array,
    *,
    sms: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Scores of the keys before each token's bound, as `key_of` them: int32 [T, `padded(max_pages * 64)`].

    Those of other keys are not written.

    Jitted, so that the parts of a step share one lowering.

    Args:
        page_tables: int32 [T, max_pages] of each token; others as in api.py.
        sms: multiprocessors (default: those of the device).
        interpret: passed to Pallas.
    """
    T, N, _ = q.shape
    sms = sms or jax.devices()[0].core_count
    max_pages = page_tables.shape[1]
    items, _ = make_schedule(jnp.maximum(bounds, 1)[:, None], max_pages, 1, sms * RESIDENT)
    kernel = _score_kernel(T, N, max_pages, items.shape[0], interpret)
    return kernel(q, weights, keys, page_tables, items)


@functools.cache
def _score_kernel(T: int, N: int, max_pages: int, num_items: int, interpret: Any) -> Any:
    """kernel(q [T, N, 128], weights [T, N], keys, page_tables [T, max_pages], items) -> int32 [T, padded]."""

    def body(q, weights, keys, page_tables, items, out, *, q_s, k_s, q_full, k_full):
        item = lax.axis_index("item")
        token, first, end = (items[item, j] for j in range(3))
        n = end - first

        def number(i):
            return page_tables[token, lax.min(first + i, end - 1)]

        def copy_keys(page, stage):
            plgpu.copy_gmem_to_smem(keys.at[page], k_s.at[stage], k_full.at[stage])

        # An item without pages has no work.
        @pl.when(n > 0)
        def _():
            plgpu.copy_gmem_to_smem(q.at[token], q_s, q_full)

            @pl.loop(0, lax.min(n, i32(STAGES)))
            def _(i):
                copy_keys(number(i), i)

            weights_N = load(weights, (token, pl.ds(0, N)), layout=OF_COLUMNS)
            weights_SN = lax.broadcast_in_dim(weights_N, (PAGE, N), [1])
            plgpu.barrier_wait(q_full)

            def step(i, later_page):
                stage, later = lax.rem(i, i32(STAGES)), i + STAGES

                def products(ref):
                    plgpu.barrier_wait(k_full.at[stage])
                    plgpu.wgmma(ref, k_s.at[stage], transpose_ref(q_s, (1, 0)))
                    return ref[...]

                x_SN = pl.run_scoped(products, plgpu.ACC((PAGE, N), f32))

                @pl.when(later < n)
                def _():
                    copy_keys(later_page, stage)

                x_S = (jnp.maximum(x_SN, 0.0) * weights_SN).sum(axis=1)
                out[token, pl.ds((first + i) * PAGE, PAGE)] = key_of(x_S)
                # A round before it is needed: otherwise each copy would wait for its page's number.
                return number(later + 1)

            lax.fori_loop(i32(0), n, step, number(i32(STAGES)))

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    matrix = functools.partial(plgpu.SMEM, dtype=bf16, transforms=tiled)
    body.__name__ = "key_scores"
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, padded(max_pages * PAGE)), i32),
        scratch_types={
            "q_s": matrix((N, HEAD_DIM)),
            "k_s": matrix((STAGES, PAGE, HEAD_DIM)),
            "q_full": plgpu.Barrier(),
            "k_full": plgpu.Barrier(num_barriers=STAGES),
        },
        grid=(num_items,),
        grid_names=("item",),
        # With Pallas' automatic barriers: a page overwrites one that all four warps must have read.
        compiler_params=params(),
        interpret=interpret,
    )
