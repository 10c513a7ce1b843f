"""Linear maps of the same tokens in one Mosaic GPU kernel (`joined_linear`), whose results lie side by side.

The weights stay separate arrays: XLA joins them inside its own matmul only, and sums the parts of one that it splits in
another kernel.
"""

import functools
import math
from typing import Any

import jax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.norm_linear.ring_linear import (
    DEPTH,
    MOST_BLOCKS,
    M,
    ring_linear,
    ring_stages,
    token_blocks,
    token_rows,
    tokens_unsupported_reason,
)

# On an H100: what a multiprocessor takes in, and what memory gives. An arrival within SHORT_US is worthwhile in any case, as
# that is about what XLA's kernels take for so little.
BLOCK_BYTES_PER_US, MEMORY_BYTES_PER_US, SHORT_US = 110e3, 3.06e6, 8.0
RESIDENT = 2  # Most blocks of a multiprocessor.
FEWEST_STAGES = 3  # With fewer, too little is on its way while a block multiplies.


def unsupported_reason(x: jax.Array, weights: tuple[jax.Array, ...]) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    T, H = x.shape
    outputs = [math.prod(weight.shape[:-1]) for weight in weights]
    most = M * (MOST_BLOCKS * RESIDENT // token_blocks(T))
    if H % DEPTH or any(each % M for each in outputs) or sum(outputs) > most:
        of_tokens = f"up to {most} in all for {T} tokens"
        return f"it supports multiples of {M} outputs, {of_tokens}, and of {DEPTH} columns, not {outputs} and {H}"
    if ring_stages(sum(outputs) // M, T) < FEWEST_STAGES:
        return f"it supports fewer than {T} tokens with {sum(outputs)} outputs"
    return tokens_unsupported_reason(T) or hopper_unsupported_reason(x.dtype, *(weight.dtype for weight in weights))


def worthwhile(T: int, H: int, outputs: int) -> bool:
    """Whether blocks, each with M outputs of a block's tokens, take in what they need about as fast as memory has the weights.

    Few blocks do not, as with the 2112 outputs of DeepSeek-V3's 7168 columns; XLA splits the columns there.
    """
    tiles = -(-outputs // M)
    of_a_multiprocessor = -(-tiles * token_blocks(T) // MOST_BLOCKS)
    arrival = of_a_multiprocessor * (M + token_rows(T, tiles)) * H * 2 / BLOCK_BYTES_PER_US
    return arrival <= max(1.2 * outputs * H * 2 / MEMORY_BYTES_PER_US, SHORT_US)


@functools.partial(jax.jit, static_argnames=("interpret",))
def joined_linear(x: jax.Array, weights: tuple[jax.Array, ...], *, interpret: Any = False) -> jax.Array:
    """x weight^T for each of the weights, side by side: [T, outputs of all].

    Args:
        x: [T, H]. weights: each [*out, H].
        interpret: passed to Pallas.
    """
    flat = [weight.reshape(-1, weight.shape[-1]) for weight in weights]
    return ring_linear("joined_linear", x, flat, None, interpret)
