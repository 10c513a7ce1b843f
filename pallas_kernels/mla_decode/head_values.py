"""The up-projection of values of several tokens: a matmul for each head, in one Mosaic GPU kernel.

Bound by the latency of a launch and by the L2 cache: so a block has 64 rows of a head's weights and all tokens, up to
MOST_COLUMNS, which it requests at once, as `mla_query` does. XLA's matmul has the heads in the middle of both arrays.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import transpose_ref

M = 64  # Rows of a wgmma: rows of the weights.
GRANULE = 8  # Of a wgmma's columns, the tokens.
MOST_COLUMNS = 128
DEPTH = 128  # Latent columns that are awaited together.
f32, bf16 = jnp.float32, jnp.bfloat16


def supports(tokens: int, w_uv: jax.Array) -> bool:
    """Whether the kernel runs this many tokens and these weights [H, V, L]."""
    _, V, L = w_uv.shape
    return tokens % GRANULE == 0 and V % M == 0 and L % DEPTH == 0 and w_uv.dtype == bf16


@functools.partial(jax.jit, static_argnames=("interpret",))
def head_values(out: jax.Array, w_uv: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Values bfloat16 [T, H, V] of attention outputs [T, at least H, L]; w_uv [H, V, L]. `interpret` is passed to Pallas."""
    T, _, L = out.shape
    H, V, _ = w_uv.shape
    granules = T // GRANULE
    columns = GRANULE * max(n for n in range(1, MOST_COLUMNS // GRANULE + 1) if granules % n == 0)
    stages = L // DEPTH

    def mla_decode_head_values(out, w_uv, values, w_s, x_s, out_s, arrived):
        head, rows = lax.axis_index("head"), pl.ds(lax.axis_index("part") * M, M)
        tokens = pl.ds(lax.axis_index("tokens") * columns, columns)
        for stage in range(stages):
            at = pl.ds(stage * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(w_uv.at[head, rows, at], w_s.at[stage], arrived.at[stage])
            plgpu.copy_gmem_to_smem(out.at[tokens, head, at], x_s.at[stage], arrived.at[stage])

        def multiply(total):
            for stage in range(stages):
                plgpu.barrier_wait(arrived.at[stage])
                plgpu.wgmma(total, w_s.at[stage], transpose_ref(x_s.at[stage], (1, 0)))
            return total[...]

        y = pl.run_scoped(multiply, plgpu.ACC((M, columns), f32))
        transpose_ref(out_s, (1, 0))[...] = plgpu.layout_cast(y.astype(bf16), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, values.at[tokens, head, rows])
        plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    matrix = functools.partial(plgpu.SMEM, dtype=bf16, transforms=swizzled)
    return plgpu.kernel(
        mla_decode_head_values,
        out_type=jax.ShapeDtypeStruct((T, H, V), bf16),
        scratch_types={
            "w_s": matrix((stages, M, DEPTH)),
            "x_s": matrix((stages, columns, DEPTH)),
            "out_s": matrix((columns, M)),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        grid=(T // columns, H, V // M),
        grid_names=("tokens", "head", "part"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )(out, w_uv)
