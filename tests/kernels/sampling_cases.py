"""Logits and draws for the tests of the sampling kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sampling.keys import LEAST_KEY, ordered
from pallas_kernels.sampling.reference import Residual


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
