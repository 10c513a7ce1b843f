"""Linear maps of the same tokens: one Mosaic GPU kernel, which `joined_linear` and `split_linear` run.

A block has 64 outputs, the rows of a wgmma, up to 128 tokens, and all columns, or a part of them. It streams weights and tokens
through a ring of shared memory: one warpgroup copies, the other multiplies, as in the experts' kernels
(`moe/grouped_matmul.py`). Where 64 outputs a block share the weights unevenly, `stream_linear.py` may be faster.
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
DEPTH = 128  # Columns of a stage of the ring.
MOST_BLOCKS = 132  # That run at once, one a multiprocessor.
RING_BYTES = 192 * 1024  # Of a multiprocessor.
f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def tokens_unsupported_reason(T: int) -> str | None:
    """Why the kernel does not support this many tokens, or None if it does."""
    if T > MOST_TOKENS or (T > GRANULE and T % GRANULE):
        return f"it supports up to {MOST_TOKENS} tokens, from {GRANULE} on in multiples of {GRANULE}, not {T}"
    return None


def token_blocks(T: int) -> int:
    """Blocks that share the tokens; each reads the same weights."""
    return -(-T // N)


def ring_stages(blocks: int, T: int) -> int:
    """Stages of a block's ring, with so many blocks for the same tokens.

    More than MOST_BLOCKS blocks in all share multiprocessors and their memory.
    """
    return RING_BYTES // -(-blocks * token_blocks(T) // MOST_BLOCKS) // ((M + _rows(T)) * DEPTH * 2)


def _rows(T: int) -> int:
    return -(-min(T, N) // GRANULE) * GRANULE


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
    depths, rows, terms = H // DEPTH // (parts or 1), _rows(T), TERMS if parts else 1
    stages = min(ring_stages(tiles[-1] * (parts or 1), T), depths)

    def body(x, *refs, w_s, x_s, out_s, full, free):
        *w, out = refs
        warpgroup, tile, part = (lax.axis_index(axis) for axis in ("warpgroup", "tile", "part"))
        # A dynamic index, because a static one must not reach past the last token. Past it TMA reads zeros and drops what
        # is stored.
        tokens = pl.ds(lax.axis_index("tokens") * rows, rows)

        def stage(step):
            return lax.rem(step, i32(stages))

        @pl.when(warpgroup == 1)
        def _produce():
            def fill(step):
                s, at = stage(step), pl.ds((part * depths + step) * DEPTH, DEPTH)
                for weight, first, end in zip(w, tiles, tiles[1:], strict=False):

                    @pl.when((tile >= first) & (tile < end))
                    def _copy(weight=weight, first=first):
                        plgpu.copy_gmem_to_smem(weight.at[pl.ds((tile - first) * M, M), at], w_s.at[s], full.at[s])

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
            "free": plgpu.Barrier(num_barriers=stages),
        },
        grid=(token_blocks(T), tiles[-1], parts or 1),
        grid_names=("tokens", "tile", "part"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(x, *weights)
