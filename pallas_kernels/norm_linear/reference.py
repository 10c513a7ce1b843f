"""Plain XLA: sum, RMS norm, and one matmul per weight."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.backend import hopper_unsupported_reason


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


def factor_of(weight: jax.Array, *, centred: bool) -> jax.Array:
    """What a norm with this weight multiplies by."""
    return 1 + weight.astype(jnp.float32) if centred else weight


def norm_linear(
    x: jax.Array,
    norm_weight: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    eps: float,
    delta: jax.Array | None = None,
    centred: bool = False,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    if delta is not None:
        x = x + whole(delta)
    # The barrier keeps the product with the norm's weight in the norm's kernel: without it XLA adds a kernel on an H200.
    normed = lax.optimization_barrier(rms_norm(x, factor_of(norm_weight, centred=centred), eps))
    return x, normed, project(normed, weights)


def project(normed: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The norm [T, H] with each of the weights [*out, H]: [T, *out], in the weight's type."""

    def by(weight: jax.Array) -> jax.Array:
        # With fewer tokens the two small kernels around it may cost what it saves.
        many = normed.shape[0] > tuning.current().router_tokens
        if weight.dtype == jnp.float32 and many and hopper_unsupported_reason(normed.dtype) is None:
            return float32_product(normed, weight)
        # HIGHEST: a float32 matmul on a GPU may otherwise round its operands to TF32.
        precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
        return jnp.tensordot(normed.astype(weight.dtype), weight, axes=(-1, -1), precision=precision)

    return tuple(map(by, weights))


def float32_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x weight^T in float32 [T, *out], on tensor cores, which a float32 matmul of XLA does not use.

    The products are those of a float32 matmul; see `bf16_terms`.

    Args:
        x: bfloat16 [T, H]. weight: float32 [*out, H].
    """
    terms = bf16_terms(weight)
    products = jnp.tensordot(x, jnp.stack(terms), axes=(-1, -1), preferred_element_type=jnp.float32)  # [T, 3, *out]
    return products[:, 2] + products[:, 1] + products[:, 0]  # the small ones first


def bf16_terms(weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three bfloat16 arrays whose sum is a float32 one exactly: each takes the next 8 bits of its 24."""
    terms, rest = [], weight
    for _ in range(3):
        # XLA drops a cast to bfloat16 and back, but not this.
        rounded = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        terms.append(rounded.astype(jnp.bfloat16))
        rest = rest - rounded
    first, second, third = terms
    return first, second, third
