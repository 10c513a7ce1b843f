"""Pallas Mosaic GPU for Hopper: `decompress` turns latents into keys and values a chunk at a time, and a
FlashAttention-3-like kernel (arXiv 2407.08608) attends to each chunk, going on from its results for the one before: a
normalised output, with its log-sum-exp as the maximum and 1 as the sum, is a state of the online softmax.

Keys are laid out in blocks. Each request starts a new block; the blocks of all requests, one after another, are cut into
chunks of a fixed number of blocks. A tile of queries is 128 rows of the flat array, of which those of one request count;
each request starts a new tile, so that a row may be in two tiles. No block and no tile thus belongs to several requests,
whatever the lengths are, and all shapes are static: those of the most blocks that a call can have. Blocks that it does
not have cost very little.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load, run_in_place, transpose_ref
from pallas_kernels.latents import Fp8Latents, Latents, dequantise
from pallas_kernels.mla_prefill.decompress import LATENT, PAGE, PAGES, ROPE, WIDTHS, decompress, list_pages
from pallas_kernels.mosaic_attention import MASKED, UNSEEN, add_weighted, over_columns, params, softmax_step
from pallas_kernels.query_tiles import HALF, TILE, Queries, padded_rows, tile_queries

# Keys and values of a chunk: 32768 keys at 16 heads, 4096 at 128. They pass through HBM, which attention to a chunk
# hardly notices: eight tiles of 128 queries of each of 16 heads share a read of 8 KiB a key, at 10.5 MFLOP a key.
CHUNK_BYTES = 256 * 2**20
# Up to this many chunks a call visits all that its shape may need: one without blocks takes about 8 us. A number of
# chunks that only the device knows makes the host wait (some 300 us a layer), and a CUDA graph cannot record a loop.
MOST_UNROLLED = 8
i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


class Pipeline(NamedTuple):
    """Sizes that change the speed, not the result: keys of a block, blocks in flight, and registers of a thread."""

    keys: int = 128
    stages: int = 2
    consumer_registers: int = 240
    producer_registers: int = 24

    @classmethod
    def of(cls, value: int) -> "Pipeline":
        """For values of so many columns. 256 of 64 rows take half of a thread's registers, and with as many keys a block
        of 64 fills as much shared memory as one of 128."""
        return cls() if value <= 128 else cls(keys=64)


def unsupported_reason(
    q_nope: jax.Array, q_rope: jax.Array, w_uk: jax.Array, w_uv: jax.Array, latent: Latents
) -> str | None:
    """Why the kernels do not support this call, or None if they do."""
    sizes = (w_uk.shape[2], w_uk.shape[1], q_rope.shape[2], w_uv.shape[1])
    supported = [(LATENT, nope, ROPE, value) for nope, value in WIDTHS]
    if sizes not in supported:
        return f"latent, nope, rope and value widths are {sizes}, not {' or '.join(map(str, supported))}"
    if latent.shape[1] != PAGE:
        return f"pages hold {latent.shape[1]} tokens, not {PAGE}"
    plain = latent.rope if isinstance(latent, Fp8Latents) else latent
    return hopper_unsupported_reason(*(x.dtype for x in (q_nope, q_rope, w_uk, w_uv, plain)))


@functools.partial(jax.jit, static_argnames=("scale", "chunk", "pipeline", "interpret"))
def mla_prefill(
    q_nope: jax.Array,
    q_rope: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    latent: Latents,
    page_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    ends: jax.Array,
    *,
    scale: float,
    chunk: int | None = None,
    pipeline: Pipeline | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `api.mla_prefill`, where `unsupported_reason` is None.

    Jitted, so that the layers of a model share one lowering.

    Args:
        chunk: keys that are decompressed at a time, a multiple of 128 (default: as many as fit CHUNK_BYTES).
        pipeline: default: `Pipeline.of` the values.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    E, max_pages = page_tables.shape
    (H, D, _), V = w_uk.shape, w_uv.shape[1]
    pipeline = pipeline or Pipeline.of(V)
    keys = pipeline.keys
    chunk = chunk or CHUNK_BYTES // (2 * (D + V) * H) // (PAGES * PAGE) * (PAGES * PAGE)
    most_blocks = E * -(-max_pages * PAGE // keys)
    chunk_blocks = min(chunk // keys, most_blocks)
    # Whole tiles of `decompress`, which are more than a block if blocks have 64 keys.
    chunk_pages = -(-chunk_blocks * keys // (PAGES * PAGE)) * PAGES
    starts_E = list_starts(ends, keys)
    queries = tile_queries(token_rows, positions, E)
    padding = ((0, padded_rows(token_rows.shape[0]) - token_rows.shape[0]), (0, 0), (0, 0))
    q_nope_PHD, q_rope_PHR = jnp.pad(q_nope, padding), jnp.pad(q_rope, padding)

    def attend_chunk(c: jax.Array, so_far: tuple[jax.Array, jax.Array] | None) -> tuple[jax.Array, jax.Array]:
        first = c * chunk_blocks
        pages = list_pages(page_tables, starts_E, ends, first, chunk_pages, keys)
        count = jnp.clip((starts_E[-1] - first) * (keys // PAGE), 0, chunk_pages)
        cache, pages = unquantised(latent, pages)
        k_nope_CHD, k_rope_CR, v_CHV = decompress(cache, w_uk, w_uv, pages, count, interpret=interpret)
        work_T5 = tile_work(queries, starts_E, first, chunk_blocks, keys)
        return attend(
            q_nope_PHD, q_rope_PHR, k_nope_CHD, k_rope_CR, v_CHV, work_T5, so_far,
            scale=scale, pipeline=pipeline, interpret=interpret,
        )  # fmt: skip

    chunks = -(-most_blocks // chunk_blocks)
    if chunks == 1:
        o_TQHV, _ = attend_chunk(i32(0), None)
    else:
        T = queries.row.shape[0]
        state = jnp.zeros((T, TILE, H, V), bf16), jnp.full((T, H, TILE), UNSEEN, f32)
        if chunks <= MOST_UNROLLED:
            for c in range(chunks):
                state = attend_chunk(i32(c), state)
        else:
            state = lax.fori_loop(i32(0), -(-starts_E[-1] // chunk_blocks), attend_chunk, state)
        o_TQHV, _ = state
    # Padding tokens may point to tiles without tokens, which are uninitialised and may be NaN.
    return jnp.where((token_rows < E)[:, None, None], o_TQHV[queries.tile_of, queries.row_of], 0).astype(q_nope.dtype)


def unquantised(latent: Latents, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An array of latents and the list of its pages, from `list_pages`: of quantised ones the chunk's, dequantised.

    XLA writes them out, a seventh of the keys and values that follow, or less, so that one kernel decompresses both kinds.
    """
    if not isinstance(latent, Fp8Latents):
        return latent, pages
    return dequantise(latent[pages[:, 0]], bf16), pages.at[:, 0].set(jnp.arange(len(pages), dtype=i32))


def list_starts(ends: jax.Array, keys: int) -> jax.Array:
    """Where each request's blocks start in the list of all blocks: int32 [E + 1]; the last entry is the list's length."""
    return jnp.concatenate([jnp.zeros(1, i32), jnp.cumsum(-(-ends // keys), dtype=i32)])


def tile_work(queries: Queries, starts_E: jax.Array, first: jax.Array, chunk_blocks: int, keys: int) -> jax.Array:
    """The work of each tile in the chunk of blocks [first, first + chunk_blocks) of the list.

    Returns:
        int32 [T, 5]: its first block in the chunk; how many blocks it visits; how many of them, from the first, every row
        sees in full; by how many positions its first row is after the first key of its first block; and that row.
    """
    start_T, position_T = starts_E[queries.request], queries.position
    visible_T = jnp.where(queries.filled > 0, -(-(position_T + queries.filled) // keys), 0)
    begin_T = jnp.maximum(start_T, first)
    blocks_T = jnp.maximum(jnp.minimum(start_T + visible_T, first + chunk_blocks) - begin_T, 0)
    skipped_T = begin_T - start_T
    whole_T = jnp.clip((position_T + 1) // keys - skipped_T, 0, blocks_T)
    begin_T = jnp.where(blocks_T > 0, begin_T - first, 0)
    return jnp.stack([begin_T, blocks_T, whole_T, position_T - skipped_T * keys, queries.row], axis=1).astype(i32)


@functools.partial(jax.jit, static_argnames=("scale", "pipeline", "interpret"))
def attend(
    q_nope: jax.Array,
    q_rope: jax.Array,
    k_nope: jax.Array,
    k_rope: jax.Array,
    v: jax.Array,
    work: jax.Array,
    so_far: tuple[jax.Array, jax.Array] | None = None,
    *,
    scale: float,
    pipeline: Pipeline,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of query tiles to ranges of key blocks, all bfloat16. Jitted, so that chunks share one lowering.

    Args:
        q_nope: [P, H, D], q_rope: [P, H, ROPE], P as `padded_rows` has it.
        k_nope: [C, H, D], k_rope: [C, ROPE], v: [C, H, V], D and V of WIDTHS; finite.
        work: int32 [T, 5] from `tile_work`.
        so_far: results for earlier keys, from which the kernel goes on; 0 and UNSEEN where there are none.

    Returns:
        o [T, TILE, H, V] in bfloat16 and base-2 log-sum-exp [T, H, TILE] in float32. Rows that see no key have
        o = 0 and a log-sum-exp near UNSEEN; tiles without blocks are left as in `so_far`, or uninitialised.
    """
    T, (_, H, D), V = work.shape[0], q_nope.shape, v.shape[2]
    # Heads that run at the same time share the L2 cache: at 128 heads their keys and values would not fit it.
    group = math.gcd(H, 16)
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = functools.partial(plgpu.SMEM, dtype=bf16, transforms=tiled)
    keys, stages = pipeline.keys, pipeline.stages
    scratch: dict[str, Any] = {
        "q_nope_s": smem((2, HALF, D)),
        "q_rope_s": smem((2, HALF, ROPE)),
        "k_nope_s": smem((stages, keys, D)),
        "k_rope_s": smem((stages, keys, ROPE)),
        "v_s": smem((stages, keys, V)),
        "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "k_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_full": plgpu.Barrier(num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "turns": plgpu.Barrier(num_arrivals=2),
    }
    if interpret:
        scratch["weights_s"] = smem((2, HALF, keys))
    body = functools.partial(
        _body, group=group, log2_scale=scale * math.log2(math.e), pipeline=pipeline, resumes=so_far is not None
    )
    body.__name__ = "mla_prefill"  # type: ignore[attr-defined]
    inputs = (q_nope, q_rope, k_nope, k_rope, v, work)
    how: dict[str, Any] = {
        "scratch_types": scratch,
        "grid": (H // group, T, group),
        "grid_names": ("group", "tile", "head"),
        "num_threads": 3,
        "thread_name": "wg",
        "compiler_params": params(),
        "interpret": interpret,
    }
    of_halves = (T, H, 2, HALF)
    if so_far is None:
        out_type = jax.ShapeDtypeStruct((T, TILE, H, V), bf16), jax.ShapeDtypeStruct(of_halves, f32)
        o, lse = plgpu.kernel(body, out_type=out_type, **how)(*inputs)
    else:
        o, lse = run_in_place(body, inputs, (so_far[0], so_far[1].reshape(of_halves)), **how)
    return o, lse.reshape(T, H, TILE)


def _body(
    q_nope,
    q_rope,
    k_nope,
    k_rope,
    v,
    work,
    o,
    lse,
    *,
    q_nope_s,
    q_rope_s,
    k_nope_s,
    k_rope_s,
    v_s,
    q_full,
    k_full,
    v_full,
    k_free,
    v_free,
    turns,
    weights_s=None,
    group,
    log2_scale,
    pipeline,
    resumes,
):
    """One tile of one head: warpgroup 2 copies, warpgroups 0 and 1 compute 64 query rows each."""
    keys, stages, D, V = pipeline.keys, pipeline.stages, q_nope.shape[2], v.shape[2]
    wg = lax.axis_index("wg")
    head = lax.axis_index("group") * group + lax.axis_index("head")
    # The last tiles of a prompt see the most keys: they start first, so that short ones fill the gaps at the end.
    tile = work.shape[0] - 1 - lax.axis_index("tile")
    first, blocks, whole, lead, row = (work[tile, j] for j in range(5))

    @pl.when((wg == 2) & (blocks > 0))
    def _produce():
        plgpu.set_max_registers(pipeline.producer_registers, action="decrease")
        for half in range(2):
            rows = pl.ds(row + half * HALF, HALF)
            plgpu.copy_gmem_to_smem(q_nope.at[rows, head], q_nope_s.at[half], q_full.at[half])
            plgpu.copy_gmem_to_smem(q_rope.at[rows, head], q_rope_s.at[half], q_full.at[half])

        @pl.loop(0, blocks)
        def _(i):
            s = lax.rem(i, i32(stages))
            rows = pl.ds((first + i) * keys, keys)

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(k_free.at[s])

            plgpu.copy_gmem_to_smem(k_nope.at[rows, head], k_nope_s.at[s], k_full.at[s])
            plgpu.copy_gmem_to_smem(k_rope.at[rows], k_rope_s.at[s], k_full.at[s])

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(v_free.at[s])

            plgpu.copy_gmem_to_smem(v.at[rows, head], v_s.at[s], v_full.at[s])

        @pl.loop(lax.max(blocks - stages, i32(0)), blocks)  # every completion must be awaited before the kernel ends
        def _(i):
            s = lax.rem(i, i32(stages))
            plgpu.barrier_wait(k_free.at[s])
            plgpu.barrier_wait(v_free.at[s])

    @pl.when((wg < 2) & (blocks > 0))
    def _consume():
        plgpu.set_max_registers(pipeline.consumer_registers, action="increase")

        def turn():
            """One warpgroup has the tensor cores while the other computes its softmax; here they change places."""
            plgpu.barrier_arrive(turns)
            plgpu.barrier_wait(turns)

        def step(i, carry, masked):
            acc, top, total = carry
            s = lax.rem(i, i32(stages))
            plgpu.barrier_wait(k_full.at[s])

            def score(ref):
                plgpu.wgmma(ref, q_nope_s.at[wg], transpose_ref(k_nope_s.at[s], (1, 0)))
                plgpu.wgmma(ref, q_rope_s.at[wg], transpose_ref(k_rope_s.at[s], (1, 0)))
                turn()
                return ref[...]

            x = pl.run_scoped(score, plgpu.ACC((HALF, keys), f32))
            plgpu.barrier_arrive(k_free.at[s])
            if masked:
                query, key = (plgpu.broadcasted_iota(i32, x.shape, d, layout=plgpu.Layout.WGMMA) for d in (0, 1))
                x = jnp.where(key - query <= lead + wg * HALF - i * keys, x, MASKED)
            acc, top, total, weights = softmax_step(x, acc, top, total, log2_scale)
            plgpu.barrier_wait(v_full.at[s])
            turn()
            acc = add_weighted(acc, weights, v_s.at[s], None if weights_s is None else weights_s.at[wg])
            plgpu.barrier_arrive(v_free.at[s])
            return acc, top, total

        plgpu.barrier_wait(q_full.at[wg])
        out = o.at[tile, pl.ds(wg * HALF, HALF), head]
        if resumes:
            carry = (
                load(out, (slice(None), slice(None)), layout=plgpu.Layout.WGMMA).astype(f32),
                load(lse, (tile, head, wg, slice(None)), layout=plgpu.Layout.WGMMA.reduce(1)),
                plgpu.layout_cast(jnp.ones((HALF,), f32), plgpu.Layout.WGMMA.reduce(1)),
            )
        else:
            carry = (
                plgpu.layout_cast(jnp.zeros((HALF, V), f32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((HALF,), UNSEEN, f32), plgpu.Layout.WGMMA.reduce(1)),
                plgpu.layout_cast(jnp.zeros((HALF,), f32), plgpu.Layout.WGMMA.reduce(1)),
            )
        # Half a step apart, and together again at the end.
        pl.when(wg == 1)(turn)
        carry = lax.fori_loop(i32(0), whole, functools.partial(step, masked=False), carry)
        acc, top, total = lax.fori_loop(whole, blocks, functools.partial(step, masked=True), carry)
        pl.when(wg == 0)(turn)

        total = jnp.maximum(total, 1e-30)  # 0 for rows that saw no key
        lse[tile, head, wg, :] = top + jnp.log(total) * math.log2(math.e)
        result = (acc * over_columns(1.0 / total, acc.shape)).astype(bf16)
        # The queries' memory is free by now, and has as many columns as values or more.
        staging = ((q_nope_s, 0, min(D, V)), (q_rope_s, D, V - D)) if V > D else ((q_nope_s, 0, V),)
        for staged, start, columns in staging:
            staged[wg] = result[:, start : start + columns]
        plgpu.commit_smem()
        for staged, start, columns in staging:
            plgpu.copy_smem_to_gmem(staged.at[wg], out.at[:, pl.ds(start, columns)])
        plgpu.wait_smem_to_gmem(0)
