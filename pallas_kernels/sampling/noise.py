"""Gumbel noise of single columns, the same wherever it is drawn: it follows from a row's key and the column's id alone.

Noise is -log(E) of exponential numbers E, which are drawn in blocks of BLOCK ids: first the least of a block, an exponential
number over BLOCK, and which of its ids has it; the others are as much greater as exponential numbers of their own, since these
have no memory. So a draw needs the random bits of a block's ids only where the block's largest noise would make one win, and
most blocks' largest noise would not (top-down sampling: Maddison, Tarlow and Minka, arXiv 1411.0030).

Nor does it need a logarithm to know that. If logit / temperature + noise reaches another score, -log(u) of the block is at most
BLOCK * exp(logit / temperature - score), and 1 - u is no greater than -log(u). So log2(1 - u) lies on or below a straight line
in the logit (`Bar`). A float's bits, read as an integer, bound its log2 from below, by at most 0.09 (`depth`). Near u = 1,
where winners are, nothing else is given away.

A block's ids are those that one thread of a kernel loads of a SPAN of ids: QUAD that follow each other, of each VECTOR.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.sampling.keys import LOG2_E

TINY = float(np.finfo(np.float32).tiny)
# Ids of a block, of which QUAD follow each other and the next lie a VECTOR further; and ids within which a block lies.
BLOCK, QUAD, VECTOR, SPAN = 16, 4, 512, 2048
# Of logarithms to base 2, in units of the last bit of a float's fraction.
_UNIT = float(1 << 23)
# What rounding may take away of log2(1 - u), as such and for each unit of the numbers that are added: a score, its terms and
# the line have a few roundings of 2**-24 each, and terms that win are no larger than the score and the noise's 19.
_MARGIN, _RELATIVE_MARGIN = 2.0**-6, 2.0**-18
# Scores and temperatures beyond are not told apart by a line.
_LARGE = 1e18

i32, f32 = jnp.int32, jnp.float32


def threefry(key: tuple[Any, Any], high: int, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two random words of threefry2x32 (Salmon et al., 2011, 20 rounds) of (high, low). All int32, whose sums wrap."""
    keys = (*key, key[0] ^ key[1] ^ i32(0x1BD11BDA))
    x, y = jnp.full(low.shape, high, i32) + keys[0], low + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = (y << rotation) | lax.shift_right_logical(y, jnp.full(y.shape, 32 - rotation, i32))
            y = y ^ x
        x = x + keys[(group + 1) % 3]
        y = y + (keys[(group + 2) % 3] + (group + 1))
    return x, y


def block_of(ids: jax.Array) -> jax.Array:
    """The number of the block in which ids are."""
    return (ids >> 11) * (SPAN // BLOCK) + ((ids & (VECTOR - 1)) >> 2)


class BlockBits(NamedTuple):
    """Random words of blocks: of the least exponential number, and of the place of the id that has it."""

    of_least: jax.Array
    of_place: jax.Array

    def noise(self) -> jax.Array:
        """The largest noise of each block."""
        return -jnp.log(self._least())

    def have(self, places: jax.Array) -> jax.Array:
        """Whether ids at these places of their blocks have the largest noise."""
        return places == (self.of_place & (BLOCK - 1))

    def _least(self) -> jax.Array:
        return exponential(self.of_least) * (1 / BLOCK)

    def noise_of(self, key: tuple[Any, Any], ids: jax.Array) -> jax.Array:
        """That of ids, each in its block."""
        least, (own, _) = self._least(), threefry(key, 0, ids)
        return -jnp.log(jnp.where(self.have(place_of(ids)), least, least + exponential(own)))


def block_bits(key: tuple[Any, Any], blocks: jax.Array) -> BlockBits:
    """Of blocks by their numbers."""
    return BlockBits(*threefry(key, 1, blocks))


def place_of(ids: jax.Array) -> jax.Array:
    """Which of its block's ids each is."""
    return ((ids >> 9) & 3) * QUAD + (ids & (QUAD - 1))


def noise_of(key: tuple[Any, Any], ids: jax.Array) -> jax.Array:
    """Standard Gumbel noise of ids."""
    return block_bits(key, block_of(ids)).noise_of(key, ids)


def exponential(bits: jax.Array) -> jax.Array:
    """Exponential numbers of mean 1, float32 above 0, from random bits: -log(u)."""
    return -jnp.log(jnp.maximum(_one_to_two(bits) - 1.0, TINY))


def depth(bits: jax.Array) -> jax.Array:
    """How far from 1 the bits' u is, float32: at most 2**23 * (log2(1 - u) + 127)."""
    return lax.bitcast_convert_type(2.0 - _one_to_two(bits), i32).astype(f32)


class Bar(NamedTuple):
    """A line in logits, float32 []: an id's score is less than another if its block's bits have a `depth` above the line."""

    slope: Any
    offset: Any

    def at(self, logits: jax.Array) -> jax.Array:
        """The largest depth of bits that may win with these logits. NaN says nothing: leave out only what is above."""
        return logits * self.slope + self.offset


def bar_of(score: Any, temperature: Any, log_z: Any = None) -> Bar:
    """The bar that bits of a block must not be above for its largest score, logit / temperature + noise, less `log_z` if given,
    to reach `score`. All are float32 [].

    A score or log_z that is not finite, or a temperature near 0, stops no column.
    """
    total, size = (score, _size(score)) if log_z is None else (score + log_z, _size(score) + _size(log_z))
    margin = _MARGIN + _RELATIVE_MARGIN * size
    known = (size < _LARGE) & (temperature > 1 / _LARGE)
    offset = jnp.where(known, (127 + np.log2(BLOCK) + margin - total * LOG2_E) * _UNIT, f32(jnp.inf))
    return Bar((LOG2_E * _UNIT) / temperature, offset)


def _size(x: Any) -> Any:
    return lax.max(x, -x)


def _one_to_two(bits: jax.Array) -> jax.Array:
    """1 + u, float32 in [1, 2), from the upper 23 bits."""
    fraction = lax.shift_right_logical(bits, jnp.full(bits.shape, 9, i32))
    return lax.bitcast_convert_type(fraction | i32(0x3F800000), f32)
