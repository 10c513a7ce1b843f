"""The order of float32 as the order of integers, and probabilities as integers whose sums do not depend on their order."""

import jax
import jax.numpy as jnp
from jax import lax


def ordered(x: jax.Array) -> jax.Array:
    """float32 to int32 with the same order; -0.0 comes before 0.0, NaN at the ends."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def weight_scale(tempered_max: jax.Array, log_z: jax.Array) -> jax.Array:
    """Powers of two float32 [R]: with them the weights exp(x - max) of a row sum to about 2**30 up to 2**31.

    Exact powers, so that no rounding depends on how a compiler contracts products and sums.
    """
    total = lax.bitcast_convert_type(jnp.exp(log_z - tempered_max), jnp.int32)
    exponent = jnp.clip((total >> 23) - 127, 0, 30)
    return lax.bitcast_convert_type((127 + 30 - exponent) << 23, jnp.float32)


def weight(tempered: jax.Array, tempered_max: jax.Array, scale: jax.Array) -> jax.Array:
    """exp(tempered - max) * scale to the nearest int32. A row's sum fits into 32 bits without a sign.

    What rounds to nothing has a probability below 2**-31.
    """
    return (jnp.exp(tempered - tempered_max) * scale + 0.5).astype(jnp.int32)
