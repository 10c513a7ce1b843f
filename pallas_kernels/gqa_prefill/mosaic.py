"""Paged grouped-query attention over prompt chunks for Hopper, in Pallas Mosaic GPU: like FlashAttention-3 (arXiv
2407.08608), over keys and values where they lie in their pages.

No maintained library kernel has page tables and several requests of any lengths in one call: cuDNN, which
`jax.nn.dot_product_attention` calls, needs contiguous keys and each request padded to the longest.

A thread block computes a tile of 128 tokens of one request and one query head: two warpgroups have 64 rows each, a third
copies keys and values, two pages at a time.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.gqa_decode.mosaic import layout_unsupported_reason
from pallas_kernels.mosaic_attention import MASKED, UNSEEN, add_weighted, over_columns, params, softmax_step
from pallas_kernels.query_tiles import HALF, TILE, Queries, padded_rows, tile_queries
from pallas_kernels.split_kv import PAGE

# Blocks of keys in flight.
STAGES = 2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24

WGMMA = plgpu.Layout.WGMMA
OF_ROWS = WGMMA.reduce(1)
i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


def unsupported_reason(q: jax.Array, k: jax.Array, v: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    return layout_unsupported_reason(q, k) or hopper_unsupported_reason(q.dtype, k.dtype, v.dtype)


def block_pages(head_dim: int) -> int:
    """Pages of a block of keys: what fits in shared memory."""
    return 1 if head_dim > 128 else 2


@functools.partial(jax.jit, static_argnames=("scale", "window", "interpret"))
def gqa_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    ends: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See api.py. Jitted, so that the layers of a model share one lowering.

    Args:
        interpret: passed to Pallas.
    """
    P, K, G, D = q.shape
    E = page_tables.shape[0]
    queries = tile_queries(token_rows, positions, E)
    q_PHD = jnp.pad(q.reshape(P, K * G, D), ((0, padded_rows(P) - P), (0, 0), (0, 0)))
    work = tile_work(queries, ends, block_pages(D), window)
    scores = () if sinks is None else (sinks.reshape(K * G) * math.log2(math.e),)
    log2_scale = scale * math.log2(math.e)
    attend = _attend_kernel(queries.row.shape[0], K, G, D, log2_scale, window, interpret)
    o_TQHD = attend(q_PHD, k, v, page_tables, work, *scores)
    # Padding tokens may point to tiles without tokens, which are uninitialised and may be NaN.
    o_PHD = jnp.where((token_rows < E)[:, None, None], o_TQHD[queries.tile_of, queries.row_of], 0)
    return o_PHD.reshape(P, K, G, D)


def tile_work(queries: Queries, ends: jax.Array, pages: int, window: int | None) -> jax.Array:
    """The work of each tile, in blocks of `pages` pages. Blocks before its window are left out.

    Returns:
        int32 [T, 7]: its request; how many blocks of keys it visits; how many of them, from the first, every row sees in
        full; the position of its first row, counted from the first block, and the number of that row; the keys that its
        request owns from there on; the first page.
    """
    keys = pages * PAGE
    blocks_T = jnp.where(queries.filled > 0, -(-(queries.position + queries.filled) // keys), 0)
    whole_T = jnp.clip((queries.position + 1) // keys, 0, blocks_T)
    first_T = jnp.zeros_like(blocks_T)
    if window is not None:  # every block may begin before a row's window
        first_T = jnp.minimum(jnp.maximum(queries.position - (window - 1), 0) // keys, blocks_T)
        blocks_T, whole_T = blocks_T - first_T, jnp.zeros_like(whole_T)
    lead_T, owned_T = queries.position - first_T * keys, ends[queries.request] - first_T * keys
    work = [queries.request, blocks_T, whole_T, lead_T, queries.row, owned_T, first_T * pages]
    return jnp.stack(work, axis=1).astype(i32)


@functools.cache
def _attend_kernel(T: int, K: int, G: int, D: int, log2_scale: float, window: int | None, interpret: Any) -> Any:
    """kernel(q [rows, K * G, D], k, v, page_tables, work [T, 7], *sinks) -> [T, TILE, K * G, D].

    sinks: float32 [K * G], exponents of 2, or none. Tiles without work are uninitialised, and of a tile only the
    rows of its request count.
    """
    pages = block_pages(D)
    block_keys = pages * PAGE

    def body(
        q, k, v, page_tables, work, *refs, q_s, k_s, v_s, q_full, k_full, v_full, k_free, v_free, turns,
        weights_s=None,
    ):  # fmt: skip
        *sinks, o = refs
        wg, head = lax.axis_index("wg"), lax.axis_index("head")
        # The last tiles of a prompt see the most keys: they start first, so that short ones fill the gaps at the end.
        tile = T - 1 - lax.axis_index("tile")
        request, blocks, whole, lead, row, owned, first_page = (work[tile, j] for j in range(7))
        kv_head = lax.div(head, i32(G))

        def copy():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            for half in range(2):
                plgpu.copy_gmem_to_smem(q.at[pl.ds(row + half * HALF, HALF), head], q_s.at[half], q_full.at[half])

            @pl.loop(0, blocks)
            def _(i):
                s = lax.rem(i, i32(STAGES))
                last = page_tables.shape[1] - 1
                columns = [lax.min(first_page + i * pages + p, i32(last)) for p in range(pages)]
                numbers = [page_tables[request, column] for column in columns]
                for cache, part_s, full, free in ((k, k_s, k_full, k_free), (v, v_s, v_full, v_free)):

                    @pl.when(i >= STAGES)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[s])

                    for p, number in enumerate(numbers):
                        rows = pl.ds(p * PAGE, PAGE)
                        plgpu.copy_gmem_to_smem(cache.at[number, :, kv_head], part_s.at[s, rows], full.at[s])

            @pl.loop(
                lax.max(blocks - STAGES, i32(0)), blocks
            )  # every completion must be awaited before the kernel ends
            def _(i):
                s = lax.rem(i, i32(STAGES))
                plgpu.barrier_wait(k_free.at[s])
                plgpu.barrier_wait(v_free.at[s])

        def turn():
            """One warpgroup has the tensor cores while the other computes its softmax; here they change places."""
            plgpu.barrier_arrive(turns)
            plgpu.barrier_wait(turns)

        def clear_unowned(values_s, keys):
            """Zeroes the values after the last key of the request: 0 times NaN is NaN."""
            for first, column in itertools.product(range(0, block_keys, PAGE), range(0, D, PAGE)):
                tile = pl.ds(first, PAGE), pl.ds(column, PAGE)
                values = load(values_s, tile, layout=WGMMA)
                row = plgpu.broadcasted_iota(i32, values.shape, 0, layout=WGMMA)
                values_s[tile] = jnp.where(row < keys - first, values.astype(f32), 0.0).astype(bf16)
            plgpu.commit_smem()

        def step(i, carry, masked):
            acc, top, total = carry
            s, keys = lax.rem(i, i32(STAGES)), owned - i * block_keys
            plgpu.barrier_wait(k_full.at[s])

            def score(ref):
                plgpu.wgmma(ref, q_s.at[wg], transpose_ref(k_s.at[s], (1, 0)))
                turn()
                return ref[...]

            x = pl.run_scoped(score, plgpu.ACC((HALF, block_keys), f32))
            plgpu.barrier_arrive(k_free.at[s])
            if masked:
                query, key = (plgpu.broadcasted_iota(i32, x.shape, d, layout=WGMMA) for d in (0, 1))
                newest = lead + wg * HALF - i * block_keys
                seen = (key - query <= newest) & (key < keys)
                x = jnp.where(seen if window is None else seen & (key - query > newest - window), x, MASKED)
            acc, top, total, weights = softmax_step(x, acc, top, total, log2_scale)
            plgpu.barrier_wait(v_full.at[s])
            if masked:
                # For both warpgroups: the other one sums these values after its next turn, which is this one.
                pl.when((wg == 0) & (keys < block_keys))(lambda: clear_unowned(v_s.at[s], keys))
            turn()
            acc = add_weighted(acc, weights, v_s.at[s], None if weights_s is None else weights_s.at[wg])
            plgpu.barrier_arrive(v_free.at[s])
            return acc, top, total

        def attend():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            plgpu.barrier_wait(q_full.at[wg])
            top, total = (sinks[0][head], f32(1)) if sinks else (f32(UNSEEN), f32(0))
            carry = (
                plgpu.layout_cast(jnp.zeros((HALF, D), f32), WGMMA),
                plgpu.layout_cast(lax.broadcast_in_dim(top, (HALF,), ()), OF_ROWS),
                plgpu.layout_cast(lax.broadcast_in_dim(total, (HALF,), ()), OF_ROWS),
            )
            # Half a step apart, and together again at the end.
            pl.when(wg == 1)(turn)
            carry = lax.fori_loop(i32(0), whole, functools.partial(step, masked=False), carry)
            acc, _, total = lax.fori_loop(whole, blocks, functools.partial(step, masked=True), carry)
            pl.when(wg == 0)(turn)

            total = jnp.maximum(total, 1e-30)  # 0 for rows that saw no key
            q_s[wg] = (acc * over_columns(1.0 / total, acc.shape)).astype(bf16)  # its memory is free by now: staging
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s.at[wg], o.at[tile, pl.ds(wg * HALF, HALF), head])
            plgpu.wait_smem_to_gmem(0)

        pl.when((wg == 2) & (blocks > 0))(copy)
        pl.when((wg < 2) & (blocks > 0))(attend)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    matrix = functools.partial(plgpu.SMEM, dtype=bf16, transforms=tiled)
    scratch: dict[str, Any] = {
        "q_s": matrix((2, HALF, D)),
        "k_s": matrix((STAGES, block_keys, D)),
        "v_s": matrix((STAGES, block_keys, D)),
        "q_full": plgpu.Barrier(num_barriers=2),
        "k_full": plgpu.Barrier(num_arrivals=pages, num_barriers=STAGES),
        "v_full": plgpu.Barrier(num_arrivals=pages, num_barriers=STAGES),
        "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "turns": plgpu.Barrier(num_arrivals=2),
    }
    if interpret:
        scratch["weights_s"] = matrix((2, HALF, block_keys))
    body.__name__ = "gqa_prefill"
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, TILE, K * G, D), bf16),
        scratch_types=scratch,
        grid=(T, K * G),
        grid_names=("tile", "head"),  # query heads of a key head run together and share its pages in the L2 cache
        num_threads=3,
        thread_name="wg",
        compiler_params=params(),
        interpret=interpret,
    )
