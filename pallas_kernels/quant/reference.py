"""What a quantised weight stands for: the oracle of every scheme."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quant.schemes import VALUES, Scheme
from pallas_kernels.quant.values import Quantised, Weight


def dequantise(weight: Weight, dtype: Any) -> jax.Array:
    """The weight [*stack, out, in]: value of the code * scale of its block (* factor), in float32, rounded to `dtype`.

    In spite of its name DeepSeek's `weight_scale_inv` is multiplied (DeepSeek-V3's README_WEIGHTS.md), as is the
    `weight_scale` of compressed-tensors. NVFP4's factor is ModelOpt's `weight_scale_2`, and the reciprocal of
    compressed-tensors' `weight_global_scale`. An array is returned as it is.
    """
    if not isinstance(weight, Quantised):
        return weight
    scheme, (out, inputs) = weight.scheme, weight.shape[-2:]
    scale = scheme.as_blocks(_numbers(weight.scale))
    scale = jnp.repeat(scale, scheme.columns or inputs, axis=-1)
    scale = jnp.repeat(scale, scheme.rows, axis=-2)[..., :out, :inputs]
    value = _values(weight.codes, scheme) * scale
    if weight.factor is not None:
        value = value * weight.factor[..., None, None]
    return value.astype(dtype)


def _values(codes: jax.Array, scheme: Scheme) -> jax.Array:
    if scheme.packed == 1:
        return codes.astype(jnp.float32)
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
    return jnp.take(VALUES[scheme.values], pairs.reshape(*codes.shape[:-1], -1).astype(jnp.int32), axis=0)


def _numbers(scale: jax.Array) -> jax.Array:
    """Scales in float32; uint8 are exponents of two, biased as float32's are."""
    if scale.dtype != jnp.uint8:
        return scale.astype(jnp.float32)
    return lax.bitcast_convert_type(scale.astype(jnp.uint32) << 23, jnp.float32)


def linear(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., in] with a weight kept as checkpoints store it, [*out, in] -> [..., *out]."""
    return jnp.tensordot(x, dequantise(weight, x.dtype), axes=(-1, -1))
