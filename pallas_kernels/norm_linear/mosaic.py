"""Sum, RMS norm and projections of a few tokens in one Mosaic GPU kernel for Hopper.

XLA makes three launches or more of them, and the small ones cost what a launch costs. Here every block reads the tokens and
norms them itself, while TMA brings its rows of the weights into shared memory (loads into registers the compiler puts after
the norm, whatever their order here). Each warp has one row and there are no tensor cores, because the weights' bytes are
the limit. One more block writes the sum and the norm.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.matvec import WARPS, row_products, warp_per_row
from pallas_kernels.norm_linear.reference import factor_of
from pallas_kernels.row import inverse_rms, norm_unsupported_reason, normed_row, whole_row

# Columns of a load by one warp, 16 bytes of the weights in each lane.
COLUMNS = {jnp.dtype(jnp.bfloat16): 256, jnp.dtype(jnp.float32): 128}
# Rows of a block: few enough that all blocks' loads are in flight together.
ROWS = {jnp.dtype(jnp.bfloat16): 8, jnp.dtype(jnp.float32): 4}
# Shared memory of a block at most.
MOST_BYTES = 200 * 1024
f32, bf16 = jnp.float32, jnp.bfloat16


def unsupported_reason(x: jax.Array, norm_weight: jax.Array, weights: tuple[jax.Array, ...]) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    H = x.shape[1]
    if H % COLUMNS[jnp.dtype(bf16)]:
        return f"it needs a hidden size that is a multiple of {COLUMNS[jnp.dtype(bf16)]}, not {H}"
    for weight in weights:
        rows = ROWS.get(weight.dtype)
        if rows is None:
            return f"it needs weights in bfloat16 or float32, not {weight.dtype}"
        if rows * H * weight.dtype.itemsize > MOST_BYTES:
            return f"its rows of weights do not fit into shared memory: {rows} of {H} columns"
        if math.prod(weight.shape[:-1]) % rows:
            return f"it needs multiples of {rows} outputs, not {math.prod(weight.shape[:-1])}"
    return norm_unsupported_reason(x, norm_weight)


@functools.partial(jax.jit, static_argnames=("eps", "centred", "interpret"))
def norm_linear(
    x: jax.Array,
    norm_weight: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    eps: float,
    delta: jax.Array | None = None,
    centred: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], jax.Array]:
    """See api.py. Jitted, so that the layers of a model share one lowering. `interpret` is passed to Pallas.

    The last result is a 0, int32 [1], for a kernel that needs a counter.
    """
    T, H = x.shape
    flat = [weight.reshape(-1, H) for weight in weights]
    blocks = [weight.shape[0] // ROWS[weight.dtype] for weight in flat]
    whole = whole_row(H)
    adds = delta is not None
    kinds = sorted({jnp.dtype(weight.dtype) for weight in flat}, key=str)

    def body(x, norm_weight, *refs, rows_s, arrived):
        delta = refs[0] if adds else None
        refs = refs[int(adds) :]
        w, (summed, normed, zero, *outs) = refs[: len(flat)], refs[len(flat) :]
        block = lax.axis_index("block")

        def added(t, at, layout):
            value = load(x, (t, at), layout=layout)
            return value if delta is None else value + load(delta, (t, at), layout=layout)

        def scale(t):
            return inverse_rms(added(t, pl.ds(0, H), whole), eps)

        def project(weight, rows_s, arrived, out, first):
            dtype = weight.dtype
            rows, columns = ROWS[jnp.dtype(dtype)], COLUMNS[jnp.dtype(dtype)]
            layout = warp_per_row(columns)
            across = layout.reduce(0)
            first_row = (block - first) * rows
            for part in range(H // columns):
                source = weight.at[pl.ds(first_row, rows), pl.ds(part * columns, columns)]
                plgpu.copy_gmem_to_smem(source, rows_s.at[part], arrived)
            scales = [scale(t) for t in range(T)]
            totals: dict[tuple[int, int], Any] = {}
            for part in range(H // columns):
                at = pl.ds(part * columns, columns)
                gain = factor_of(load(norm_weight, (at,), layout=across), centred=centred)
                vectors = [normed_row(added(t, at, across), scales[t], gain).astype(f32) for t in range(T)]
                if part == 0:
                    plgpu.barrier_wait(arrived)
                for g in range(0, rows, WARPS):
                    tile = load(rows_s, (part, pl.ds(g, WARPS), slice(None)), layout=layout)
                    for t, vector in enumerate(vectors):
                        product = row_products(tile, vector, layout)
                        totals[t, g] = totals[t, g] + product if part else product
            for (t, g), total in totals.items():
                out[t, pl.ds(first_row + g, WARPS)] = total.sum(axis=1).astype(dtype)

        first = 0
        for weight, out, count in zip(w, outs, blocks, strict=True):
            which = kinds.index(jnp.dtype(weight.dtype))
            part = functools.partial(project, weight, rows_s[which], arrived[which], out, first)
            pl.when((block >= first) & (block < first + count))(part)
            first += count

        @pl.when(block == first)
        def _():
            zero[0] = jnp.int32(0)
            for t in range(T):
                row = added(t, pl.ds(0, H), whole)
                summed[t, :] = row
                gain = factor_of(load(norm_weight, (pl.ds(0, H),), layout=whole), centred=centred)
                normed[t, :] = normed_row(row, scale(t), gain)

    body.__name__ = "norm_linear"
    run = plgpu.kernel(
        body,
        out_type=(
            *[jax.ShapeDtypeStruct((T, H), bf16)] * 2,
            jax.ShapeDtypeStruct((1,), jnp.int32),
            *(jax.ShapeDtypeStruct((T, weight.shape[0]), weight.dtype) for weight in flat),
        ),
        scratch_types={
            "rows_s": [plgpu.SMEM((H // COLUMNS[kind], ROWS[kind], COLUMNS[kind]), kind) for kind in kinds],
            "arrived": [plgpu.Barrier(num_arrivals=H // COLUMNS[kind]) for kind in kinds],
        },
        grid=(sum(blocks) + 1,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048
        ),
        interpret=interpret,
    )
    summed, normed, zero, *outs = run(x, norm_weight, *([delta] if adds else []), *flat)
    shaped = tuple(out.reshape(T, *weight.shape[:-1]) for out, weight in zip(outs, weights, strict=True))
    return summed, normed, shaped, zero
