"""Linear maps of the same tokens: one Mosaic GPU kernel, which `joined_linear` and `split_linear` run.

A block has 64 outputs, the rows of a wgmma, up to 128 tokens, and all columns, or a part of them. It streams weights and tokens
through a ring of shared memory: one warpgroup copies, the other multiplies, as in the experts' kernels
(`moe/grouped_matmul.py`). Of 64 to 128 tokens two blocks have a half each, if there are multiprocessors for both: a cluster, in
which each copies a half of the weights for both. Where 64 outputs a block share the weights unevenly, `stream_linear.py` may be
faster.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import transpose_ref
from pallas_kernels.stream_linear import GRANULE, TERMS

M = 64  # Rows of a wgmma: outputs of a block.
N = 128  # Its columns: tokens of a block, at most.
MOST_TOKENS = 4 * N
PAIRED_TOKENS = 64  # From so many on to N, a pair of blocks may share them.
DEPTH = 128  # Columns of a stage of the ring.
MOST_BLOCKS = 132  # That run at once, one a multiprocessor.
RING_BYTES = 192 * 1024  # Of a multiprocessor.
f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def tokens_unsupported_reason(T: int) -> str | None:
    """Why the kernel does not support this many tokens, or None if it does."""
    if T > MOST_TOKENS or (T > GRANULE and T % GRANULE):
        return f"it supports up to {MOST_TOKENS} tokens, from {GRANULE} on in multiples of {GRANULE}, not {T}"
    return None


def paired(T: int, blocks: int) -> bool:
    """Whether, instead of each of so many blocks for the same tokens, two have a half of the tokens each."""
    return PAIRED_TOKENS <= T <= N and 2 * blocks <= MOST_BLOCKS


def token_blocks(T: int) -> int:
    """Blocks, or pairs of them, that share the tokens; each reads the same weights."""
    return -(-T // N)


def ring_stages(blocks: int, T: int) -> int:
    """Stages of a block's ring, with so many blocks, or pairs of them, for the same tokens.

    More than MOST_BLOCKS blocks in all share multiprocessors and their memory.
    """
    return RING_BYTES // -(-blocks * token_blocks(T) // MOST_BLOCKS) // ((M + token_rows(T, blocks)) * DEPTH * 2)


def token_rows(T: int, blocks: int) -> int:
    """Tokens of a block, with so many blocks, or pairs of them, for the same tokens."""
    tokens = -(-T // 2) if paired(T, blocks) else min(T, N)
    return -(-tokens // GRANULE) * GRANULE


def ring_linear(name: str, x: jax.Array, weights: Sequence[jax.Array], parts: int | None, interpret: Any) -> jax.Array:
    """x weight^T for each of the weights, side by side: bfloat16 [T, outputs of all].

    Args:
        name: of the kernel in traces.
        x: [T, H]. weights: each [outputs, H].
        parts: of the columns, each for blocks of its own: the result is then [parts * TERMS, T, outputs of all], whose
            float32 sum is the map.
        interpret: passed to Pallas.
    """
    T, H = x.shape
    tiles = [0, *itertools.accumulate(weight.shape[0] // M for weight in weights)]
    depths, terms, blocks = H // DEPTH // (parts or 1), TERMS if parts else 1, tiles[-1] * (parts or 1)
    pair, rows, stages = 1 + paired(T, blocks), token_rows(T, blocks), min(ring_stages(blocks, T), depths)

    def body(x, *refs, w_s, x_s, out_s, full, free):
        *w, out = refs
        warpgroup, tile, part = (lax.axis_index(axis) for axis in ("warpgroup", "tile", "part"))
        # A dynamic index, because a static one must not reach past the last token. Past it TMA reads zeros and drops what
        # is stored.
        tokens = pl.ds((lax.axis_index("tokens") * pair + lax.axis_index("half")) * rows, rows)

        def stage(step):
            return lax.rem(step, i32(stages))

        @pl.when(warpgroup == 1)
        def _produce():
            def fill(step):
                s, at = stage(step), pl.ds((part * depths + step) * DEPTH, DEPTH)
                for weight, first, end in zip(w, tiles, tiles[1:], strict=False):

                    @pl.when((tile >= first) & (tile < end))
                    def _copy(weight=weight, first=first):
                        source = weight.at[pl.ds((tile - first) * M, M), at]
                        plgpu.copy_gmem_to_smem(source, w_s.at[s], full.at[s], collective_axes="half")

                plgpu.copy_gmem_to_smem(x.at[tokens, at], x_s.at[s], full.at[s])

            pl.loop(i32(0), i32(stages))(fill)

            @pl.loop(i32(stages), i32(depths))
            def _refill(step):
                plgpu.barrier_wait(free.at[stage(step)])
                fill(step)

            # Every completion of a barrier must be awaited before the kernel ends.
            @pl.loop(i32(depths - stages), i32(depths))
            def _drain(step):
                plgpu.barrier_wait(free.at[stage(step)])

        @pl.when(warpgroup == 0)
        def _consume():
            def multiply(total):
                @pl.loop(i32(0), i32(depths))
                def _step(step):
                    s = stage(step)
                    plgpu.barrier_wait(full.at[s])
                    plgpu.wgmma(total, w_s.at[s], transpose_ref(x_s.at[s], (1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[s])

                return total[...]

            rest = pl.run_scoped(multiply, plgpu.ACC((M, rows), f32))
            for term in range(terms):
                bits = rest.astype(bf16)
                rest = rest - bits.astype(f32)
                transpose_ref(out_s.at[term], (1, 0))[...] = plgpu.layout_cast(bits, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            for term in range(terms):
                of_part = (part * terms + term,) if parts else ()
                plgpu.copy_smem_to_gmem(out_s.at[term], out.at[*of_part, tokens, pl.ds(tile * M, M)])
            plgpu.wait_smem_to_gmem(0)

    body.__name__ = name
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def matrix(*shape: int) -> Any:
        return plgpu.SMEM(shape, bf16, transforms=swizzled)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*((parts * terms,) if parts else ()), T, tiles[-1] * M), bf16),
        scratch_types={
            "w_s": matrix(stages, M, DEPTH),
            "x_s": matrix(stages, rows, DEPTH),
            "out_s": matrix(terms, rows, M),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            # Both blocks of a pair write into a stage.
            "free": plgpu.ClusterBarrier(collective_axes=("half",), num_barriers=stages),
        },
        grid=(token_blocks(T), tiles[-1], parts or 1),
        grid_names=("tokens", "tile", "part"),
        cluster=(pair,),
        cluster_names=("half",),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(x, *weights)
