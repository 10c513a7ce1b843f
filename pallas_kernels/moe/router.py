"""The router's matmul for several tokens on tensor cores: one small Mosaic GPU kernel (`moe_router` in traces).

XLA makes up to three kernels of it: the tokens in float32, the matmul, and the sum of its parts. Here each block multiplies
DEPTH of the columns, and the parts are summed where they are read, by the kernel that chooses the experts.

The products are those of a float32 matmul: a token is bfloat16, and a float32 weight is the sum of three bfloat16 numbers
exactly, because each takes the next 8 bits of its 24. A product of two bfloat16 is exact in float32, in which tensor cores
sum.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load, transpose_ref

# Tokens, experts and columns of a block.
ROWS = EXPERTS = 64
DEPTH = 128
GRANULE = 8  # Of a copy's rows.
# Into as many bfloat16 numbers a float32 weight is split.
TERMS = 3
f32, bf16 = jnp.float32, jnp.bfloat16


def unsupported_reason(x: jax.Array, router: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    T, (E, H) = x.shape[0], router.shape
    if E % EXPERTS or H % DEPTH:
        return f"it needs multiples of {EXPERTS} experts and of {DEPTH} columns, not {E} and {H}"
    if T > GRANULE and T % GRANULE:
        return f"it supports multiples of {GRANULE} tokens from there on, not {T}"
    if router.dtype != f32:
        return f"it needs a router in float32, not {router.dtype}"
    return hopper_unsupported_reason(x.dtype)


@functools.partial(jax.jit, static_argnames=("interpret",))
def logit_parts(x: jax.Array, router: jax.Array, *, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
    """Parts of the logits x router^T, which are their sum: float32 [H / DEPTH, T padded to a multiple of ROWS, E].

    The second result is a 0, int32 [1], for a later kernel that needs a counter.

    Args:
        x: [T, H] in bfloat16. router: float32 [E, H].
        interpret: passed to Pallas.
    """
    T, H = x.shape
    E = router.shape[0]
    token_blocks, parts = -(-T // ROWS), H // DEPTH

    def moe_router(x, router, out, zero, x_s, w_s, arrived):
        part, first, expert = (
            lax.axis_index("part"),
            lax.axis_index("tokens") * ROWS,
            lax.axis_index("experts") * EXPERTS,
        )

        @pl.when((part == 0) & (first == 0) & (expert == 0))
        def _clear_counter():
            zero[0] = jnp.int32(0)

        columns = pl.ds(part * DEPTH, DEPTH)
        # Past the last token TMA reads zeros.
        plgpu.copy_gmem_to_smem(x.at[pl.ds(first, ROWS), columns], x_s, arrived)
        rest = load(router, (pl.ds(expert, EXPERTS), columns), layout=plgpu.Layout.WGMMA)
        for term in range(TERMS):
            bits = rest.astype(bf16)
            w_s[term] = bits
            rest = rest - bits.astype(f32)
        plgpu.commit_smem()
        plgpu.barrier_wait(arrived)

        def multiply(total):
            # The small ones first.
            for term in reversed(range(TERMS)):
                plgpu.wgmma(total, x_s, transpose_ref(w_s.at[term], (1, 0)))
            return total[...]

        out[part, pl.ds(first, ROWS), pl.ds(expert, EXPERTS)] = pl.run_scoped(multiply, plgpu.ACC((ROWS, EXPERTS), f32))

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        moe_router,
        out_type=(
            jax.ShapeDtypeStruct((parts, token_blocks * ROWS, E), f32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        scratch_types={
            "x_s": plgpu.SMEM((ROWS, DEPTH), bf16, transforms=swizzled),
            "w_s": plgpu.SMEM((TERMS, EXPERTS, DEPTH), bf16, transforms=swizzled),
            "arrived": plgpu.Barrier(),
        },
        grid=(parts, E // EXPERTS, token_blocks),
        grid_names=("part", "experts", "tokens"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(x, router)
