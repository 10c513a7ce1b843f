"""The order of float32 as the order of integers, and probabilities as integers whose sums do not depend on their order."""

import math

import jax
import jax.numpy as jnp
from jax import lax

# Below the keys of all floats.
LEAST_KEY = -(2**31)
LOG2_E = math.log2(math.e)


def ordered(x: jax.Array) -> jax.Array:
    """float32 to int32 with the same order; -0.0 comes before 0.0, NaN at the ends."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def float_of(keys: jax.Array) -> jax.Array:
    """The inverse of `ordered`."""
    return lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ jnp.int32(0x7FFFFFFF), keys), jnp.float32)


def weight_scale(tempered_max: jax.Array, log_z: jax.Array) -> jax.Array:
    """Powers of two float32 [R]: with them the weights exp(x - max) of a row sum to about 2**30 up to 2**31.

    Exact powers, so that no rounding depends on how a compiler contracts products and sums.
    """
    total = lax.bitcast_convert_type(jnp.exp(log_z - tempered_max), jnp.int32)
    exponent = jnp.clip((total >> 23) - 127, 0, 30)
    return lax.bitcast_convert_type((127 + 30 - exponent) << 23, jnp.float32)


def probability(logits: jax.Array, highest: jax.Array, temperature: jax.Array) -> jax.Array:
    """exp((logits - highest) / temperature): probabilities over the largest one of a row."""
    return jnp.exp2((logits - highest) * (LOG2_E / temperature))


def weight(probability: jax.Array, scale: jax.Array) -> jax.Array:
    """probability * scale to the nearest int32. A row's sum fits into 32 bits without a sign.

    What rounds to nothing has a probability below 2**-31.
    """
    return (probability * scale + 0.5).astype(jnp.int32)
