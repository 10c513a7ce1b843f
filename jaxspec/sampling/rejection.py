"""Speculative verification: which drafts of a window are accepted and what follows them, as the target is distributed.

Greedy rows take the target's argmax until it differs from the draft. Random rows follow Leviathan et al. (arXiv
2211.17192, algorithm 1) and Chen et al. (arXiv 2302.01318): draft x ~ q is accepted with probability min(1, p(x)/q(x));
at the first rejection the token is drawn from max(0, p - q), renormalised; after k acceptances a bonus token is drawn
from p. p is after all of the request's transforms at that position; q is exactly what the draft was drawn from.

Random rows of requests that bring a seed follow Daliri et al. (arXiv 2408.07978, drafter-invariant speculative decoding by
Gumbel coupling): draft and target draw with the same noise, that of plain sampling at the position, and a draft is
accepted where it equals the target's own draw. Every token is then the target's draw, as without a draft.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.sampling.columns import Columns
from jaxspec.sampling.sampler import SamplingRows, Stream, cuts_of, noise_keys, temperatures, uniform
from jaxspec.sampling.target import TargetLogits
from pallas_kernels.sampling.api import LogitsStats, Residual
from pallas_kernels.sampling.keys import LEAST_KEY, ordered


class Verified(NamedTuple):
    """ids int32 [D, k + 1], of which the first accepted + 1 are emitted, the rest ignored; accepted int32 [D]."""

    ids: jax.Array
    accepted: jax.Array


class DraftLogits(NamedTuple):
    """What windows of at least k drafts were drawn from, at the temperature of each window's request.

    Attributes:
        logits: [X, at least k, V] of the draft.
        log_z: float32 [X, at least k] log-sum-exp of logits / temperature, as `sample_draft` gives it.
    """

    logits: jax.Array
    log_z: jax.Array


def log_probability(logits: jax.Array, temperature: jax.Array | float, log_z: jax.Array) -> jax.Array:
    """Of a tempered draw, float32, from arrays that broadcast; see `DraftLogits`."""
    return logits.astype(jnp.float32) / temperature - log_z


def sample_draft(
    logits: jax.Array, rows: SamplingRows, positions: jax.Array, columns: Columns | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draft ids int32 [R] from a draft's logits [R, V] at the request's temperature, and the log_z float32 [R] of q.

    Greedy rows, and those with `greedy_drafts`, draft the argmax; their q must not be used. Of the request's
    transforms a draft has only the temperature: any q is lossless as long as it is the true one. Seeded rows draw with
    the noise that the target will draw with.

    Args:
        positions: int32 [R] absolute position of the drafted token.
        columns: which columns the logits have (default: all).
    """
    columns = columns or Columns(logits.shape[1])
    temperature = temperatures(rows)
    greedy = (rows.temperature == 0) | rows.greedy_drafts
    streams = jnp.where(rows.seeded, int(Stream.BONUS), int(Stream.DRAFT))
    keys = noise_keys(rows.seeds, positions, streams)
    stats, drawn = columns.stats_and_draw(logits, temperature, keys, ~greedy)
    return jnp.where(greedy, stats.argmax, drawn), stats.log_z_tempered


def verify(
    logits: jax.Array | TargetLogits,
    drafts: jax.Array,
    q: DraftLogits | None,
    one_hot: jax.Array,
    num_drafts: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    *,
    full: bool,
    synthetic_length: float | None = None,
    accept_probability: jax.Array | None = None,
    q_rows: jax.Array | None = None,
    stats: LogitsStats | None = None,
    columns: Columns | None = None,
) -> Verified:
    """Verifies D windows of k drafts each.

    Args:
        logits: [D, k + 1, V] of the target, after the request's rules, or their rows [D * (k + 1), V]; row i of a window
            verifies draft i, the last one is for the bonus.
        drafts: int32 [D, k].
        q: what the drafts were drawn from, at the temperatures of `rows`; None where all are a point mass.
        one_hot: bool [D]: the drafts are a point mass (drafted greedily, or given); q is not read.
        num_drafts: int32 [D], 0 to k: how many of a window's drafts may be accepted.
        rows: the requests' parameters, [D].
        positions: int32 [D] absolute position of the first token to choose.
        full: also apply min_p, top_k and top_p (static).
        synthetic_length: see `accept_synthetically` (static); the token after the drafts is the target's own.
        accept_probability: float32 [D], with a synthetic length: see `accept_one_by_one`, which then decides.
        q_rows: int32 [D] each window's row of q (default: window i has row i).
        stats: of the logits, [D * (k + 1)], at the `temperatures` of their requests, if they are known already.
        columns: which columns all logits have (default: all).
    """
    D, k = drafts.shape
    n = k + 1
    target = logits if isinstance(logits, TargetLogits) else TargetLogits.of(logits.reshape(D * n, -1))
    V = target.raw.shape[1]
    columns = columns or Columns(V)
    if q is None:  # one row that nobody reads
        q = DraftLogits(jnp.zeros((1, max(k, 1), V), target.raw.dtype), jnp.zeros((1, max(k, 1))))
        one_hot, q_rows = jnp.ones(D, bool), jnp.zeros(D, jnp.int32)
    q_rows = jnp.arange(D) if q_rows is None else q_rows
    window_rows = jax.tree.map(lambda a: jnp.repeat(a, n, axis=0), rows)
    temperature_W = temperatures(window_rows)
    stats = stats or target.stats(temperature_W, None, columns)
    # Nothing is chosen past the drafts that a window has.
    live_Dn = jnp.arange(n) <= num_drafts[:, None]
    cuts_W, log_z_W = None, stats.log_z_tempered
    if full:
        cuts_W = cuts_of(target, window_rows, stats, live_Dn.reshape(-1), columns)
        kept = target.stats(temperature_W, cuts_W, columns)
        log_z_W = jnp.where(cuts_W > LEAST_KEY, kept.log_z_tempered, log_z_W)
    best_Dn, log_z_Dn = stats.argmax.reshape(D, n), log_z_W.reshape(D, n)
    temperature_D = temperature_W[::n]

    greedy_D = rows.temperature == 0
    index_k = jnp.arange(k, dtype=jnp.int32)
    q_log_z_Dk = q.log_z[q_rows, :k]
    x_Dk, q_logits_Dk = columns.pick(
        lambda at_Dk: (
            target.at(jnp.pad(at_Dk, ((0, 0), (0, 1))).reshape(D * n, 1)).reshape(D, n)[:, :k],
            q.logits[q_rows[:, None], index_k, at_Dk].astype(jnp.float32),
        ),
        drafts,
    )
    if cuts_W is not None:
        x_Dk = jnp.where(ordered(x_Dk) >= cuts_W.reshape(D, n)[:, :k], x_Dk, -jnp.inf)
    log_p_x = x_Dk / temperature_D[:, None] - log_z_Dn[:, :k]
    log_q_Dk = log_probability(q_logits_Dk, temperature_D[:, None], q_log_z_Dk)
    log_q_x = jnp.where(one_hot[:, None], 0.0, log_q_Dk)
    u = uniform(
        jnp.repeat(rows.seeds, k, axis=0), (positions[:, None] + index_k).reshape(D * k), Stream.ACCEPT
    ).reshape(D, k)
    # Never where p or q is 0, not even for u = 0: each of the three logarithms may be -inf.
    random_ok = (jnp.log(u) + log_q_x < log_p_x) & (log_q_x > -jnp.inf)
    greedy_ok = drafts == best_Dn[:, :k]
    ok = jnp.where(greedy_D[:, None], greedy_ok, random_ok) & (index_k < num_drafts[:, None])
    accepted_D = jnp.cumprod(ok, axis=1).sum(axis=1, dtype=jnp.int32)

    # One more token: a bonus after the last draft, else the replacement of the first rejected one.
    is_bonus_D = accepted_D == num_drafts
    synthetic_D = None
    if synthetic_length is not None:
        if accept_probability is None:
            synthetic_D = accept_synthetically(num_drafts, rows, positions, synthetic_length)
        else:
            synthetic_D = accept_one_by_one(num_drafts, u, accept_probability)
        accepted_D = synthetic_D
        is_bonus_D = jnp.ones(D, bool)

    # A seeded row draws at each position of its window. Others draw one token, in the place of the first position.
    coupled_D = rows.seeded & ~greedy_D
    source_Dn = jnp.where(coupled_D[:, None], jnp.arange(n, dtype=jnp.int32), accepted_D[:, None])
    single_D = ~(coupled_D | greedy_D)
    residual = None
    if k:
        refused_D = jnp.minimum(accepted_D, k - 1)
        rejects_D = single_D & ~is_bonus_D
        residual = Residual(
            log_z=jnp.repeat(_at(log_z_Dn, accepted_D), n),
            excluded=jnp.repeat(jnp.where(one_hot & rejects_D, _at(drafts, refused_D), -1), n),
            dense=jnp.repeat(~one_hot & rejects_D, n),
            q_logits=q.logits.reshape(-1, V),
            q_log_z=jnp.repeat(_at(q_log_z_Dk, refused_D), n),
            q_rows=jnp.repeat((q_rows * q.logits.shape[1] + refused_D).astype(jnp.int32), n),
        )
    streams_D = jnp.where(coupled_D | is_bonus_D, int(Stream.BONUS), int(Stream.RECOVER))
    keys = noise_keys(
        jnp.repeat(rows.seeds, n, axis=0), (positions[:, None] + source_Dn).reshape(-1), jnp.repeat(streams_D, n)
    )
    wanted_Dn = (coupled_D[:, None] & live_Dn) | (single_D[:, None] & (jnp.arange(n) == 0))
    row_Dn = jnp.arange(D, dtype=jnp.int32)[:, None] * n + source_Dn
    drawn_Dn = target.draw(
        row_Dn.reshape(-1), temperature_W, keys, wanted_Dn.reshape(-1), stats.argmax, residual, cuts_W, columns
    ).reshape(D, n)
    if synthetic_D is None:
        equal = (drafts == drawn_Dn[:, :k]) & (index_k < num_drafts[:, None])
        coupled_accepted_D = jnp.cumprod(equal, axis=1).sum(axis=1, dtype=jnp.int32)
        accepted_D = jnp.where(coupled_D, coupled_accepted_D, accepted_D)
    drawn_D = jnp.where(coupled_D, _at(drawn_Dn, accepted_D), drawn_Dn[:, 0])
    last_D = jnp.where(greedy_D, _at(best_Dn, accepted_D), drawn_D)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    return Verified(jnp.where(jnp.arange(n) == accepted_D[:, None], last_D[:, None], padded), accepted_D)


def accept_synthetically(
    num_drafts: jax.Array, rows: SamplingRows, positions: jax.Array, mean_length: float
) -> jax.Array:
    """How many drafts each window accepts, int32 [D], drawn at random instead of verified; for benchmarks.

    On average m = mean_length - 1: the first floor(m) drafts are accepted in every window, the next one in a fraction
    m - floor(m) of them, drawn from the row's own randomness. Unconditional acceptance by position is therefore
    1, ..., 1, m - floor(m), 0, ..., 0. Arguments as in `verify`.
    """
    certain, part = divmod(mean_length - 1, 1)
    one_more_D = uniform(rows.seeds, positions, Stream.ACCEPT) < part
    return jnp.minimum(int(certain) + one_more_D.astype(jnp.int32), num_drafts)


def accept_one_by_one(num_drafts: jax.Array, u: jax.Array, probability: jax.Array) -> jax.Array:
    """The same with one probability: each draft is accepted with `probability` float32 [D] if those before it are.

    With k drafts a window yields 1 + p + p^2 + ... + p^k tokens on average.

    Args:
        u: [D, k] uniform in [0, 1).
    """
    ok = (u < probability[:, None]) & (jnp.arange(u.shape[1]) < num_drafts[:, None])
    return jnp.cumprod(ok, axis=1).sum(axis=1, dtype=jnp.int32)


def _at(values_Dn: jax.Array, index_D: jax.Array) -> jax.Array:
    """values [D, n] at each row's index -> [D]."""
    return jnp.take_along_axis(values_Dn, index_D[:, None], axis=1)[:, 0]
