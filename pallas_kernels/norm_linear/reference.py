"""Plain XLA: sum, RMS norm, and one matmul per weight."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, mean_square: jax.Array | None = None) -> jax.Array:
    """[..., H]; rounded to the type of x before the weight (modeling_deepseek.py), after a float32 one (Qwen3.5).

    mean_square: float32 [..., 1], where x is a part of what the norm is over.
    """
    x32 = x.astype(jnp.float32)
    if mean_square is None:
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = x32 * lax.rsqrt(mean_square + eps)
    if weight.dtype == jnp.float32:
        return (weight * normed).astype(x.dtype)
    return weight * normed.astype(x.dtype)


def whole(delta: jax.Array) -> jax.Array:
    """[T, H] as it is; of parts [parts, T, H] the sum in float32, rounded."""
    return delta if delta.ndim == 2 else delta.astype(jnp.float32).sum(axis=0).astype(delta.dtype)


def norm_linear(
    x: jax.Array, norm_weight: jax.Array, weights: tuple[jax.Array, ...], *, eps: float, delta: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    if delta is not None:
        x = x + whole(delta)
    # The barrier keeps the product with the norm's weight in the norm's kernel: without it XLA adds a kernel on an H200.
    normed = lax.optimization_barrier(rms_norm(x, norm_weight, eps))
    return x, normed, project(normed, weights)


def project(normed: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The norm [T, H] with each of the weights [*out, H]: [T, *out], in the weight's type."""

    def by(weight: jax.Array) -> jax.Array:
        # HIGHEST: a float32 matmul on a GPU may otherwise round its operands to TF32.
        precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
        return jnp.tensordot(normed.astype(weight.dtype), weight, axes=(-1, -1), precision=precision)

    return tuple(map(by, weights))
