"""Gumbel noise of single columns, as `jax.random.gumbel` draws it for a whole row.

With `jax_threefry_partitionable`, jax's default, an element's bits follow from the key and the element's number alone. So a
kernel draws what it needs where it needs it, and a device the noise of its own columns.

Most columns cannot win a draw, and their bits say so without a logarithm. The noise is -log(-log(u)). If logit / temperature +
noise reaches another score, -log(u) is at most exp(logit / temperature - score), and 1 - u is no greater than -log(u). So
log2(1 - u) lies on or below a straight line in the logit (`Bar`). A float's bits, read as an integer, bound its log2 from
below, by at most 0.09 (`depth`). Near u = 1, where winners are, nothing else is given away.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.sampling.keys import LOG2_E

TINY = float(np.finfo(np.float32).tiny)
# The `depth` of the largest u there is, 1 - 2**-23: of bits of no other column is it less.
LEAST_DEPTH = float((127 - 23) << 23)
# Of logarithms to base 2, in units of the last bit of a float's fraction.
_UNIT = float(1 << 23)
# What rounding may take away of log2(1 - u), as such and for each unit of the numbers that are added: a score, its terms and
# the line have a few roundings of 2**-24 each, and terms that win are no larger than the score and the noise's 16.
_MARGIN, _RELATIVE_MARGIN = 2.0**-6, 2.0**-18
# Scores and temperatures beyond are not told apart by a line.
_LARGE = 1e18

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
    return -jnp.log(-jnp.log(jnp.maximum(_one_to_two(bits) - 1.0, TINY)))


def depth(bits: jax.Array) -> jax.Array:
    """How far from 1 the bits' u is, float32: at most 2**23 * (log2(1 - u) + 127)."""
    return lax.bitcast_convert_type(2.0 - _one_to_two(bits), i32).astype(f32)


class Bar(NamedTuple):
    """A line in logits, float32 []: the score of a column whose bits have a `depth` above it is less than another score."""

    slope: Any
    offset: Any

    def at(self, logits: jax.Array) -> jax.Array:
        """The largest depth of bits that may win with these logits. NaN says nothing: leave out only what is above."""
        return logits * self.slope + self.offset


def bar_of(score: Any, temperature: Any, log_z: Any = None) -> Bar:
    """The bar for scores logit / temperature + noise, less `log_z` if given, to reach `score`. All are float32 [].

    A score or log_z that is not finite, or a temperature near 0, stops no column.
    """
    total, size = (score, _size(score)) if log_z is None else (score + log_z, _size(score) + _size(log_z))
    margin = _MARGIN + _RELATIVE_MARGIN * size
    known = (size < _LARGE) & (temperature > 1 / _LARGE)
    offset = jnp.where(known, (127 + margin - total * LOG2_E) * _UNIT, f32(jnp.inf))
    return Bar((LOG2_E * _UNIT) / temperature, offset)


def _size(x: Any) -> Any:
    return lax.max(x, -x)


def _one_to_two(bits: jax.Array) -> jax.Array:
    """1 + u, float32 in [1, 2), from the upper 23 bits."""
    fraction = lax.shift_right_logical(bits, jnp.full(bits.shape, 9, i32))
    return lax.bitcast_convert_type(fraction | i32(0x3F800000), f32)
