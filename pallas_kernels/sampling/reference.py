"""What a sampler needs of logits, in plain XLA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LogitsStats(NamedTuple):
    """Of each row of logits.

    Attributes:
        argmax: int32 [R], the lowest of equals; some id where there is a NaN.
        log_z: float32 [R] log-sum-exp.
        log_z_tempered: the same of logits / temperature.
        finite: bool [R].
    """

    argmax: jax.Array
    log_z: jax.Array
    log_z_tempered: jax.Array
    finite: jax.Array


class Residual(NamedTuple):
    """Turns p into what Leviathan et al. (arXiv 2211.17192, algorithm 1) draw from where a draft was rejected.

    Attributes:
        log_z: float32 [R] log-sum-exp of a row's logits / temperature.
        excluded: int32 [R] an id that is not drawn: p without a point mass. -1 for none.
        dense: bool [R]: max(0, p - q) instead, or p itself where nothing of it is left.
        log_q: float32 [Q, V]; q_rows int32 [R]: the row of it that is a row's q.
    """

    log_z: jax.Array
    excluded: jax.Array
    dense: jax.Array
    log_q: jax.Array
    q_rows: jax.Array


def logits_stats(logits: jax.Array, temperature: jax.Array) -> LogitsStats:
    logits = logits.astype(jnp.float32)
    return LogitsStats(
        jnp.argmax(logits, axis=1).astype(jnp.int32),
        jax.nn.logsumexp(logits, axis=1),
        jax.nn.logsumexp(logits / temperature[:, None], axis=1),
        jnp.isfinite(logits).all(axis=1),
    )


def gumbel(keys: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise float32 [R, size] of threefry keys uint32 [R, 2]."""

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.wrap_key_data(key, impl="threefry2x32"), (size,), jnp.float32)

    return jax.vmap(draw)(keys)


def gumbel_argmax(
    logits: jax.Array,
    rows: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    residual: Residual | None = None,
) -> jax.Array:
    del wanted  # All rows cost the same here.
    V = logits.shape[1]
    tempered = logits[rows].astype(jnp.float32) / temperature[:, None]
    noise = gumbel(keys, V)
    if residual is None:
        return jnp.argmax(tempered + noise, axis=1).astype(jnp.int32)
    log_p = tempered - residual.log_z[:, None]
    p = jnp.exp(log_p)
    point = (jnp.arange(V) == residual.excluded[:, None]).astype(jnp.float32)
    q = jnp.where(residual.dense[:, None], jnp.exp(residual.log_q[residual.q_rows]), point)
    left = jnp.maximum(p - q, 0.0)
    # p and q may agree up to rounding; then nothing is left and p itself is right.
    none_left = left.sum(axis=1, keepdims=True) == 0
    return jnp.argmax(jnp.where(none_left, log_p, jnp.log(left)) + noise, axis=1).astype(jnp.int32)
