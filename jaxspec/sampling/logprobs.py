"""Log-probabilities of the model's raw distribution: of chosen ids, and of the likeliest ones."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.sampling.columns import Columns


class TopLogprobs(NamedTuple):
    """The N likeliest ids, likeliest first, of equal ones the lowest first: ids int32 and values float32 [..., N]."""

    ids: jax.Array
    values: jax.Array


def logprobs_of(logits: jax.Array, ids: jax.Array, log_z: jax.Array, columns: Columns | None = None) -> jax.Array:
    """Log-probabilities float32 [R, n] of ids [R, n] under softmax of logits [R, V], whose log-sum-exp is log_z [R].

    Args:
        columns: which columns logits have (default: all).
    """
    columns = columns or Columns(logits.shape[1])
    picked = columns.pick(lambda at: jnp.take_along_axis(logits, at, axis=1).astype(jnp.float32), ids)
    return picked - log_z[:, None]


def top_logprobs(
    logits: jax.Array, log_z: jax.Array, count: int, wanted: jax.Array, columns: Columns | None = None
) -> TopLogprobs:
    """The `count` likeliest ids of each row of finite logits [R, V], and their log-probabilities; count <= V.

    Args:
        log_z: float32 [R] log-sum-exp of each row.
        wanted: bool [R]; where it is False, the results may be anything.
        columns: which columns logits have (default: all).
    """
    columns = columns or Columns(logits.shape[1])
    best = columns.likeliest(logits, count, wanted)
    return TopLogprobs(best.ids, best.logits - log_z[:, None])
