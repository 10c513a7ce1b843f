"""The gated delta rule in plain XLA (arXiv 2412.06464, equation 10; by channel of a key: arXiv 2510.26692).

A head's state S [dv, dk] maps keys to values. A token first lets it fade, then corrects what it holds under its key:

    S <- S exp(g);  S <- S + (beta (v - S k)) k^T;  o = S q

Either a whole state fades alike, or each channel of its keys by itself. Everything is float32. Shapes: K key heads, R value
heads for each, dk and dv columns of a key and a value, and c numbers that say how much of a state fades: 1 or dk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """What the rule reads of tokens [...]; `q` and `k` are of unit length, `q` times dk^-0.5.

    A token with g, beta, k and v of 0 changes no state.

    Attributes:
        q, k: [..., K, dk].
        v: [..., K, R, dv].
        g: [..., K, R, c] logarithm of what remains of the state, at most 0.
        beta: [..., K, R] how much of the correction is made.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def recurrent(state: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Token after token, for the few of a decode window: [D, n, ...] from states [D, K, R, dv, dk].

    It is unrolled: a loop would end the device's graph. Sums are written so that a token's result has the same bits in
    any window, and whether it is new or repeated.

    Returns:
        What the tokens read, [D, n, K, R, dv], and the states after them.
    """
    read = []
    for i in range(tokens.q.shape[1]):
        q, k, v, g, beta = (x[:, i] for x in tokens)
        state = state * jnp.exp(g)[..., None, :]
        k = k[:, :, None, None, :]
        held = jnp.sum(state * k, axis=-1)
        state = state + ((v - held) * beta[..., None])[..., None] * k
        read.append(jnp.sum(state * q[:, :, None, None, :], axis=-1))
    return jnp.stack(read, axis=1), state


def replay_and_read(
    states: jax.Array, slots: jax.Array, counts: jax.Array, tokens: Tokens, *, replayed: int
) -> tuple[jax.Array, jax.Array]:
    """See api.py."""
    past, window = (Tokens(*(x[:, part] for x in tokens)) for part in (slice(replayed), slice(replayed, None)))
    kept_Dn = jnp.arange(replayed) < counts[:, None]
    past = Tokens(*(jnp.where(kept_Dn.reshape(*kept_Dn.shape, *[1] * (x.ndim - 2)), x, 0) for x in past))
    state_D = states[slots, 0]
    if replayed:
        _, state_D = recurrent(state_D, past)
    read, _ = recurrent(state_D, window)
    # Padding rows write nowhere: their slot stays as it is.
    return read, states.at[jnp.where(slots > 0, slots, states.shape[0]), 0].set(state_D, mode="drop")
