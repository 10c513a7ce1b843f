"""min_p, top_k and top_p: the least logit that each of a request's rules keeps, found in a few passes without a sort.

A sort would keep a decode step from being one CUDA graph. Logits are compared as integers of the same order (`ordered`),
and probabilities are summed as integers, so the result does not depend on how a device adds.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sampling.api import LogitsStats, Tally, Weights, tallies, thresholds_at_once
from pallas_kernels.sampling.keys import ordered, weight_scale


class Truncation(NamedTuple):
    """What a row keeps of its logits: temperature (above 0), min_p, top_p float32 [R]; top_k int32 [R] (< 1: all)."""

    temperature: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    top_p: jax.Array


def truncate(logits: jax.Array, rows: Truncation, stats: LogitsStats, wanted: jax.Array) -> jax.Array:
    """float32 logits [R, V] / temperature, with -inf where min_p, then top_k, then top_p drop the id.

    Ids equal to the last that top_k keeps stay, as do those of equal probability to the last that top_p keeps. In a row with
    infinity top_p drops nothing. A row with NaN keeps everything.

    Args:
        logits: float32 [R, V]; may have -inf.
        stats: of the logits at the rows' temperature.
        wanted: bool [R]; a row where it is False keeps everything.
    """
    V = logits.shape[1]
    # Once, and in memory: where it is divided again, another rounding would drop the very id that was found.
    tempered = lax.optimization_barrier(logits / rows.temperature[:, None])
    top = jnp.take_along_axis(tempered, stats.argmax[:, None], axis=1)[:, 0]
    border = top + jnp.log(rows.min_p)
    # -0.0 is no less than 0.0. A border that is NaN drops nothing.
    first = jnp.where(border > -jnp.inf, ordered(jnp.where(border == 0, -0.0, border)), _least_key())
    end = jnp.full_like(first, _greatest_key() + 1)
    passes = _Passes(tempered)
    wanted = wanted & ~jnp.isnan(stats.log_z_tempered)

    some = wanted & (rows.top_k >= 1) & (rows.top_k < V)
    kth = passes.search(first, end, some, lambda sums, _: sums >= rows.top_k[:, None].astype(jnp.uint32), None)

    sound = jnp.isfinite(top) & jnp.isfinite(stats.log_z_tempered)
    some = wanted & (rows.top_p < 1) & sound
    weights = Weights(jnp.where(sound, top, 0.0), weight_scale(top, stats.log_z_tempered))

    def enough(sums: jax.Array, whole: jax.Array) -> jax.Array:
        return sums.astype(jnp.float32) >= rows.top_p[:, None] * whole.astype(jnp.float32)

    last = passes.search(kth, end, some, enough, weights)
    # Logits that differ may have one probability.
    probability = jnp.exp(tempered - weights.tempered_max[:, None])
    least = jnp.where(some, jnp.exp(_float_of(last) - weights.tempered_max), jnp.inf)
    keys = ordered(tempered)
    keep = (keys >= last[:, None]) | ((keys >= kth[:, None]) & (probability >= least[:, None]))
    return jnp.where(keep | ~wanted[:, None], tempered, -jnp.inf)


class _Passes:
    """Searches over the keys of some logits."""

    def __init__(self, logits: jax.Array):
        self.logits = logits
        self.at_once = thresholds_at_once(logits)

    def search(
        self,
        first: jax.Array,
        end: jax.Array,
        wanted: jax.Array,
        enough: Callable[[jax.Array, jax.Array], jax.Array],
        weights: Weights | None,
    ) -> jax.Array:
        """The greatest key int32 [R] from `first` on and below `end` whose ids and those above are enough.

        At `first` they are; rows that are not wanted return it. Each pass cuts every bracket into parts, and to the keys
        that occur.

        Args:
            enough: of sums [R, T] at thresholds and [R, 1] at `first`, bool [R, T].
        """
        tally = tallies(self.logits, weights)
        if self.at_once == 1:
            return jnp.where(wanted, _bisection(tally, first, enough), first)
        end = jnp.where(wanted, end, first + 1)
        whole: jax.Array | None = None
        cuts = jnp.arange(1, self.at_once + 1, dtype=jnp.uint32)
        left, start = 2**32, first
        while left > 1:
            left = -(-left // (self.at_once + 1))
            width = (end - start).astype(jnp.uint32)  # wraps to what it is
            step = width // (self.at_once + 1) + (width % (self.at_once + 1) > 0)
            cut = jnp.minimum(step[:, None] * cuts, width[:, None])
            thresholds = start[:, None] + cut.astype(jnp.int32)
            tallied = thresholds if whole is not None else jnp.concatenate([first[:, None], thresholds], axis=1)
            brackets = jnp.stack([start, end], axis=1)
            found = tally(brackets, tallied, width > 1)
            sums = found.sums
            if whole is None:
                whole, sums = sums[:, :1], sums[:, 1:]
            reached = (enough(sums, whole) & (thresholds < end[:, None])).sum(axis=1, dtype=jnp.uint32)
            after = start + jnp.minimum(step * (reached + 1), width).astype(jnp.int32)
            before = start + (step * reached).astype(jnp.int32)
            if found.inside is not None:
                least, most = found.inside
                before = jnp.where(width > 1, jnp.maximum(before, jnp.minimum(least, after - 1)), before)
                after = jnp.where(width > 1, jnp.clip(most + 1, before + 1, after), after)
            start, end = before, after
        return start


def _bisection(
    tally: Callable[..., Tally], first: jax.Array, enough: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """As `_Passes.search` in rows that are wanted: bit by bit, which is the least work where a pass has one threshold."""

    def sums(thresholds: jax.Array) -> jax.Array:
        return tally(None, thresholds[:, None], None).sums

    whole, bits = sums(first), jnp.zeros(first.shape, jnp.uint32)
    for bit in range(31, -1, -1):
        candidate = bits | jnp.uint32(1 << bit)
        bits = jnp.where(enough(sums(_key_of(candidate)), whole)[:, 0], candidate, bits)
    return jnp.maximum(first, _key_of(bits))


def _key_of(bits: jax.Array) -> jax.Array:
    """uint32 to int32 with the same order."""
    return lax.bitcast_convert_type(bits ^ jnp.uint32(1 << 31), jnp.int32)


def _float_of(keys: jax.Array) -> jax.Array:
    """The inverse of `ordered`."""
    return lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ jnp.int32(0x7FFFFFFF), keys), jnp.float32)


def _least_key() -> jax.Array:
    return ordered(jnp.float32(-jnp.inf))


def _greatest_key() -> jax.Array:
    return ordered(jnp.float32(jnp.inf))
