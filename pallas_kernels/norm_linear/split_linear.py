"""A linear map of several tokens whose result is added to the residual stream: one Mosaic GPU kernel (`split_linear`).

Its columns are split over thread blocks, so that all multiprocessors read weights; each block loads all that it needs at
once. The parts stay apart: the kernel that adds them to the stream sums them, where XLA needs a kernel for that. Each part
is stored as two bfloat16 numbers, its rounded value and the rest, which keeps 16 bits of a float32 sum.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import transpose_ref

M = 64  # Rows of a wgmma: outputs of a block.
GRANULE = 8  # Of a wgmma's columns, the tokens.
MOST_TOKENS = 128
# Columns of a block, all of which are in shared memory at once, and of a stage.
COLUMNS, DEPTH = 512, 128
# More parts would take longer to sum than they save.
MOST_PARTS = 4
# Numbers that a part is stored as.
TERMS = 2
f32, bf16 = jnp.float32, jnp.bfloat16


def unsupported_reason(x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    T, outputs, columns = x.shape[0], weight.shape[0], math.prod(weight.shape[1:])
    if outputs % M or columns % COLUMNS or columns > MOST_PARTS * COLUMNS:
        return (
            f"it supports multiples of {M} outputs and of {COLUMNS} columns, up to {MOST_PARTS * COLUMNS} of them, "
            f"not {outputs} and {columns}"
        )
    if T > MOST_TOKENS or (T > GRANULE and T % GRANULE):
        return f"it supports up to {MOST_TOKENS} tokens, from {GRANULE} on in multiples of {GRANULE}, not {T}"
    return hopper_unsupported_reason(x.dtype, weight.dtype)


@functools.partial(jax.jit, static_argnames=("interpret",))
def split_linear(x: jax.Array, weight: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Parts of x weight^T, whose sum it is: bfloat16 [parts, T, outputs].

    Args:
        x: [T, *in]. weight: [outputs, *in].
        interpret: passed to Pallas.
    """
    T, outputs = x.shape[0], weight.shape[0]
    x, weight = x.reshape(T, -1), weight.reshape(outputs, -1)
    parts, stages, rows = x.shape[1] // COLUMNS, COLUMNS // DEPTH, -(-T // GRANULE) * GRANULE

    def split_linear(x, weight, out, x_s, w_s, out_s, arrived):
        # With fewer tokens than a granule TMA reads zeros past the last one and drops what is stored there. A dynamic
        # index, because a static one must not reach past it.
        tokens = pl.ds(lax.axis_index("tokens") * rows, rows)
        output, part = pl.ds(lax.axis_index("tile") * M, M), lax.axis_index("part")
        for stage in range(stages):
            at = pl.ds(part * COLUMNS + stage * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(weight.at[output, at], w_s.at[stage], arrived.at[stage])
            plgpu.copy_gmem_to_smem(x.at[tokens, at], x_s.at[stage], arrived.at[stage])

        def multiply(total):
            for stage in range(stages):
                plgpu.barrier_wait(arrived.at[stage])
                plgpu.wgmma(total, w_s.at[stage], transpose_ref(x_s.at[stage], (1, 0)))
            return total[...]

        rest = pl.run_scoped(multiply, plgpu.ACC((M, rows), f32))
        for term in range(TERMS):
            bits = rest.astype(bf16)
            rest = rest - bits.astype(f32)
            transpose_ref(out_s.at[term], (1, 0))[...] = plgpu.layout_cast(bits, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        for term in range(TERMS):
            plgpu.copy_smem_to_gmem(out_s.at[term], out.at[part * TERMS + term, tokens, output])
        plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    matrix = functools.partial(plgpu.SMEM, dtype=bf16, transforms=swizzled)
    return plgpu.kernel(
        split_linear,
        out_type=jax.ShapeDtypeStruct((parts * TERMS, T, outputs), bf16),
        scratch_types={
            "x_s": matrix((stages, rows, DEPTH)),
            "w_s": matrix((stages, M, DEPTH)),
            "out_s": matrix((TERMS, rows, M)),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        grid=(1, outputs // M, parts),
        grid_names=("tokens", "tile", "part"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(x, weight)
