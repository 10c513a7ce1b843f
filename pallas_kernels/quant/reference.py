"""What a quantised weight stands for: the oracle of every scheme."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quant.values import Quantised, Weight


def dequantise(weight: Weight, dtype: Any) -> jax.Array:
    """The weight [*stack, out, in]: float32(code) * float32(scale of its block), rounded once to `dtype`.

    In spite of its name DeepSeek's `weight_scale_inv` is multiplied (DeepSeek-V3's README_WEIGHTS.md), as is the
    `weight_scale` of compressed-tensors. An array is returned as it is.
    """
    if not isinstance(weight, Quantised):
        return weight
    scheme, (out, inputs) = weight.scheme, weight.shape[-2:]
    scale = weight.scale.astype(jnp.float32)
    scale = jnp.repeat(scale[..., None] if scheme.columns is None else scale, scheme.columns or inputs, axis=-1)
    scale = jnp.repeat(scale, scheme.rows, axis=-2)[..., :out, :inputs]
    return (weight.codes.astype(jnp.float32) * scale).astype(dtype)


def linear(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., in] with a weight kept as checkpoints store it, [*out, in] -> [..., *out]."""
    return jnp.tensordot(x, dequantise(weight, x.dtype), axes=(-1, -1))
