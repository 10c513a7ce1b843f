"""min_p, top_k and top_p: the least logit that a row keeps, found in a few passes without a sort.

A sort would keep a decode step from being one CUDA graph. Logits are compared as integers of the same order (`ordered`),
and probabilities are summed as integers, so the result does not depend on how a device adds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.sampling.api import Bounds, LogitsStats, cutoffs
from pallas_kernels.sampling.keys import LEAST_KEY, weight_scale


class Truncation(NamedTuple):
    """What a row keeps of its logits: temperature (above 0), min_p, top_p float32 [R]; top_k int32 [R] (< 1: all)."""

    temperature: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    top_p: jax.Array


def cuts(logits: jax.Array, rows: Truncation, stats: LogitsStats, wanted: jax.Array) -> jax.Array:
    """The least key `ordered(logit)` that min_p, then top_k, then top_p keep, int32 [R]; LEAST_KEY where a row keeps all.

    Ids equal to the last that top_k keeps stay, as do those of equal probability to the last that top_p keeps. In a row with
    infinity top_p drops nothing. A row with NaN keeps everything.

    Args:
        logits: [R, V]; may have -inf.
        stats: of the logits at the rows' temperature.
        wanted: bool [R]; a row where it is False keeps everything.
    """
    V = logits.shape[1]
    wanted = wanted & ~jnp.isnan(stats.log_z_tempered)
    highest = jnp.take_along_axis(logits, stats.argmax[:, None], axis=1)[:, 0].astype(jnp.float32)
    sound = jnp.isfinite(highest) & jnp.isfinite(stats.log_z_tempered)
    log_highest = highest / rows.temperature
    scale = weight_scale(log_highest, stats.log_z_tempered)
    bounds = Bounds(
        rows.temperature,
        jnp.where(wanted, jnp.log(rows.min_p), -jnp.inf),
        jnp.where(wanted & (rows.top_k >= 1) & (rows.top_k < V), rows.top_k, 0),
        jnp.where(wanted & sound, rows.top_p, 1.0),
        highest,
        scale,
        jnp.exp(stats.log_z_tempered - log_highest) * scale,
    )
    drops = (bounds.log_min_p > -jnp.inf) | (bounds.top_k > 0) | (bounds.top_p < 1)
    return jnp.where(drops, cutoffs(logits, bounds), LEAST_KEY)
