"""Gumbel noise of single columns, as `jax.random.gumbel` draws it for a whole row.

With `jax_threefry_partitionable`, jax's default, an element's bits follow from the key and the element's number alone. So a
kernel draws what it needs where it needs it, and a device the noise of its own columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TINY = float(np.finfo(np.float32).tiny)

i32, f32 = jnp.int32, jnp.float32


def threefry(key: tuple[Any, Any], counter: jax.Array) -> jax.Array:
    """jax's 32 random bits for the element number `counter`: the two words of threefry2x32 (Salmon et al., 2011, 20 rounds)
    of (0, counter), xor-ed. All int32, whose sums wrap."""
    keys = (*key, key[0] ^ key[1] ^ i32(0x1BD11BDA))
    x, y = jnp.full(counter.shape, 0, i32) + keys[0], counter + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = (y << rotation) | lax.shift_right_logical(y, jnp.full(y.shape, 32 - rotation, i32))
            y = y ^ x
        x = x + keys[(group + 1) % 3]
        y = y + (keys[(group + 2) % 3] + (group + 1))
    return x ^ y


def noise_of(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise from random bits, as `jax.random.gumbel` computes it."""
    mantissa = lax.shift_right_logical(bits, jnp.full(bits.shape, 9, i32)) | i32(0x3F800000)
    uniform = jnp.maximum(lax.bitcast_convert_type(mantissa, f32) - 1.0, TINY)
    return -jnp.log(-jnp.log(uniform))
