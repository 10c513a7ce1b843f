"""Activations in FP8 for products with FP8 weights: e4m3 codes, and a float32 scale for each 128 columns of a token.

A scale belongs to one token, so neighbours in a batch never change a token's codes. The groups are DeepGEMM's, whose scales
of activations are the largest magnitude / 448 too (`per_token_cast_to_fp8`). The last group of a token may be smaller, as
the last block of a weight is.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

GROUP = 128
LARGEST = 448.0  # of e4m3
# The largest magnitude of a group counts as at least this: one of zeros has a scale too.
LEAST = 1e-10


class Codes(NamedTuple):
    """Quantised activations: a value is code * scale of its group.

    Attributes:
        codes: float8_e4m3fn [..., tokens, columns].
        scale: float32 [..., groups, tokens], so that the scales that one step of a product needs lie together.
    """

    codes: jax.Array
    scale: jax.Array


def scale_and_inverse(largest: Any) -> tuple[Any, Any]:
    """A group's scale, and what its values are multiplied by to become codes.

    Args:
        largest: magnitude in the group; NaN is kept.
    """
    largest = jnp.maximum(largest, LEAST)
    # At most 448 but for rounding, and what rounds to 448 needs no clamping before the cast (which gives NaN above 464).
    return largest * (1 / LARGEST), LARGEST / largest


def quantise(x: jax.Array) -> Codes:
    """Codes of x [..., tokens, columns], and a scale for each GROUP of them or fewer. NaN stays NaN, in its own token."""
    columns = x.shape[-1]
    if missing := -columns % GROUP:  # zeros are the largest of no group
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, GROUP)
    scale, inverse = scale_and_inverse(jnp.abs(groups).max(axis=-1))
    codes = (groups * inverse[..., None]).astype(jnp.float8_e4m3fn).reshape(x.shape)
    return Codes(codes[..., :columns], scale.swapaxes(-1, -2))


def dequantise(x: Codes) -> jax.Array:
    """What codes stand for: float32 [..., tokens, columns]."""
    # Without the barrier XLA removes a conversion to codes and back on a GPU, where it may keep more precision than asked for.
    x = jax.lax.optimization_barrier(x)
    scale = jnp.repeat(x.scale.swapaxes(-1, -2), GROUP, axis=-1)
    return x.codes.astype(jnp.float32) * scale[..., : x.codes.shape[-1]]
