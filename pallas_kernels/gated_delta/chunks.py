"""The gated delta rule over the ragged rows of prompts in plain XLA, a chunk of tokens at a time.

Notation and sources: `reference.py`, which goes token by token. What chunks do not need of each other, `matrices`, comes
first, for all at once; then each row is walked over, chunk after chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from pallas_kernels.gated_delta.reference import Tokens

# Tokens of a prompt that are worked on as one matrix.
CHUNK = 64
# A float32 matmul on a GPU may otherwise round its operands to TF32.
_EXACT = lax.Precision.HIGHEST


class Chunks(NamedTuple):
    """How the ragged rows of P tokens, one after the other, lie in N chunks of C: no chunk holds tokens of two rows.

    Attributes:
        rows: int32 [N] the row of each chunk, ascending; E for unused ones.
        tokens: int32 [N, C] which token each place holds; P where none.
        places: int32 [P] where each token lies in N * C; N * C for padding tokens.
    """

    rows: jax.Array
    tokens: jax.Array
    places: jax.Array


class Matrices(NamedTuple):
    """What a chunk does to a state S [dv, dk] before it, float32, and is the same whatever S is:

        update = wanted - stale S^T;  read = queries S^T + reads update;  S <- S remains + update^T keys

    Attributes:
        wanted: [N, K, R, C, dv].
        stale, queries, keys: [N, K, R, C, dk].
        reads: [N, K, R, C, C], lower triangular.
        remains: [N, K, R, c] of a state after the chunk.
    """

    wanted: jax.Array
    stale: jax.Array
    queries: jax.Array
    reads: jax.Array
    keys: jax.Array
    remains: jax.Array


def cut(rows_P: jax.Array, lengths_E: jax.Array) -> Chunks:
    """Chunks of rows with such lengths; `rows_P` int32 is each token's, E for padding."""
    P, E = rows_P.shape[0], lengths_E.shape[0]
    C = min(CHUNK, P)
    N = P // C + E
    ends_E = jnp.cumsum(lengths_E)
    firsts_E = ends_E - lengths_E
    chunk_ends_E = jnp.cumsum(-(-lengths_E // C))
    rows_N = (jnp.arange(N)[:, None] >= chunk_ends_E).sum(axis=1, dtype=jnp.int32)

    def of_row(values_E: jax.Array, rows: jax.Array) -> jax.Array:
        return values_E[jnp.minimum(rows, E - 1)]

    chunk_firsts_E = chunk_ends_E - -(-lengths_E // C)
    within_N = (jnp.arange(N) - of_row(chunk_firsts_E, rows_N)) * C
    within_NC = within_N[:, None] + jnp.arange(C)
    held_NC = (rows_N < E)[:, None] & (within_NC < of_row(lengths_E, rows_N)[:, None])
    tokens_NC = jnp.where(held_NC, of_row(firsts_E, rows_N)[:, None] + within_NC, P)
    offsets_P = jnp.arange(P) - of_row(firsts_E, rows_P)
    places_P = of_row(chunk_firsts_E, rows_P) * C + offsets_P
    return Chunks(rows_N, tokens_NC, jnp.where(rows_P < E, places_P, N * C))


def chunked(states: jax.Array, tokens: Tokens, chunks: Chunks) -> tuple[jax.Array, jax.Array]:
    """See `read_prompts` in api.py."""
    read_NKRCV, states = _walk(states, matrices(tokens, chunks), chunks.rows)
    return of_tokens(read_NKRCV, chunks), states


def matrices(tokens: Tokens, chunks: Chunks) -> Matrices:
    """Of all chunks of a prompt's tokens [P, ...].

    In a chunk the corrections u solve (I + A) u = beta (v - S exp(G) k), with G the running sum of g, S the state before
    the chunk and A_ij = beta_i (k_i exp(G_i - G_j)) k_j for j < i (section 3.3 of arXiv 2412.06464).
    """

    def take(x: jax.Array) -> jax.Array:  # [P, ...] -> [N, C, ...], 0 where a place holds no token
        return jnp.take(x, chunks.tokens, axis=0, mode="fill", fill_value=0)

    q, k, v, g, beta = map(take, tokens)
    decay_NCKRc = jnp.cumsum(g, axis=1)
    keys_NKRCC, reads_NKRCC = _products((k, q), k, decay_NCKRc)
    beta_NKRC1 = jnp.moveaxis(beta, 1, -1)[..., None]

    def of_heads(x_NCKd: jax.Array, factor_NCKRc: jax.Array) -> jax.Array:  # -> [N, K, R, C, d]
        return jnp.moveaxis(x_NCKd[:, :, :, None] * factor_NCKRc, 1, 3)

    faded_NCKRc = jnp.exp(decay_NCKRc)
    # Both right sides of the system at once: what the values ask for, and what is read of the state for each key.
    sides = jnp.concatenate([jnp.moveaxis(v, 1, 3), of_heads(k, faded_NCKRc)], axis=-1)
    solved = solve_triangular(beta_NKRC1 * keys_NKRCC, beta_NKRC1 * sides, lower=True, unit_diagonal=True)
    return Matrices(
        wanted=solved[..., : v.shape[-1]],
        stale=solved[..., v.shape[-1] :],
        queries=of_heads(q, faded_NCKRc),
        reads=reads_NKRCC,
        keys=of_heads(k, jnp.exp(decay_NCKRc[:, -1:] - decay_NCKRc)),
        remains=faded_NCKRc[:, -1],
    )


def of_tokens(read_NKRCV: jax.Array, chunks: Chunks) -> jax.Array:
    """What each token read, [P, K, R, dv]: padding 0, whatever unused chunks hold."""
    read_NCKRV = jnp.moveaxis(read_NKRCV, 3, 1)
    read = read_NCKRV.reshape(-1, *read_NCKRV.shape[2:])
    return jnp.take(read, chunks.places, axis=0, mode="fill", fill_value=0)


def _walk(states: jax.Array, each: Matrices, rows_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the places of all chunks read, [N, K, R, C, dv], and the states [E, K, R, dv, dk] after them."""

    def dot(equation: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *operands, precision=_EXACT)

    def chunk(states: jax.Array, inputs: tuple[jax.Array, Matrices]) -> tuple[jax.Array, jax.Array]:
        row, (wanted, stale, queries, reads, keys, remains) = inputs
        state = states[jnp.minimum(row, states.shape[0] - 1)]
        update = wanted - dot("krcd,krvd->krcv", stale, state)
        read = dot("krcd,krvd->krcv", queries, state) + dot("krij,krjv->kriv", reads, update)
        state = state * remains[..., None, :] + dot("krcd,krcv->krvd", keys, update)
        return states.at[row].set(state, mode="drop"), read

    states, read_NKRCV = lax.scan(chunk, states, (rows_N, each))
    return read_NKRCV, states


def _products(xs: tuple[jax.Array, ...], k_NCKd: jax.Array, decay_NCKRc: jax.Array) -> tuple[jax.Array, ...]:
    """For each x [N, C, K, dk] the sum over d of x_id exp(G_i - G_j)_d k_jd for j <= i, 0 for others: [N, K, R, C, C]."""
    C = k_NCKd.shape[1]
    earlier_CC = jnp.tril(jnp.ones((C, C), bool))[..., None, None, None]

    def between(decay_CKRc: jax.Array) -> jax.Array:
        # Masked before exp: what comes later would overflow, and so would exp(-G) by itself.
        return jnp.exp(jnp.where(earlier_CC, decay_CKRc[:, None] - decay_CKRc[None], -jnp.inf))

    if decay_NCKRc.shape[-1] == 1:
        between_NCCKR = jax.vmap(between)(decay_NCKRc)[..., 0]
        return tuple(jnp.einsum("nikd,njkd,nijkr->nkrij", x, k_NCKd, between_NCCKR, precision=_EXACT) for x in xs)

    def chunk(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        decay_CKRd, k_CKd, *xs_CKd = inputs
        faded_CCKRd = between(decay_CKRd) * k_CKd[:, :, None]
        return tuple(jnp.moveaxis((x[:, None, :, None] * faded_CCKRd).sum(-1), (0, 1), (2, 3)) for x in xs_CKd)

    # One chunk after the other: all together have dk numbers for each pair of tokens and each head.
    return lax.map(chunk, (decay_NCKRc, k_NCKd, *xs))
