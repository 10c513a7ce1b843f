"""Random calls of gated_delta, and the rule by its definition, in float64."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta.reference import Tokens
from pallas_kernels.gated_delta.shapes import Heads


class Call(NamedTuple):
    states: jax.Array
    slots: jax.Array
    counts: jax.Array
    tokens: Tokens


class Prompts(NamedTuple):
    states: jax.Array
    tokens: Tokens
    rows: jax.Array
    lengths: jax.Array


def random_tokens(rng: np.random.Generator, heads: Heads, *leading: int) -> Tokens:
    K, R, dk, dv, fades = heads
    q, k = (rng.standard_normal((*leading, K, dk)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((*leading, K, R, dv))
    g, beta = -rng.exponential(1, (*leading, K, R, fades)), rng.uniform(0, 1, (*leading, K, R))
    return Tokens(*(jnp.asarray(x, jnp.float32) for x in (q * dk**-0.5, k, v, g, beta)))


def random_call(heads: Heads, rows: int, n: int, *, replayed: int) -> Call:
    """Each row in a slot of its own, the second one padding. What is not to be read is NaN: other slots, rejected tokens."""
    rng = np.random.default_rng(rows + n)
    K, R, dk, dv, _ = heads
    slots = 1 + rng.permutation(rows + 2)[:rows].astype(np.int32)
    slots[1:2] = 0
    states = np.full((rows + 3, 1, K, R, dv, dk), np.nan, np.float32)
    states[slots] = rng.standard_normal(states[slots].shape)
    states[0] = 0
    counts = rng.permutation(np.arange(rows, dtype=np.int32) % (replayed + 1))
    tokens = random_tokens(rng, heads, rows, replayed + n)
    rejected = np.arange(replayed + n) >= np.where(np.arange(replayed + n) < replayed, counts[:, None], replayed + n)
    tokens = Tokens(*(jnp.where(rejected.reshape(*rejected.shape, *[1] * (x.ndim - 2)), jnp.nan, x) for x in tokens))
    return Call(jnp.asarray(states), jnp.asarray(slots), jnp.asarray(counts), tokens)


def by_definition(call: Call, replayed: int) -> tuple[np.ndarray, np.ndarray]:
    """What the new tokens read and the states after it, row by row, token by token, head by head."""
    states = np.asarray(call.states, np.float64).copy()
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in call.tokens)
    D, length, K, R, dv = v.shape
    read = np.zeros((D, length - replayed, K, R, dv))
    for row, (slot, count) in enumerate(zip(call.slots.tolist(), call.counts.tolist(), strict=True)):
        for head in np.ndindex(K, R):
            state = states[slot, 0][head].copy()
            for i in (*range(count), *range(replayed, length)):
                if i == replayed and slot:
                    states[slot, 0][head] = state
                state = state * np.exp(g[row, i][head])
                key = k[row, i, head[0]]
                state = state + beta[row, i][head] * np.outer(v[row, i][head] - state @ key, key)
                if i >= replayed:
                    read[row, i - replayed][head] = state @ q[row, i, head[0]]
    return read, states


def random_prompts(heads: Heads, lengths: tuple[int, ...], padding: int) -> Prompts:
    """Rows of such lengths, whose states outlast chunks. NaN are padding tokens, and states of rows without tokens."""
    rng, E = np.random.default_rng(sum(lengths) + padding), len(lengths)
    K, R, dk, dv, _ = heads
    rows = np.repeat(np.arange(E + 1, dtype=np.int32), [*lengths, padding])
    tokens = random_tokens(rng, heads, len(rows))
    tokens = tokens._replace(g=tokens.g / 64)
    tokens = Tokens(*(jnp.where((rows < E).reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan) for x in tokens))
    states = rng.standard_normal((E, K, R, dv, dk)).astype(np.float32)
    states[np.array(lengths) == 0] = np.nan
    return Prompts(jnp.asarray(states), tokens, jnp.asarray(rows), jnp.asarray(lengths, jnp.int32))


def prompts_by_definition(prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
    """What the tokens read, padding 0, and the states after them, token by token."""
    states = np.asarray(prompts.states, np.float64).copy()
    tokens = Tokens(*(np.asarray(x, np.float64) for x in prompts.tokens))
    read = np.zeros(tokens.v.shape)
    for i, row in enumerate(prompts.rows.tolist()):
        if row < len(states):
            q, k, v, g, beta = (x[i] for x in tokens)
            state = states[row] * np.exp(g)[..., None, :]
            update = beta[..., None] * (v - np.einsum("krvd,kd->krv", state, k))
            states[row] = state + np.einsum("krv,kd->krvd", update, k)
            read[i] = np.einsum("krvd,kd->krv", states[row], q)
    return read, states
