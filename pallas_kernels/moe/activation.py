"""How an expert joins its two halves."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Clamp:
    """gpt-oss's SwiGLU (transformers' modeling_gpt_oss.py): both halves are bounded, and up is moved by one.

    (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +-`limit`.
    """

    alpha: float = 1.702
    limit: float = 7.0


def joined(gate: jax.Array, up: jax.Array, clamp: Clamp | None) -> jax.Array:
    """SwiGLU, silu(gate) * up, or the clamped one."""
    if clamp is None:
        return jax.nn.silu(gate) * up
    # Not by `jnp.clip`, so that kernels can use it too.
    gate, up = jnp.minimum(gate, clamp.limit), jnp.maximum(jnp.minimum(up, clamp.limit), -clamp.limit)
    return (up + 1) * gate * (1.0 / (1.0 + jnp.exp(-clamp.alpha * gate)))
