"""Plain XLA: norm and rotation of heads, and a scatter into each cache, which XLA performs in place where it is donated."""

from typing import NamedTuple

import jax

from pallas_kernels.kv_write.reference import write_kv
from pallas_kernels.norm_linear.reference import rms_norm
from pallas_kernels.rope import apply_rope


class HeadNorms(NamedTuple):
    """The RMS norms of queries and keys.

    Attributes:
        q, k: factors: [D] of every head, or [K, G, D] and [K, D] of each.
        q_square, k_square: float32 [T], means of the squares over all heads of a token; None where each head has its own.
    """

    q: jax.Array
    k: jax.Array
    q_square: jax.Array | None = None
    k_square: jax.Array | None = None


def place(
    x: jax.Array,
    factor: jax.Array | None,
    square: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    eps: float,
) -> jax.Array:
    """Heads [T, ..., D], normed if there is a factor, and rotated: see `HeadNorms`."""
    if factor is not None:
        mean = None if square is None else square.reshape(-1, *(1,) * (x.ndim - 1))
        x = rms_norm(x, factor, eps, mean)
    return apply_rope(x, cos, sin)


def write_heads(
    k_cache: jax.Array,
    v_cache: jax.Array,
    qkv: jax.Array,
    bias: jax.Array | None,
    norms: HeadNorms | None,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if bias is not None:
        qkv = qkv + bias
    q_factor, k_factor, q_square, k_square = norms or (None,) * 4
    q = place(qkv[:, :, :-2], q_factor, q_square, cos, sin, eps)
    k = place(qkv[:, :, -2], k_factor, k_square, cos, sin, eps)
    return *write_kv(k_cache, v_cache, k, qkv[:, :, -1], pages, offsets), q
