"""Rotary embedding in plain XLA."""

import jax
import jax.numpy as jnp


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first `dim` columns of the last axis by halves in float32; the others pass (partial rotary).

    x [T, ..., >= dim], cos and sin [T, dim / 2] -> x's dtype.
    """
    dim = 2 * cos.shape[-1]
    shape = (x.shape[0], *(1,) * (x.ndim - 2), cos.shape[-1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    a, b = jnp.split(x[..., :dim].astype(jnp.float32), 2, axis=-1)
    turned = [part.astype(x.dtype) for part in (a * cos - b * sin, b * cos + a * sin)]
    return jnp.concatenate([*turned, x[..., dim:]] if x.shape[-1] > dim else turned, axis=-1)
