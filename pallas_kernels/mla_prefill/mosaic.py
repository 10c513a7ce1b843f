"""Pallas Mosaic GPU for Hopper: latents become keys and values a chunk at a time, and a FlashAttention-3-like kernel
(arXiv 2407.08608) attends to each chunk; its results are merged by their log-sum-exps (arXiv 2501.01005 section 2.2).

Keys are laid out in blocks: the blocks of all requests one after another, each request starting a new block, cut into
chunks of a fixed number of blocks. Queries are laid out in tiles of 128 rows, each request starting a new tile. So no
block and no tile mixes requests, whatever the lengths are, and all shapes are static.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_obstacle
from pallas_kernels.compat import transpose_ref

LATENT, NOPE, ROPE, VALUE, PAGE = 512, 128, 64, 128, 64
# Query rows of a tile, and how many of them each of the two consumer warpgroups takes.
TILE, HALF = 128, 64
# Keys that are decompressed at a time: 33 MB of keys and values at 16 heads, which stay in the L2 cache.
CHUNK = 4096
# A key that a row does not see scores far below the maximum of a row that has not seen any key yet, so that its weight
# is exactly 0 even then. Finite, because the difference of two -inf is NaN.
MASKED, UNSEEN = -1e30, -1e20

i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


class Tuning(NamedTuple):
    """Sizes that change the speed, not the result: keys of a block, blocks in flight, and registers of a thread."""

    keys: int = 128
    stages: int = 2
    consumer_registers: int = 240
    producer_registers: int = 24


DEFAULT = Tuning()


def obstacle(q_nope: jax.Array, q_rope: jax.Array, w_uk: jax.Array, w_uv: jax.Array, latent: jax.Array) -> str | None:
    """Why `mla_prefill` cannot take this call on this device, None if it can."""
    sizes = (w_uk.shape[2], w_uk.shape[1], q_rope.shape[2], w_uv.shape[1])
    if sizes != (LATENT, NOPE, ROPE, VALUE):
        return f"latent, nope, rope and value widths are {sizes}, not {(LATENT, NOPE, ROPE, VALUE)}"
    if latent.shape[1] != PAGE:
        return f"pages hold {latent.shape[1]} tokens, not {PAGE}"
    return hopper_obstacle(*(x.dtype for x in (q_nope, q_rope, w_uk, w_uv, latent)))


@functools.partial(jax.jit, static_argnames=("scale", "chunk", "tuning", "interpret"))
def mla_prefill(
    q_nope: jax.Array,
    q_rope: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    latent: jax.Array,
    page_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    ends: jax.Array,
    *,
    scale: float,
    chunk: int = CHUNK,
    tuning: Tuning = DEFAULT,
    interpret: Any = False,
) -> jax.Array:
    """As `api.mla_prefill`; a call that `obstacle` objects to is undefined.

    Jitted, so that the layers of a model share one lowering.

    Args:
        chunk: keys that are decompressed at a time, a multiple of `tuning.keys`.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    E, max_pages = page_tables.shape
    most_blocks = E * -(-max_pages * PAGE // tuning.keys)
    chunk_blocks = min(chunk // tuning.keys, most_blocks)
    starts_E = list_starts(ends, tuning.keys)
    queries = tile_queries(token_rows, positions, E)
    q_nope_TQHD, q_rope_TQHR = q_nope[queries.tokens], q_rope[queries.tokens]
    run = functools.partial(attend, scale=scale, tuning=tuning, interpret=interpret)

    def attend_chunk(c: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = c * chunk_blocks
        latent_CL, k_rope_CR = gather(latent, page_tables, starts_E, ends, first, chunk_blocks, tuning.keys)
        k_nope_CHD = jnp.einsum("cl,hdl->chd", latent_CL, w_uk)
        v_CHV = jnp.einsum("cl,hvl->chv", latent_CL, w_uv)
        work_T4 = tile_work(queries, starts_E, first, chunk_blocks, tuning.keys)
        o_TQHV, lse_THQ = run(q_nope_TQHD, q_rope_TQHR, k_nope_CHD, k_rope_CR, v_CHV, work_T4)
        # The kernel leaves the results of tiles without keys as they were, NaN perhaps.
        seen_P = work_T4[queries.tile_of, 1] > 0
        o_PHV = jnp.where(seen_P[:, None, None], o_TQHV[queries.tile_of, queries.row_of], 0).astype(f32)
        return o_PHV, jnp.where(seen_P[:, None], lse_THQ[queries.tile_of, :, queries.row_of], UNSEEN)

    o_PHV, lse_PH = attend_chunk(i32(0))
    # Most calls fit one chunk: they neither enter the loop nor merge. Where none can need more there is no loop, which a
    # CUDA graph would not take.
    if most_blocks > chunk_blocks:
        chunks = -(-starts_E[-1] // chunk_blocks)
        o_PHV, _ = lax.fori_loop(i32(1), chunks, lambda c, so_far: merge(so_far, attend_chunk(c)), (o_PHV, lse_PH))
    return jnp.where((token_rows < E)[:, None, None], o_PHV, 0).astype(q_nope.dtype)


def list_starts(ends: jax.Array, keys: int) -> jax.Array:
    """Where each request's blocks start in the list of all blocks: int32 [E + 1], the last being the list's length."""
    return jnp.concatenate([jnp.zeros(1, i32), jnp.cumsum(-(-ends // keys), dtype=i32)])


class Queries(NamedTuple):
    """The P tokens in T tiles of Q = TILE rows, int32; tiles past the last request have no tokens."""

    tokens: jax.Array  # [T, Q] the token of each row; rows past the request's last token repeat some token
    request: jax.Array  # [T] 0..E-1
    position: jax.Array  # [T] position of the first row
    filled: jax.Array  # [T] rows that are tokens of the request
    tile_of: jax.Array  # [P] the tile of each token, any for padding
    row_of: jax.Array  # [P] its row in that tile


def tile_queries(token_rows: jax.Array, positions: jax.Array, num_requests: int) -> Queries:
    """Tiles of the P tokens of E requests; arguments as in `api.mla_prefill`."""
    P, E = token_rows.shape[0], num_requests
    num_tiles = (P + (TILE - 1) * E) // TILE  # the most that E requests can fill
    mine_EP = token_rows == jnp.arange(E, dtype=i32)[:, None]
    counts_E, first_E = mine_EP.sum(axis=1, dtype=i32), jnp.argmax(mine_EP, axis=1).astype(i32)
    ends_E = jnp.cumsum(-(-counts_E // TILE), dtype=i32)  # the tile after each request's last
    begins_E = jnp.concatenate([jnp.zeros(1, i32), ends_E[:-1]])

    tile_T = jnp.arange(num_tiles, dtype=i32)
    request_T = jnp.sum(tile_T[:, None] >= ends_E, axis=1, dtype=i32)
    used_T = request_T < E
    request_T = jnp.minimum(request_T, E - 1)
    before_T = (tile_T - begins_E[request_T]) * TILE  # the request's tokens in earlier tiles
    tokens_TQ = jnp.minimum((first_E[request_T] + before_T)[:, None] + jnp.arange(TILE, dtype=i32), P - 1)

    rows_P = jnp.minimum(token_rows, E - 1)
    nth_P = jnp.maximum(jnp.arange(P, dtype=i32) - first_E[rows_P], 0)
    return Queries(
        tokens=tokens_TQ,
        request=request_T,
        position=positions[tokens_TQ[:, 0]],
        filled=jnp.where(used_T, jnp.minimum(counts_E[request_T] - before_T, TILE), 0),
        tile_of=jnp.minimum(begins_E[rows_P] + nth_P // TILE, num_tiles - 1),
        row_of=nth_P % TILE,
    )


def tile_work(queries: Queries, starts_E: jax.Array, first: jax.Array, chunk_blocks: int, keys: int) -> jax.Array:
    """What each tile does in the chunk of blocks [first, first + chunk_blocks) of the list.

    Returns:
        int32 [T, 4]: its first block in the chunk; how many blocks it visits; how many of them, from the first, every
        row sees whole; and by how many positions its first row lies after the first key of its first block.
    """
    start_T, position_T = starts_E[queries.request], queries.position
    visible_T = jnp.where(queries.filled > 0, -(-(position_T + queries.filled) // keys), 0)
    begin_T = jnp.maximum(start_T, first)
    blocks_T = jnp.maximum(jnp.minimum(start_T + visible_T, first + chunk_blocks) - begin_T, 0)
    skipped_T = begin_T - start_T
    whole_T = jnp.clip((position_T + 1) // keys - skipped_T, 0, blocks_T)
    begin_T = jnp.where(blocks_T > 0, begin_T - first, 0)
    return jnp.stack([begin_T, blocks_T, whole_T, position_T - skipped_T * keys], axis=1).astype(i32)


def gather(
    latent: jax.Array,
    page_tables: jax.Array,
    starts_E: jax.Array,
    ends: jax.Array,
    first: jax.Array,
    chunk_blocks: int,
    keys: int,
) -> tuple[jax.Array, jax.Array]:
    """Latents [C, LATENT] and rotated keys [C, ROPE] of the chunk of blocks [first, first + chunk_blocks) of the list.

    Rows past a request's end are 0: what a page holds there may be NaN, and 0 times NaN is NaN.
    """
    E, max_pages = page_tables.shape
    pages_per_block = keys // PAGE
    block_B = first + jnp.arange(chunk_blocks, dtype=i32)
    owner_B = jnp.sum(block_B[:, None] >= starts_E[1:], axis=1, dtype=i32)
    row_B = jnp.minimum(owner_B, E - 1)
    nth_B = block_B - starts_E[row_B]
    columns_BN = jnp.minimum(nth_B[:, None] * pages_per_block + jnp.arange(pages_per_block, dtype=i32), max_pages - 1)
    position_BK = nth_B[:, None] * keys + jnp.arange(keys, dtype=i32)
    live_BK = (position_BK < ends[row_B][:, None]) & (owner_B < E)[:, None]
    cache_CX = latent[page_tables[row_B[:, None], columns_BN]].reshape(chunk_blocks * keys, LATENT + ROPE)
    cache_CX = jnp.where(live_BK.reshape(-1, 1), cache_CX, 0)
    return cache_CX[:, :LATENT], cache_CX[:, LATENT:]


def merge(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention over two sets of keys from that over each: o [P, H, V] and base-2 lse [P, H], float32."""
    (o_a, lse_a), (o_b, lse_b) = one, other
    top = jnp.maximum(lse_a, lse_b)
    a, b = jnp.exp2(lse_a - top), jnp.exp2(lse_b - top)
    total = a + b
    return o_a * (a / total)[..., None] + o_b * (b / total)[..., None], top + jnp.log2(total)


def attend(
    q_nope: jax.Array,
    q_rope: jax.Array,
    k_nope: jax.Array,
    k_rope: jax.Array,
    v: jax.Array,
    work: jax.Array,
    *,
    scale: float,
    tuning: Tuning = DEFAULT,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of query tiles to ranges of key blocks, all bfloat16.

    Args:
        q_nope: [T, TILE, H, NOPE], q_rope: [T, TILE, H, ROPE].
        k_nope: [C, H, NOPE], k_rope: [C, ROPE], v: [C, H, VALUE]; finite.
        work: int32 [T, 4] from `tile_work`.

    Returns:
        o [T, TILE, H, VALUE] in bfloat16 and base-2 log-sum-exp [T, H, TILE] in float32. Rows that see no key have
        o = 0 and a log-sum-exp near UNSEEN; tiles without blocks are left uninitialised.
    """
    T, _, H, _ = q_nope.shape
    # Heads that run at the same time share the L2 cache: at 128 heads their keys and values would not fit it.
    group = math.gcd(H, 16)
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = functools.partial(plgpu.SMEM, dtype=bf16, transforms=tiled)
    keys, stages = tuning.keys, tuning.stages
    scratch: dict[str, Any] = {
        "q_nope_s": smem((2, HALF, NOPE)),
        "q_rope_s": smem((2, HALF, ROPE)),
        "k_nope_s": smem((stages, keys, NOPE)),
        "k_rope_s": smem((stages, keys, ROPE)),
        "v_s": smem((stages, keys, VALUE)),
        "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "k_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_full": plgpu.Barrier(num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "turns": plgpu.Barrier(num_arrivals=2),
    }
    if interpret:
        scratch["weights_s"] = smem((2, HALF, keys))
    body = functools.partial(_body, group=group, log2_scale=scale * math.log2(math.e), tuning=tuning)
    o, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((T, TILE, H, VALUE), bf16),
            jax.ShapeDtypeStruct((T, H, 2, HALF), f32),
        ),
        scratch_types=scratch,
        grid=(H // group, T, group),
        grid_names=("group", "tile", "head"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        **({"interpret": interpret} if interpret else {}),
    )(q_nope, q_rope, k_nope, k_rope, v, work)
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
    tuning,
):
    """One tile of one head: warpgroup 2 copies, warpgroups 0 and 1 compute 64 query rows each."""
    keys, stages = tuning.keys, tuning.stages
    wg = lax.axis_index("wg")
    head = lax.axis_index("group") * group + lax.axis_index("head")
    # The last tiles of a prompt see the most keys: they start first, so that short ones fill the gaps at the end.
    tile = work.shape[0] - 1 - lax.axis_index("tile")
    first, blocks, whole, lead = (work[tile, j] for j in range(4))

    @pl.when((wg == 2) & (blocks > 0))
    def _produce():
        plgpu.set_max_registers(tuning.producer_registers, action="decrease")
        for half in range(2):
            rows = pl.ds(half * HALF, HALF)
            plgpu.copy_gmem_to_smem(q_nope.at[tile, rows, head], q_nope_s.at[half], q_full.at[half])
            plgpu.copy_gmem_to_smem(q_rope.at[tile, rows, head], q_rope_s.at[half], q_full.at[half])

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
        plgpu.set_max_registers(tuning.consumer_registers, action="increase")

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
                row, column = (plgpu.broadcasted_iota(i32, x.shape, d, layout=plgpu.Layout.WGMMA) for d in (0, 1))
                x = jnp.where(column - row <= lead + wg * HALF - i * keys, x, MASKED)
            new_top = jnp.maximum(top, x.max(axis=1) * log2_scale)
            shrink = jnp.exp2(top - new_top)
            # A product and a difference, which become one instruction.
            weights = jnp.exp2(x * log2_scale - _over_rows(new_top, x.shape))
            total = total * shrink + weights.sum(axis=1)
            acc = acc * _over_rows(shrink, acc.shape)
            weights = weights.astype(bf16)
            # Keeps the compiler from moving softmax behind the wait for the tensor cores.
            acc, total, weights = lax.optimization_barrier((acc, total, weights))
            plgpu.barrier_wait(v_full.at[s])
            turn()
            acc = weigh(acc, weights, v_s.at[s])
            plgpu.barrier_arrive(v_free.at[s])
            return acc, new_top, total

        def weigh(acc, weights, values):
            if weights_s is None:
                return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(acc))
            # The interpreter has neither operands in registers nor accumulators with a first value.
            weights_s[wg] = weights
            plgpu.commit_smem()

            def product(ref):
                plgpu.wgmma(ref, weights_s.at[wg], values)
                return ref[...]

            return acc + pl.run_scoped(product, plgpu.ACC((HALF, VALUE), f32))

        plgpu.barrier_wait(q_full.at[wg])
        carry = (
            plgpu.layout_cast(jnp.zeros((HALF, VALUE), f32), plgpu.Layout.WGMMA),
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
        q_nope_s[wg] = (acc * _over_rows(1.0 / total, acc.shape)).astype(bf16)  # no longer needed: the way out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_nope_s.at[wg], o.at[tile, pl.ds(wg * HALF, HALF), head])
        plgpu.wait_smem_to_gmem(0)


def _over_rows(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])
