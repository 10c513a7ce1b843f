"""Log-probabilities of the model's raw distribution: of chosen ids, and of the likeliest ones."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.sampling.api import likeliest


class TopLogprobs(NamedTuple):
    """The N likeliest ids, likeliest first, of equal ones the lowest first: ids int32 and values float32 [..., N]."""

    ids: jax.Array
    values: jax.Array


def logprobs_of(logits: jax.Array, ids: jax.Array, log_z: jax.Array) -> jax.Array:
    """Log-probabilities float32 [R, n] of ids [R, n] under softmax of logits [R, V], whose log-sum-exp is log_z [R]."""
    return jnp.take_along_axis(logits, ids, axis=1).astype(jnp.float32) - log_z[:, None]


def top_logprobs(logits: jax.Array, log_z: jax.Array, count: int, wanted: jax.Array) -> TopLogprobs:
    """The `count` likeliest ids of each row of finite logits [R, V], and their log-probabilities; count <= V.

    Args:
        log_z: float32 [R] log-sum-exp of each row.
        wanted: bool [R]; where it is False, the results may be anything.
    """
    best = likeliest(logits, count, wanted)
    return TopLogprobs(best.ids, best.logits - log_z[:, None])
