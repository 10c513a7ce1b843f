"""Quantised weights for tests."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.quant.schemes import VALUES, Scheme
from pallas_kernels.quant.values import Quantised


def drawn(scheme: Scheme, *shape: int, seed: int = 0) -> Quantised:
    """Every code that is a number, and scales of all sizes."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, len(VALUES[scheme.values]), shape, np.uint8)
    codes = np.where(bits & 0x7F == 0x7F, bits - 1, bits).view(ml_dtypes.float8_e4m3fn)  # without its two NaN
    if scheme.packed == 2:
        codes = bits[..., 0::2] | bits[..., 1::2] << 4
    low, high = (100, 130) if scheme.scale == np.uint8 else (0.01, 0.1)
    scale = rng.uniform(low, high, scheme.scale_shape(shape)).astype(scheme.scale)
    factor = jnp.asarray(rng.uniform(0.5, 2, shape[:-2]).astype(np.float32)) if scheme.factor else None
    return Quantised(jnp.asarray(codes), jnp.asarray(scale), scheme, factor)
