"""Latents of multi-head latent attention as pages keep them: an array of C = L + R columns a token, or `Fp8Latents`.

The layout is FlashMLA's for its FP8 cache, in three arrays instead of interleaved rows: a rotated key must keep its
precision, and the latent takes a scale for each 128 columns. Scales are powers of two, so that the bfloat16 value of a code
is exact: a kernel for bfloat16 pages on the dequantised cache is the oracle of one that reads codes.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 128  # Latent columns that share a scale.
# The least scale: that of a largest value of 1e-4, as in DeepGEMM's quantisation.
LEAST_EXPONENT = -22
_BIAS, _MANTISSA_BITS = 127, 23  # of float32
# The largest e4m3 code, 448 = 1.75 * 2^8: its exponent, and the bits of its fraction in float32.
_LARGEST_EXPONENT, _LARGEST_FRACTION = 8, 0x600000


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale", "rope"), meta_fields=())
@dataclass(frozen=True)
class Fp8Latents:
    """Pages of quantised latents, [pages, page_size] tokens, or any part of them.

    Attributes:
        codes: float8_e4m3fn [..., L].
        scale: float32 [..., ceil(L / GROUP)], powers of two; NaN for a group that has one.
        rope: bfloat16 [..., R] the rotated key, never scaled.
    """

    codes: jax.Array
    scale: jax.Array
    rope: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the latents with their keys."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] + self.rope.shape[-1])

    def __getitem__(self, index: Any) -> "Fp8Latents":
        """The part at an index of the axes before the last."""
        return Fp8Latents(self.codes[index], self.scale[index], self.rope[index])


Latents = jax.Array | Fp8Latents
# Why a kernel that takes an array of latents does not support others.
NO_FP8 = "it has no latents in FP8"


def from_arrays(arrays: tuple[jax.Array, ...]) -> Latents:
    """A layer's cache as a value; `jax.tree.leaves` turns it back."""
    return arrays[0] if len(arrays) == 1 else Fp8Latents(*arrays)


def magnitude_bits(values: jax.Array) -> jax.Array:
    """The bits of float32 values without their signs, int32."""
    return lax.bitcast_convert_type(values, jnp.int32) & 0x7FFFFFFF


def scale_bits(largest: jax.Array) -> jax.Array:
    """The bits of a group's scale, int32: of the least power of two by which its largest magnitude is at most 448.

    Integer arithmetic, so that XLA and kernels agree: a logarithm or a quotient is rounded in its own way by each. NaN and
    infinity give the bits of NaN.

    Args:
        largest: of the `magnitude_bits`, whose order is that of magnitudes.
    """
    carry = (1 << _MANTISSA_BITS) - 1 - _LARGEST_FRACTION  # a larger fraction takes the next exponent
    exponent = ((largest + carry) >> _MANTISSA_BITS) - _LARGEST_EXPONENT
    exponent = jnp.maximum(exponent, _BIAS + LEAST_EXPONENT)
    infinity = 255 << _MANTISSA_BITS
    return jnp.where(largest < infinity, exponent << _MANTISSA_BITS, infinity + 1)


def inverse(bits: jax.Array) -> jax.Array:
    """1 / scale in float32, of the bits of a scale."""
    return lax.bitcast_convert_type((2 * _BIAS << _MANTISSA_BITS) - bits, jnp.float32)


def quantise(latent: jax.Array, rope: jax.Array) -> Fp8Latents:
    """Codes of latents [..., L] with the scale of each group, and the keys [..., R] in bfloat16.

    No value passes 448 when divided by its scale, so none needs clamping before the cast.
    """
    L = latent.shape[-1]
    whole = jnp.pad(latent.astype(jnp.float32), ((0, 0),) * (latent.ndim - 1) + ((0, -L % GROUP),))
    groups = whole.reshape(*latent.shape[:-1], -1, GROUP)
    bits = scale_bits(magnitude_bits(groups).max(axis=-1))
    codes = (groups * inverse(bits)[..., None]).astype(jnp.float8_e4m3fn).reshape(whole.shape)[..., :L]
    return Fp8Latents(codes, lax.bitcast_convert_type(bits, jnp.float32), rope.astype(jnp.bfloat16))


def dequantise(latents: Latents, dtype: Any) -> jax.Array:
    """What latents stand for, [..., L + R], exact in bfloat16 and float32. An array is returned as it is."""
    if not isinstance(latents, Fp8Latents):
        return latents
    scale = jnp.repeat(latents.scale, GROUP, axis=-1)[..., : latents.codes.shape[-1]]
    values = latents.codes.astype(jnp.float32) * scale
    return jnp.concatenate([values.astype(dtype), latents.rope.astype(dtype)], axis=-1)


def write(latents: Latents, place: tuple[jax.Array, ...], latent: jax.Array, rope: jax.Array) -> Latents:
    """The pages with new tokens, latents [T, L] and rotated keys [T, R], at `place`."""
    if isinstance(latents, Fp8Latents):
        return jax.tree.map(lambda pages, new: pages.at[place].set(new), latents, quantise(latent, rope))
    row = jnp.concatenate([latent.astype(latents.dtype), rope.astype(latents.dtype)], axis=-1)
    return latents.at[place].set(row)
