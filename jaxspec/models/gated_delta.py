"""What layers of the gated delta rule do to columns before it: unit length, and the causal convolution."""

import jax
import jax.numpy as jnp
from jax import lax


def unit(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Vectors [..., d] of length 1, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


def convolve(columns: jax.Array, weight: jax.Array) -> jax.Array:
    """Causal depthwise convolution and SiLU: columns [D, taps - 1 + n, ...] and weight [..., taps] -> [D, n, ...].

    The last tap is the token's own.
    """
    taps = weight.shape[-1]
    n = columns.shape[1] - (taps - 1)
    total = sum(columns[:, j : j + n].astype(jnp.float32) * weight[..., j].astype(jnp.float32) for j in range(taps))
    return jax.nn.silu(jnp.asarray(total).astype(columns.dtype))
