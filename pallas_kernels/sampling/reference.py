"""A sampler's passes over the logits, in plain XLA."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sampling.keys import float_of, ordered, probability, weight
from pallas_kernels.sampling.noise import noise_of
from pallas_kernels.unrolling import repeated

# Ids in a block of `likeliest`. Only a block's maximum is read until the block is known to hold a winner.
BLOCK = 512


class LogitsStats(NamedTuple):
    """Statistics of each row of logits.

    Attributes:
        argmax: int32 [R], the lowest id among equals; any id if the row has a NaN.
        log_z: float32 [R] log-sum-exp.
        log_z_tempered: float32 [R] log-sum-exp of logits / temperature.
        finite: bool [R], whether all logits of the row are finite.
    """

    argmax: jax.Array
    log_z: jax.Array
    log_z_tempered: jax.Array
    finite: jax.Array


class Residual(NamedTuple):
    """Turns p into the distribution after a rejected draft (Leviathan et al., arXiv 2211.17192, algorithm 1).

    Attributes:
        log_z: float32 [R] log-sum-exp of a row's logits / temperature.
        excluded: int32 [R] an id that is not drawn, for a draft that was certain of it; -1 for none.
        dense: bool [R] draws from max(0, p - q) instead, or from p itself if that is 0 everywhere.
        q_logits: [Q, V] of drafts, at the temperature of the draw.
        q_log_z: float32 [R] log-sum-exp of q's logits / temperature.
        q_rows: int32 [R] the row of q_logits that is each draw's q.
    """

    log_z: jax.Array
    excluded: jax.Array
    dense: jax.Array
    q_logits: jax.Array
    q_log_z: jax.Array
    q_rows: jax.Array

    def q(self, temperature: jax.Array) -> jax.Array:
        """Of each draw, float32 [R, V]."""
        tempered = self.q_logits[self.q_rows].astype(jnp.float32) / temperature[:, None]
        return jnp.exp(tempered - self.q_log_z[:, None])


class Best(NamedTuple):
    """The winner of each draw among some columns: ids int32 [R], the lowest of equal ones, and scores float32 [R]."""

    ids: jax.Array
    scores: jax.Array


class Drawn(NamedTuple):
    """What a part of each row puts forward in a draw, to be compared with what the other parts do.

    Attributes:
        whole: of p, without the id that a residual excludes.
        left: of max(0, p - q), with a score of -inf where it is 0 in all of the part. It decides the draws of a residual that
            are `dense`, but where all parts say -inf; in others it may be anything. None without a residual.
    """

    whole: Best
    left: Best | None


class Bounds(NamedTuple):
    """What rows keep of their logits: ids that min_p, then top_k, then top_p keep. float32 [R] but top_k.

    Attributes:
        temperature: above 0.
        log_min_p: min_p keeps what is at most this below the largest logit, both over the temperature; -inf: all.
        top_k: int32 [R], 0: all.
        top_p: 1: all.
        highest: a row's largest logit. Finite where top_p does not keep all.
        scale: of weights, see `keys.weight_scale`.
        total: about what the weights of all ids sum to. It decides how long a search takes, not what it finds.
    """

    temperature: jax.Array
    log_min_p: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    highest: jax.Array
    scale: jax.Array
    total: jax.Array


class Likeliest(NamedTuple):
    """The N likeliest ids of each row, likeliest first, of equal ones the lowest first: ids int32 and logits float32 [R, N]."""

    ids: jax.Array
    logits: jax.Array


def kept(logits: jax.Array, cuts: jax.Array | None) -> jax.Array:
    """float32 logits [R, V] with -inf below what each row keeps."""
    x = logits.astype(jnp.float32)
    return x if cuts is None else jnp.where(ordered(x) >= cuts[:, None], x, -jnp.inf)


def logits_stats(logits: jax.Array, temperature: jax.Array, cuts: jax.Array | None = None) -> LogitsStats:
    logits = kept(logits, cuts)
    return LogitsStats(
        jnp.argmax(logits, axis=1).astype(jnp.int32),
        jax.nn.logsumexp(logits, axis=1),
        jax.nn.logsumexp(logits / temperature[:, None], axis=1),
        jnp.isfinite(logits).all(axis=1),
    )


def gumbel(keys: jax.Array, size: int, first_column: jax.Array | int = 0) -> jax.Array:
    """Standard Gumbel noise float32 [R, size] of keys uint32 [R, 2], of the columns from `first_column`, int32 [], on."""
    words = lax.bitcast_convert_type(keys, jnp.int32)[..., None]
    columns = jnp.broadcast_to(first_column + jnp.arange(size, dtype=jnp.int32), (keys.shape[0], size))
    return noise_of((words[:, 0], words[:, 1]), columns)


def _of_draws(logits: jax.Array, rows: jax.Array | None, cuts: jax.Array | None) -> jax.Array:
    """What each draw's row of logits keeps, [R, V]."""
    if rows is None:
        return kept(logits, cuts)
    return kept(logits[rows], None if cuts is None else cuts[rows])


def gumbel_argmax(
    logits: jax.Array,
    rows: jax.Array | None,
    temperature: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    likely: jax.Array,
    residual: Residual | None = None,
    cuts: jax.Array | None = None,
) -> jax.Array:
    del wanted, likely  # All rows cost the same here.
    V = logits.shape[1]
    tempered = _of_draws(logits, rows, cuts) / temperature[:, None]
    noise = gumbel(keys, V)
    if residual is None:
        return jnp.argmax(tempered + noise, axis=1).astype(jnp.int32)
    log_p = tempered - residual.log_z[:, None]
    p = jnp.exp(log_p)
    point = (jnp.arange(V) == residual.excluded[:, None]).astype(jnp.float32)
    q = jnp.where(residual.dense[:, None], residual.q(temperature), point)
    left = jnp.maximum(p - q, 0.0)
    # If p and q agree up to rounding the difference is 0 everywhere; then p itself is right.
    none_left = left.sum(axis=1, keepdims=True) == 0
    adjusted = jnp.where(none_left, log_p, jnp.log(left))
    # Where nothing is taken away, the scores are exactly those of a draw without a residual.
    untouched = ~residual.dense & (residual.excluded < 0)
    return jnp.argmax(jnp.where(untouched[:, None], tempered, adjusted) + noise, axis=1).astype(jnp.int32)


def gumbel_best(
    logits: jax.Array,
    rows: jax.Array | None,
    temperature: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    likely: jax.Array,
    residual: Residual | None,
    cuts: jax.Array | None,
    first_column: jax.Array,
) -> Drawn:
    del wanted, likely  # All rows cost the same here.

    def best(scores: jax.Array) -> Best:
        return Best(jnp.argmax(scores, axis=1).astype(jnp.int32), scores.max(axis=1))

    V = logits.shape[1]
    tempered = _of_draws(logits, rows, cuts) / temperature[:, None]
    noise = gumbel(keys, V, first_column)
    if residual is None:
        return Drawn(best(tempered + noise), None)
    drawn = jnp.where(jnp.arange(V) == residual.excluded[:, None], -jnp.inf, tempered + noise)
    left = jnp.maximum(jnp.exp(tempered - residual.log_z[:, None]) - residual.q(temperature), 0.0)
    return Drawn(best(drawn), best(jnp.log(left) + noise))


def border_of(bounds: Bounds, tempered_max: jax.Array) -> jax.Array:
    """The least logit / temperature that min_p keeps, from the largest one; -inf where it keeps all."""
    border = tempered_max + bounds.log_min_p
    # -0.0 is no less than 0.0. A border that is NaN drops nothing.
    return jnp.where(border > -jnp.inf, jnp.where(border == 0, jnp.float32(-0.0), border), jnp.float32(-jnp.inf))


def cutoffs(logits: jax.Array, bounds: Bounds) -> jax.Array:
    """Bisection over the bits of keys: a pass a bit and rule, and one for what equals the least that is kept."""
    logits = logits.astype(jnp.float32)

    def wide(values: jax.Array) -> jax.Array:
        return values[:, None]

    tempered = ordered(logits / wide(bounds.temperature))
    relative = probability(logits, wide(bounds.highest), wide(bounds.temperature))
    weights = weight(relative, wide(bounds.scale))
    # Once, and in memory: or XLA would compute them again in every pass, and could round them otherwise.
    keys, tempered, relative, weights = lax.optimization_barrier((ordered(logits), tempered, relative, weights))

    def least(kept: jax.Array, values: jax.Array, most: float) -> jax.Array:
        return jnp.where(kept, values, most).min(axis=1)

    greatest = 2**31 - 1
    border = border_of(bounds, float_of(tempered.max(axis=1)))
    first = least(tempered >= wide(ordered(border)), keys, greatest)

    def counted(key: jax.Array) -> jax.Array:
        return (keys >= wide(key)).sum(axis=1, dtype=jnp.int32)

    found = _greatest_with(lambda key: counted(key) >= bounds.top_k, first)
    same = tempered >= wide(least(keys >= wide(found), tempered, greatest))
    least_k = jnp.where(bounds.top_k > 0, least(same, keys, greatest), first)

    def weighed(key: jax.Array) -> jax.Array:
        total = jnp.where(keys >= wide(key), weights, 0).sum(axis=1, dtype=jnp.int32)
        return total.astype(jnp.uint32).astype(jnp.float32)

    target = bounds.top_p * weighed(least_k)
    found = _greatest_with(lambda key: weighed(key) >= target, least_k)
    same = (keys >= wide(least_k)) & (relative >= wide(least(keys >= wide(found), relative, jnp.inf)))
    return jnp.where(bounds.top_p < 1, least(same, keys, greatest), least_k)


def _greatest_with(enough: Callable[[jax.Array], jax.Array], first: jax.Array) -> jax.Array:
    """The greatest key int32 [R] that is enough, or `first` if that is greater."""

    def key_of(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits ^ jnp.uint32(1 << 31), jnp.int32)

    def decide(i: Any, bits: jax.Array) -> jax.Array:
        candidate = bits | (jnp.uint32(1 << 31) >> jnp.uint32(i))
        return jnp.where(enough(key_of(candidate)), candidate, bits)

    return jnp.maximum(first, key_of(repeated(32, decide, jnp.zeros(first.shape, jnp.uint32))))


def likeliest(logits: jax.Array, count: int, wanted: jax.Array) -> Likeliest:
    """Selection without a sort, which would keep a decode step from being one CUDA graph.

    The logits are read once for the maxima of blocks; each round then reads these and the one block that holds the
    winner. A block's ids are taken in the order (value falling, column rising), so its last winner tells which are left.
    """
    del wanted  # All rows cost the same here.
    logits = logits.astype(jnp.float32)
    R, V = logits.shape
    num_blocks = -(-V // BLOCK)
    padded = jnp.pad(logits, ((0, 0), (0, num_blocks * BLOCK - V)), constant_values=-jnp.inf)
    blocks = padded.reshape(R, num_blocks, BLOCK)
    block_ids, columns, places = jnp.arange(num_blocks), jnp.arange(BLOCK), jnp.arange(count)

    def select(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, last_value, last_column, ids, values = carry
        winner = jnp.argmax(best, axis=1)[:, None]
        block = jnp.take_along_axis(blocks, winner[..., None], axis=1)[:, 0]
        before = jnp.take_along_axis(last_value, winner, axis=1)
        free = (block < before) | ((block == before) & (columns > jnp.take_along_axis(last_column, winner, axis=1)))
        column = jnp.argmax(jnp.where(free, block, -jnp.inf), axis=1)[:, None].astype(jnp.int32)
        value = jnp.take_along_axis(block, column, axis=1)
        rest = jnp.where(free & (columns != column), block, -jnp.inf).max(axis=1, keepdims=True)
        here = block_ids == winner
        return (
            jnp.where(here, rest, best),
            jnp.where(here, value, last_value),
            jnp.where(here, column, last_column),
            jnp.where(places == i, winner.astype(jnp.int32) * BLOCK + column, ids),
            jnp.where(places == i, value, values),
        )

    carry = (
        blocks.max(axis=2),  # of the ids that are left
        jnp.full((R, num_blocks), jnp.inf),
        jnp.full((R, num_blocks), -1, jnp.int32),
        jnp.zeros((R, count), jnp.int32),
        jnp.zeros((R, count)),
    )
    *_, ids, values = repeated(count, select, carry)
    return Likeliest(ids, values)
