"""The MLP of a dense layer in bfloat16, for a decode step's tokens.

XLA makes three kernels of it, whose matmuls read the weights at 83 and 62 % of the memory's rate (GLM-4.5-Air's, 32
tokens, in a trace on an H200). Here are two, whose blocks share the weights evenly: see `stream_linear.py`.
"""

import functools
from typing import Any

import jax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.moe.config import blocks_of_a_kernel
from pallas_kernels.stream_linear import DEPTHS, GRANULE, MOST_TOKENS, M, cut_in_parts, even_cut, stream_linear

# Outputs of gate and of up of a block, at least; and at most with one warpgroup of tokens, and with two. Their accumulators are
# registers, of which a thread has fewer with two: with more outputs they would be spilled.
LEAST_OUTPUTS, MOST_OUTPUTS = 32, (160, 112)


def unsupported_reason(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> str | None:
    """Why the kernels do not support this call, or None if they do."""
    T, (H, inner) = x.shape[0], down.shape
    blocks, multiple = blocks_of_a_kernel(), DEPTHS[-1]
    if H % multiple or inner % multiple:
        return f"it needs MLPs of sizes that are multiples of {multiple}, not {H} and {inner}"
    if T > MOST_TOKENS or (T > GRANULE and T % GRANULE):
        return f"it supports up to {MOST_TOKENS} tokens, from {GRANULE} on in multiples of {GRANULE}, not {T}"
    most = MOST_OUTPUTS[T > M]
    if even_cut(inner, blocks).outputs > most:
        return f"it supports an inner size of up to {most * blocks} with {T} tokens, not {inner}"
    if cut_in_parts(H, inner, blocks) is None:
        return f"it has no even parts of {H} outputs and {inner} columns for {blocks} blocks"
    return hopper_unsupported_reason(x.dtype, gate_up.dtype, down.dtype)


def worthwhile(inner: int) -> bool:
    """Whether a block's outputs are enough: with fewer it reads more of the tokens than of the weights."""
    return even_cut(inner, blocks_of_a_kernel()).outputs >= LEAST_OUTPUTS


@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def mlp_to_add(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, *, blocks: int | None = None, interpret: Any = False
) -> jax.Array:
    """down(silu(gate x) * up x) as parts, whose float32 sum it is: bfloat16 [parts, T, H].

    Jitted, so that the layers of a model share one lowering.

    Args:
        x: [T, H]. gate_up: [2, I, H]. down: [H, I].
        blocks: of a kernel (default: one a multiprocessor).
        interpret: passed to Pallas.
    """
    blocks = blocks or blocks_of_a_kernel()
    outputs, columns = down.shape
    cut = cut_in_parts(outputs, columns, blocks)
    assert cut is not None
    h = stream_linear("gated_linear", x, gate_up, even_cut(columns, blocks), interpret=interpret)
    return stream_linear("split_linear", h, down, cut, summed=False, interpret=interpret)
