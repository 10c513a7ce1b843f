"""Plain XLA: norm and rotation of heads, and a scatter into each cache, which XLA performs in place where it is donated."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.reference import write_kv
from pallas_kernels.norm_linear.reference import rms_norm
from pallas_kernels.rope import apply_rope


class HeadNorms(NamedTuple):
    """The RMS norms of queries and keys.

    Attributes:
        q, k: factors: [D] where each head is normed by itself, [K, G, D] and [K, D] where all heads of a token are together.
        q_square, k_square: float32 [T], means of the squares of all heads of a token, where a call has not all of them; None:
            of what the norms are over in this call.
    """

    q: jax.Array
    k: jax.Array
    q_square: jax.Array | None = None
    k_square: jax.Array | None = None

    @property
    def of_all_heads(self) -> bool:
        """Whether all heads of a token are normed together."""
        return self.q.ndim > 1

    def with_squares(self, qkv: jax.Array, bias: jax.Array | None) -> "HeadNorms":
        """The means of the squares given, where all heads are normed together. Arguments are those of `write_heads`."""
        if not self.of_all_heads or self.q_square is not None:
            return self
        biased = qkv if bias is None else qkv + bias
        squares = mean_square(biased[:, :, :-2]), mean_square(biased[:, :, -2])
        return HeadNorms(self.q, self.k, *squares)


def mean_square(x: jax.Array) -> jax.Array:
    """Of all heads of each token: [T, ..., D] -> float32 [T]."""
    return jnp.square(x.astype(jnp.float32)).mean(axis=range(1, x.ndim))


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
        if square is None and factor.ndim > 1:
            square = mean_square(x)
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
