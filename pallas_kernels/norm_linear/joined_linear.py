"""Linear maps of the same tokens in one Mosaic GPU kernel (`joined_linear`), whose results lie side by side.

The weights stay separate arrays: XLA joins them inside its own matmul only, and sums the parts of one that it splits in
another kernel. A block has 64 outputs and streams their weights and the tokens through a ring of shared memory: one
warpgroup copies, the other multiplies, as in the experts' kernels (`moe/grouped_matmul.py`).
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
from pallas_kernels.compat import transpose_ref

M = 64  # Rows of a wgmma: outputs of a block.
GRANULE = 8  # Of a wgmma's columns, the tokens.
MOST_TOKENS = 128
DEPTH = 128  # Columns of a stage of the ring.
RING_BYTES = 192 * 1024
# Registers of a thread: the producer gives away what the consumer's accumulators need.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def unsupported_reason(x: jax.Array, weights: tuple[jax.Array, ...]) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    T, H = x.shape
    outputs = [math.prod(weight.shape[:-1]) for weight in weights]
    if H % DEPTH or any(each % M for each in outputs):
        return f"it supports multiples of {M} outputs and of {DEPTH} columns, not {outputs} and {H}"
    if T > MOST_TOKENS or (T > GRANULE and T % GRANULE):
        return f"it supports up to {MOST_TOKENS} tokens, from {GRANULE} on in multiples of {GRANULE}, not {T}"
    return hopper_unsupported_reason(x.dtype, *(weight.dtype for weight in weights))


@functools.partial(jax.jit, static_argnames=("interpret",))
def joined_linear(x: jax.Array, weights: tuple[jax.Array, ...], *, interpret: Any = False) -> jax.Array:
    """x weight^T for each of the weights, side by side: [T, outputs of all].

    Args:
        x: [T, H]. weights: each [*out, H].
        interpret: passed to Pallas.
    """
    T, H = x.shape
    flat = [weight.reshape(-1, H) for weight in weights]
    tiles = [0, *itertools.accumulate(weight.shape[0] // M for weight in flat)]
    depths, rows = H // DEPTH, -(-T // GRANULE) * GRANULE
    stages = min(RING_BYTES // ((M + rows) * DEPTH * 2), depths)

    def joined_linear(x, *refs, w_s, x_s, out_s, full, free):
        *w, out = refs
        warpgroup, tile = lax.axis_index("warpgroup"), lax.axis_index("tile")
        # A dynamic index, because a static one must not reach past the last token. Past it TMA reads zeros and drops what
        # is stored.
        tokens = pl.ds(lax.axis_index("tokens") * rows, rows)

        def stage(step):
            return lax.rem(step, i32(stages))

        @pl.when(warpgroup == 1)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def fill(step):
                s, at = stage(step), pl.ds(step * DEPTH, DEPTH)
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
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

            def multiply(total):
                @pl.loop(i32(0), i32(depths))
                def _step(step):
                    s = stage(step)
                    plgpu.barrier_wait(full.at[s])
                    plgpu.wgmma(total, w_s.at[s], transpose_ref(x_s.at[s], (1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[s])

                return total[...]

            y = pl.run_scoped(multiply, plgpu.ACC((M, rows), f32))
            staged = transpose_ref(out_s, (1, 0))
            staged[...] = plgpu.layout_cast(y.astype(bf16), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, out.at[tokens, pl.ds(tile * M, M)])
            plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    matrix = functools.partial(plgpu.SMEM, dtype=bf16, transforms=swizzled)
    return plgpu.kernel(
        joined_linear,
        out_type=jax.ShapeDtypeStruct((T, tiles[-1] * M), bf16),
        scratch_types={
            "w_s": matrix((stages, M, DEPTH)),
            "x_s": matrix((stages, rows, DEPTH)),
            "out_s": matrix((rows, M)),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "free": plgpu.Barrier(num_barriers=stages),
        },
        grid=(1, tiles[-1]),
        grid_names=("tokens", "tile"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(x, *flat)
