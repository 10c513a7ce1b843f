"""Logits and draws for the tests of the sampling kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sampling.keys import LEAST_KEY, ordered
from pallas_kernels.sampling.reference import Best, Drawn, Residual


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
    logits, *rest, residual = case
    if residual is not None:
        excluded = residual.excluded - first
        excluded = jnp.where((excluded >= 0) & (excluded < size), excluded, size)
        residual = residual._replace(excluded=excluded, log_q=residual.log_q[:, first : first + size])
    return (logits[:, first : first + size], *rest, residual)


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


def draws(V: int, dtype, *, residual: bool) -> tuple:
    """Arguments of `gumbel_argmax`: of six draws from three rows, one that is not wanted.

    With residuals: p - q, p - q where both are equal, p without an id, and p.
    """
    rng = np.random.default_rng(1)
    logits = logits_of(6, V, dtype)[:3]
    rows = jnp.asarray([2, 0, 1, 1, 0, 2], jnp.int32)
    temperature = jnp.asarray([1.0, 0.7, 1.3, 1.0, 1.0, 0.5], jnp.float32)
    keys = jnp.asarray(rng.integers(0, 2**32, (6, 2), np.uint32))
    wanted = jnp.asarray([True, True, True, False, True, True])
    args = (logits, rows, temperature, keys, wanted)
    if not residual:
        return (*args, None)
    tempered = logits[rows].astype(jnp.float32) / temperature[:, None]
    log_q = jax.nn.log_softmax(jnp.asarray(3 * rng.normal(size=(4, V)), jnp.float32), axis=1)
    # The q of the second draw, so close to its p that p - q is 0.
    log_q = log_q.at[3].set(jax.nn.log_softmax(tempered[1]) + 1e-4)
    return (*args, Residual(
        log_z=jax.nn.logsumexp(tempered, axis=1),
        excluded=jnp.asarray([-1, -1, 7, 3, V // 3, -1], jnp.int32),
        dense=jnp.asarray([True, True, False, True, False, False]),
        log_q=log_q,
        q_rows=jnp.asarray([2, 3, 0, 1, 1, 2], jnp.int32),
    ))  # fmt: skip
