"""Logits and draws for the tests of the sampling kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sampling.keys import LEAST_KEY, ordered
from pallas_kernels.sampling.reference import Best, Drawn, Residual, gumbel, kept


def logits_of(R: int, V: int, dtype) -> jax.Array:
    """Random rows: one with its two largest values equal, one with -inf, then one with NaN and one with infinity."""
    logits = 3 * np.random.default_rng(R).normal(size=(R, V)).astype(np.float32)
    logits[0, [V // 3, V - 1]] = 20
    logits[3, : V // 2] = -np.inf
    logits[4, V - 2], logits[5, 5] = np.nan, np.inf
    return jnp.asarray(logits, dtype)


def temperatures_of(R: int) -> jax.Array:
    return jnp.asarray(np.resize([1.0, 0.7, 1.3], R), jnp.float32)


def cuts_of(logits: jax.Array) -> jax.Array:
    """One row keeps everything, others its upper half, one its largest only."""
    keys = jnp.sort(ordered(logits.astype(jnp.float32)), axis=1)
    R, V = keys.shape
    return keys[:, V // 2].at[0].set(LEAST_KEY).at[R - 1].set(keys[R - 1, -1])


def part_of(case: tuple, first: int, size: int) -> tuple:
    """Arguments of `gumbel_best` for `size` columns from `first` on, of those that `draws` gives for whole rows."""
    logits, *rest, likely, residual = case
    if residual is not None:
        excluded = residual.excluded - first
        excluded = jnp.where((excluded >= 0) & (excluded < size), excluded, size)
        residual = residual._replace(excluded=excluded, q_logits=residual.q_logits[:, first : first + size])
    return (logits[:, first : first + size], *rest, likely - first, residual)


def joined(parts: list[Drawn], size: int, dense: np.ndarray | None) -> np.ndarray:
    """The draws of rows whose parts of `size` columns put these forward."""

    def best(of: list[Best]) -> tuple[np.ndarray, np.ndarray]:
        scores = np.stack([part.scores for part in of])
        ids = np.stack([np.asarray(part.ids) + i * size for i, part in enumerate(of)])
        winner = scores.argmax(axis=0)[None]
        return np.take_along_axis(ids, winner, axis=0)[0], scores.max(axis=0)

    ids, _ = best([part.whole for part in parts])
    if dense is None:
        return ids
    left, scores = best([part.left for part in parts if part.left])
    return np.where(dense & (scores > -np.inf), left, ids)


def close_draws(V: int, dtype, *, residual: bool) -> tuple:
    """Arguments of `gumbel_argmax` where many columns of a draw are about as good as its best: scores that differ in nothing
    but rounding, or by a part of what a bound gives away, at temperatures that make the noise nothing, or everything.

    Row 8 has NaN and row 9 infinity, row 10 is masked but for two columns, row 11 but for one, row 12 all. In row 13 the
    best is far above the others, so that few columns are looked at. Residuals are p without an id, and p - q in odd rows.
    """
    R, rng = 16, np.random.default_rng(V)
    keys = jnp.asarray(rng.integers(0, 2**32, (R, 2), np.uint32))
    temperature = np.resize(np.float32([1, 1e-6, 1e6, 0.7, 1e-3, 30]), R)
    temperature[[10, 11]] = 1e-25, 1e-30
    same = np.resize([0, 1e3, -40, 2e5], R)[:, None] + rng.choice([0, 0, 1e-6, -1e-6, -1e-3, -0.02, -2], (R, V))
    logits = (temperature[:, None] * (same - np.asarray(gumbel(keys, V)))).astype(np.float32)
    logits[8, V // 2], logits[9, V // 3] = np.nan, np.inf
    logits[10, np.arange(V) % 1500 != 7] = -np.inf
    logits[11, np.arange(V) != V - 3] = -np.inf
    logits[12] = -np.inf
    logits[13, V - 200] += 60 * temperature[13]
    logits = jnp.asarray(logits, dtype)
    rows = jnp.arange(R, dtype=jnp.int32)
    likely = np.nanargmax(logits.astype(jnp.float32), axis=1).astype(np.int32)
    likely[::5] = V - 1 - likely[::5]  # no likely ones
    likely[[6, 7]] = V, -3  # no ids
    args = (logits, rows, jnp.asarray(temperature), keys, jnp.ones(R, bool), jnp.asarray(likely))
    if not residual:
        return (*args, None)
    tempered = logits.astype(jnp.float32) / jnp.asarray(temperature)[:, None]
    # p - q is 0 in all of a row, in half of it, or nowhere.
    log_q = jax.nn.log_softmax(tempered, axis=1) + jnp.asarray(rng.choice([1e-3, -1, 2], (R, V)), jnp.float32)
    log_q = log_q.at[3].set(jax.nn.log_softmax(tempered[3]) + 1e-2)
    q_log_z = rows.astype(jnp.float32) / 4
    return (*args, Residual(
        log_z=jax.nn.logsumexp(tempered, axis=1),
        excluded=jnp.where(rows % 2 == 0, jnp.where(rows % 4 == 0, args[-1], -1), -1),
        dense=rows % 2 == 1,
        q_logits=temperature[:, None] * (log_q + q_log_z[:, None]),
        q_log_z=q_log_z,
        q_rows=rows,
    ))  # fmt: skip


def assert_as_good_as_any(drawn: jax.Array, case: tuple, cuts: jax.Array | None) -> None:
    """The scores of ids drawn by `gumbel_argmax` with the arguments of `close_draws` are the largest, but for rounding."""
    logits, rows, temperature, keys, *_, residual = case
    tempered = kept(logits[rows], None if cuts is None else cuts[rows]) / temperature[:, None]
    scores, V = tempered, logits.shape[1]
    if residual is not None:
        log_p = tempered - residual.log_z[:, None]
        left = jnp.maximum(jnp.exp(log_p) - residual.q(temperature), 0.0)
        dense = jnp.where((left > 0).any(axis=1, keepdims=True), jnp.log(left), log_p)
        others = jnp.where(jnp.arange(V) == residual.excluded[:, None], -jnp.inf, tempered)
        scores = jnp.where(residual.dense[:, None], dense, others)
    scores = np.asarray(scores + gumbel(keys, V))
    best = scores.max(axis=1)
    sound = np.isfinite(best)
    assert sound.sum() >= 12
    # A few roundings of what is added.
    allowed = 2e-5 + 4e-7 * np.where(np.isfinite(tempered), np.abs(tempered), 0).max(axis=1)
    of_drawn = np.take_along_axis(scores, np.asarray(drawn)[:, None], axis=1)[:, 0]
    assert (of_drawn >= best - allowed)[sound].all()


def draws(V: int, dtype, *, residual: bool) -> tuple:
    """Arguments of `gumbel_argmax`: of six draws from three rows, one that is not wanted.

    With residuals: p - q, p - q where both are equal, p without an id, and p.
    """
    rng = np.random.default_rng(2)
    logits = logits_of(6, V, dtype)[:3]
    rows = jnp.asarray([2, 0, 1, 1, 0, 2], jnp.int32)
    temperature = jnp.asarray([1.0, 0.7, 1.3, 1.0, 1.0, 0.5], jnp.float32)
    keys = jnp.asarray(rng.integers(0, 2**32, (6, 2), np.uint32))
    wanted = jnp.asarray([True, True, True, False, True, True])
    # One is the largest, one is not, one is no id.
    likely = jnp.asarray([V // 3, 5, V], jnp.int32)
    args = (logits, rows, temperature, keys, wanted, likely)
    if not residual:
        return (*args, None)
    tempered = logits[rows].astype(jnp.float32) / temperature[:, None]
    # The q of the second draw is its p, but for a sum that is so little less that p - q is 0.
    q_logits = jnp.asarray(3 * rng.normal(size=(4, V)), dtype).at[3].set(logits[rows[1]])
    q_rows = jnp.asarray([2, 3, 0, 1, 1, 2], jnp.int32)
    of_q = jax.nn.logsumexp(q_logits[q_rows].astype(jnp.float32) / temperature[:, None], axis=1)
    return (*args, Residual(
        log_z=jax.nn.logsumexp(tempered, axis=1),
        excluded=jnp.asarray([-1, -1, 7, 3, V // 3, -1], jnp.int32),
        dense=jnp.asarray([True, True, False, True, False, False]),
        q_logits=q_logits,
        q_log_z=of_q.at[1].add(-1e-4),
        q_rows=q_rows,
    ))  # fmt: skip
