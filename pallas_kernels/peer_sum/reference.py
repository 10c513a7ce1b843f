"""Plain XLA, the oracle."""

import jax
import jax.numpy as jnp
from jax import lax


def total(part: jax.Array, axis: str) -> jax.Array:
    """In float32, in the order of the devices, rounded once: the same bits on all of them."""
    first, *others = lax.all_gather(part, axis).astype(jnp.float32)
    for other in others:
        first = first + other
    return first.astype(part.dtype)
