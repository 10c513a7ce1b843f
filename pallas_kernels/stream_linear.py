"""A linear map of a decode step's tokens: one Mosaic GPU kernel, which streams the weights through a ring of shared memory.

The tokens are the rows of a wgmma and the outputs its columns, of which any multiple of 8 is allowed: so one round of blocks
can share the weights evenly. A block has a run of outputs and all columns of the weights, or a part of them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import transpose_ref
from pallas_kernels.ring import keep_full

M = 64  # Rows of a wgmma: tokens of a warpgroup.
GRANULE = 8  # Rows of a copy and columns of a wgmma are multiples of it.
MOST_TOKENS = 128
DEPTHS = 128, 64  # Columns of a stage of the ring.
FEWEST_STAGES = 3  # With fewer, too little is on its way while a block multiplies.
MEMORY_BYTES = 224 * 1024  # Of a multiprocessor, for the ring and what is stored.
# More parts would take longer to sum than they save.
MOST_PARTS = 4
# Of a block, at least and at most: with fewer, blocks read more of the tokens than of the weights.
OUTPUTS = 64, 128
# Numbers that a part is stored as: its rounded value and the rest, which keep 16 bits of a float32 sum.
TERMS = 2
f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


@dataclass(frozen=True)
class Cut:
    """How outputs are shared.

    Attributes:
        outputs: of a block, a multiple of GRANULE.
        parts: of the weights' columns, each for blocks of its own.
    """

    outputs: int
    parts: int = 1


def even_cut(outputs: int, blocks: int) -> Cut:
    """So that no more than so many blocks share the outputs."""
    return Cut(-(-outputs // (blocks * GRANULE)) * GRANULE)


def cut_in_parts(outputs: int, columns: int, blocks: int) -> Cut | None:
    """So that about so many blocks share outputs and columns, each with OUTPUTS of the former; None if that is not possible.

    Of several ways the one with the fewest parts: they are summed elsewhere.
    """
    for parts in range(1, MOST_PARTS + 1):
        cut = Cut(even_cut(outputs, blocks // parts).outputs, parts)
        if columns % (parts * DEPTHS[-1]) == 0 and OUTPUTS[0] <= cut.outputs <= OUTPUTS[1]:
            return cut
    return None


def ring(rows: int, halves: int, terms: int, cut: Cut, columns: int) -> tuple[int, int]:
    """Columns of a stage, and for how many stages there is room beside what is stored.

    Args:
        rows: of tokens, of all warpgroups.
        halves: weights that each output has.
        terms: numbers that are stored of each output.
        columns: of the weights.
    """
    ring_bytes, a_column = MEMORY_BYTES - rows * terms * cut.outputs * 2, (rows + halves * cut.outputs) * 2
    fit = [(depth, ring_bytes // (a_column * depth)) for depth in DEPTHS if columns // cut.parts % depth == 0]
    return next((each for each in fit if each[1] >= FEWEST_STAGES), fit[-1])


def stream_linear(
    name: str,
    x: jax.Array,
    weight: jax.Array,
    cut: Cut,
    *,
    summed: bool = True,
    interpret: Any = False,
) -> jax.Array:
    """x weight^T: bfloat16 [T, outputs].

    Args:
        name: of the kernel in traces.
        x: [T, K], up to MOST_TOKENS tokens.
        weight: [outputs, K], or [2, outputs, K] for silu(x gate^T) * (x up^T).
        summed: otherwise the result is [parts * TERMS, T, outputs], whose float32 sum is the map.
        interpret: passed to Pallas.
    """
    T, K = x.shape
    gated, outputs = weight.ndim == 3, weight.shape[-2]
    halves, N, parts = 2 if gated else 1, cut.outputs, cut.parts
    if summed and parts > 1:
        raise ValueError("parts are summed elsewhere")
    rows, terms = -(-T // GRANULE) * GRANULE, 1 if summed else TERMS
    consumers = -(-rows // M)
    depth, room = ring(consumers * M, halves, terms, cut, K)
    depths = K // parts // depth
    stages = min(room, depths)

    def body(x, weight, out, *, w_s, x_s, out_s, full, free):
        warpgroup, block, part = (lax.axis_index(axis) for axis in ("warpgroup", "block", "part"))
        # A dynamic index, because a static one must not reach past the last token. Past it TMA reads zeros and drops what
        # is stored.
        tokens = pl.ds(lax.axis_index("tokens") * rows, rows)

        # Of outputs past the last one too TMA reads zeros and drops what is stored.
        mine = pl.ds(block * N, N)

        @pl.when(warpgroup == consumers)
        def _produce():
            def fill(step):
                s, at = lax.rem(step, i32(stages)), pl.ds((part * depths + step) * depth, depth)
                for half in range(halves):
                    plgpu.copy_gmem_to_smem(weight.at[half, mine, at], w_s.at[s, half], full.at[s])
                plgpu.copy_gmem_to_smem(x.at[tokens, at], x_s.at[s, pl.ds(0, rows)], full.at[s])

            keep_full(fill, free, i32(depths), stages)

        @pl.when(warpgroup < consumers)
        def _consume():
            rows_of_group = pl.ds(warpgroup * M, M)

            # Rows past the last token hold what was there before. They reach no other row.
            def multiply(*totals):
                @pl.loop(i32(0), i32(depths))
                def _step(step):
                    s = lax.rem(step, i32(stages))
                    plgpu.barrier_wait(full.at[s])
                    for half, total in enumerate(totals):
                        plgpu.wgmma(total, x_s.at[s, rows_of_group], transpose_ref(w_s.at[s, half], (1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[s])

                return tuple(total[...] for total in totals)

            rest, *up = pl.run_scoped(multiply, *[plgpu.ACC((M, N), f32)] * halves)
            if gated:
                rest = rest * (1.0 / (1.0 + jnp.exp(-rest))) * up[0]
            for term in range(terms):
                bits = rest.astype(bf16)
                rest = rest - bits.astype(f32)
                out_s[warpgroup, term] = bits
            plgpu.commit_smem()
            for group in range(consumers):
                count = min(rows - group * M, M)

                @pl.when(warpgroup == group)
                def _store(group=group, count=count):
                    stored = pl.ds(lax.axis_index("tokens") * rows + group * M, count)
                    for term in range(terms):
                        of_part = () if summed else (part * terms + term,)
                        source = out_s.at[group, term, pl.ds(0, count)]
                        plgpu.copy_smem_to_gmem(source, out.at[*of_part, stored, mine])

            plgpu.wait_smem_to_gmem(0)

    body.__name__ = name
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    of_parts = () if summed else (parts * terms,)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*of_parts, T, outputs), bf16),
        scratch_types={
            "w_s": plgpu.SMEM((stages, halves, N, depth), bf16, transforms=swizzled),
            "x_s": plgpu.SMEM((stages, consumers * M, depth), bf16, transforms=swizzled),
            "out_s": plgpu.SMEM((consumers, terms, M, N), bf16),
            "full": plgpu.Barrier(num_arrivals=halves + 1, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        },
        grid=(1, -(-outputs // N), parts),
        grid_names=("tokens", "block", "part"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=gated, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(x, weight if gated else weight[None])
