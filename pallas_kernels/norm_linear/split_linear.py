"""A linear map of several tokens whose result is added to the residual stream: one Mosaic GPU kernel (`split_linear`).

Its columns are split over thread blocks, so that all multiprocessors read weights. The parts stay apart: the kernel that adds
them to the stream sums them, where XLA needs a kernel for that.
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
    paired,
    ring_linear,
    token_blocks,
    tokens_unsupported_reason,
)
from pallas_kernels.stream_linear import MOST_PARTS, cut_in_parts, stream_linear

# Where `ring_linear` would have blocks for fewer multiprocessors, and no more tokens than this, blocks have other sizes.
FEW_BLOCKS, FEW_TOKENS = 120, 64
# Pairs of blocks have half of the parts, and less to store. But each takes in more, which is measured for this many columns.
PAIRED_COLUMNS = 2048


def unsupported_reason(x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    T, outputs, columns = x.shape[0], weight.shape[0], math.prod(weight.shape[1:])
    most = M * (MOST_BLOCKS // token_blocks(T))
    if outputs % M or outputs > most or columns % DEPTH:
        of_tokens = f"up to {most} for {T} tokens"
        return f"it supports multiples of {M} outputs, {of_tokens}, and of {DEPTH} columns, not {outputs} and {columns}"
    return tokens_unsupported_reason(T) or hopper_unsupported_reason(x.dtype, weight.dtype)


def parts_of(outputs: int, columns: int, T: int) -> int:
    """Parts of the columns: as many as blocks for all of them, and for all tokens, run at once."""
    parts, tiles = range(1, MOST_PARTS + 1), outputs // M
    pairs = T > FEW_TOKENS and columns <= PAIRED_COLUMNS and paired(T, tiles)
    blocks = tiles * (2 if pairs else token_blocks(T))
    return max(n for n in parts if columns // DEPTH % n == 0 and blocks * n <= MOST_BLOCKS)


@functools.partial(jax.jit, static_argnames=("interpret",))
def split_linear(x: jax.Array, weight: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Parts of x weight^T, whose float32 sum it is: bfloat16 [parts, T, outputs].

    Args:
        x: [T, *in]. weight: [outputs, *in].
        interpret: passed to Pallas.
    """
    x, weight = x.reshape(x.shape[0], -1), weight.reshape(weight.shape[0], -1)
    outputs, columns = weight.shape
    parts = parts_of(outputs, columns, x.shape[0])
    if (
        x.shape[0] <= FEW_TOKENS
        and outputs // M * parts < FEW_BLOCKS
        and (cut := cut_in_parts(outputs, columns, MOST_BLOCKS))
    ):
        return stream_linear("split_linear", x, weight, cut, summed=False, interpret=interpret)
    return ring_linear("split_linear", x, (weight,), parts, interpret)
