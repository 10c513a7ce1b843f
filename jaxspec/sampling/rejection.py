"""Speculative verification: what a window of drafted tokens becomes, without changing the target's distribution.

Greedy rows take the target's argmax until it differs from the draft. Random rows follow Leviathan et al. (arXiv
2211.17192, algorithm 1) and Chen et al. (arXiv 2302.01318): draft x ~ q is accepted with probability min(1, p(x)/q(x));
at the first rejection the token is drawn from max(0, p - q), renormalised; after k acceptances a bonus token is drawn
from p. p carries every transform of the request at its own position; q is exactly what the draft was drawn from.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.sampling.sampler import SamplingRows, Stream, gumbel, transform, uniform


class Verified(NamedTuple):
    """ids int32 [D, k + 1], of which the first accepted + 1 are emitted and the rest stale; accepted int32 [D]."""

    ids: jax.Array
    accepted: jax.Array


def sample_draft(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draft ids int32 [R] and log q float32 [R, V] from a draft's logits [R, V], at the request's temperature.

    Greedy rows, and those with `greedy_drafts`, draft their argmax: their log q is not to be looked at. All transforms
    but the temperature are the target's alone: any q is lossless as long as it is the true one.

    Args:
        positions: int32 [R] absolute position of the drafted token.
    """
    scaled = logits / jnp.where(rows.temperature == 0, 1.0, rows.temperature)[:, None]
    streams = jnp.full(positions.shape, int(Stream.DRAFT), jnp.int32)
    noisy = scaled + gumbel(rows.seeds, positions, streams, logits.shape[1])
    greedy = (rows.temperature == 0) | rows.greedy_drafts
    chosen = jnp.where(greedy[:, None], logits, noisy)
    return jnp.argmax(chosen, axis=1).astype(jnp.int32), jax.nn.log_softmax(scaled, axis=1)


def verify(
    logits: jax.Array,
    drafts: jax.Array,
    log_q: jax.Array,
    one_hot: jax.Array,
    num_drafts: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    *,
    full: bool,
    synthetic_length: float | None = None,
) -> Verified:
    """Verifies D windows of k drafts each.

    Args:
        logits: float32 [D, k + 1, V] of the target, after the request's rules; row i decides about draft i, the last one
            is for the bonus.
        drafts: int32 [D, k].
        log_q: float32 [D, k, V] of the distributions that the drafts were drawn from.
        one_hot: bool [D]: the drafts are a point mass (drafted greedily, or given); log_q is not looked at.
        num_drafts: int32 [D], 0 to k: drafts from there on do not count.
        rows: the requests' parameters, [D].
        positions: int32 [D] absolute position of the first token to choose.
        full: also apply min_p, top_k and top_p (static).
        synthetic_length: see `accept_synthetically` (static); the token behind the drafts is the target's own.
    """
    D, n, V = logits.shape
    k = n - 1
    window_rows = jax.tree.map(lambda a: jnp.repeat(a, n, axis=0), rows)
    transformed = transform(logits.reshape(D * n, V), window_rows, full=full)
    log_p_DnV = jax.nn.log_softmax(transformed, axis=1).reshape(D, n, V)

    greedy_D = rows.temperature == 0
    index_k = jnp.arange(k, dtype=jnp.int32)
    log_p_x = jnp.take_along_axis(log_p_DnV[:, :k], drafts[..., None], axis=2)[..., 0]
    log_q_x = jnp.take_along_axis(log_q, drafts[..., None], axis=2)[..., 0]
    log_q_x = jnp.where(one_hot[:, None], 0.0, log_q_x)
    u = uniform(
        jnp.repeat(rows.seeds, k, axis=0), (positions[:, None] + index_k).reshape(D * k), Stream.ACCEPT
    ).reshape(D, k)
    # Strictly below, and never where q or p is zero: u may be exactly 0, whose log is -inf like theirs.
    random_ok = (jnp.log(u) + log_q_x < log_p_x) & (log_q_x > -jnp.inf)
    greedy_ok = drafts == jnp.argmax(logits[:, :k], axis=2)
    ok = jnp.where(greedy_D[:, None], greedy_ok, random_ok) & (index_k < num_drafts[:, None])
    accepted_D = jnp.cumprod(ok, axis=1).sum(axis=1, dtype=jnp.int32)

    # One more token: a bonus after the last draft, else the replacement of the first rejected one.
    is_bonus_D = accepted_D == num_drafts
    if synthetic_length is not None:
        accepted_D = accept_synthetically(num_drafts, rows, positions, synthetic_length)
        is_bonus_D = jnp.ones(D, bool)
    p_DV = jnp.exp(_row(log_p_DnV, accepted_D))
    refused_D = jnp.minimum(accepted_D, max(k - 1, 0))
    if k:
        refused_id = jnp.take_along_axis(drafts, refused_D[:, None], axis=1)
        point_DV = (jnp.arange(V) == refused_id).astype(jnp.float32)
        q_DV = jnp.where(one_hot[:, None], point_DV, jnp.exp(_row(log_q, refused_D)))
        residual_DV = jnp.maximum(p_DV - q_DV, 0.0)
        # p and q may agree up to rounding; then nothing is left and p itself is right.
        nothing_left = residual_DV.sum(axis=1, keepdims=True) == 0
        weights_DV = jnp.where(is_bonus_D[:, None] | nothing_left, p_DV, residual_DV)
    else:
        weights_DV = p_DV
    streams_D = jnp.where(is_bonus_D, int(Stream.BONUS), int(Stream.RECOVER))
    noisy_DV = jnp.log(weights_DV) + gumbel(rows.seeds, positions + accepted_D, streams_D, V)
    chosen_DV = jnp.where(greedy_D[:, None], _row(logits, accepted_D), noisy_DV)
    last_D = jnp.argmax(chosen_DV, axis=1).astype(jnp.int32)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    return Verified(jnp.where(jnp.arange(n) == accepted_D[:, None], last_D[:, None], padded), accepted_D)


def accept_synthetically(
    num_drafts: jax.Array, rows: SamplingRows, positions: jax.Array, mean_length: float
) -> jax.Array:
    """How many drafts each window accepts, int32 [D], whatever the target says: for benchmarks. Arguments as in `verify`.

    Of m = mean_length - 1 drafts on average, the first floor(m) are accepted in every window and the next one in a part
    m - floor(m) of the windows, drawn from the row's own randomness. Unconditional acceptance by position is therefore
    1, ..., 1, m - floor(m), 0, ..., 0.
    """
    certain, part = divmod(mean_length - 1, 1)
    one_more_D = uniform(rows.seeds, positions, Stream.ACCEPT) < part
    return jnp.minimum(int(certain) + one_more_D.astype(jnp.int32), num_drafts)


def _row(values_DnV: jax.Array, index_D: jax.Array) -> jax.Array:
    """values [D, n, V] at each row's index -> [D, V]."""
    return jnp.take_along_axis(values_DnV, index_D[:, None, None], axis=1)[:, 0]
