"""Plain XLA, the oracle: sums in float32, in the order of the devices, rounded once, so that all devices have the same bits."""

import jax
import jax.numpy as jnp
from jax import lax


def total(part: jax.Array, axis: str) -> jax.Array:
    first, *others = lax.all_gather(part, axis).astype(jnp.float32)
    for other in others:
        first = first + other
    return first.astype(part.dtype)


def scatter_sum(part: jax.Array, axis: str) -> jax.Array:
    T = part.shape[0] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(total(part, axis), lax.axis_index(axis) * T, T)


def gather(part: jax.Array, axis: str) -> jax.Array:
    return lax.all_gather(part, axis, tiled=True)
