"""Plain XLA: scores of a few query tokens at a time, and a threshold found bit by bit instead of a sort."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference_attention import (
    QUERIES,
    block_pages,
    block_positions,
    blocks_for,
    by_queries,
    pad_tables,
)
from pallas_kernels.sampling.keys import LEAST_KEY, ordered


@functools.partial(jax.jit, static_argnames="count")
def choose_keys(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    page_tables: jax.Array,
    rows: jax.Array,
    bounds: jax.Array,
    *,
    count: int,
) -> jax.Array:
    count = min(count, page_tables.shape[1] * keys.shape[1])
    tables = pad_tables(page_tables)

    def choose(q_QND: jax.Array, weights_QN: jax.Array, rows_Q: jax.Array, bounds_Q: jax.Array) -> jax.Array:
        def by_score() -> jax.Array:
            scores_QS = _scores(q_QND, weights_QN, keys, tables[rows_Q], bounds_Q)
            return _positions(_largest(scores_QS, bounds_Q, count), count)

        def everything() -> jax.Array:
            places = jnp.arange(count, dtype=jnp.int32)
            return jnp.where(places < bounds_Q[:, None], places, -1)

        return lax.cond(bounds_Q.max() > count, by_score, everything)

    return by_queries(choose, QUERIES, q, weights, rows, bounds)


def _scores(
    q_QND: jax.Array, weights_QN: jax.Array, keys: jax.Array, tables_QX: jax.Array, bounds_Q: jax.Array
) -> jax.Array:
    """float32 [Q, S] for all positions of whole blocks of pages; those past a token's bound mean nothing."""
    Q, page_size = q_QND.shape[0], keys.shape[1]
    S = tables_QX.shape[1] * page_size

    def block(j: jax.Array, scores_QS: jax.Array) -> jax.Array:
        keys_QBD = keys[block_pages(tables_QX, j)].reshape(Q, -1, keys.shape[2])
        owned_QB = block_positions(j, page_size) < bounds_Q[:, None]
        products_QNB = jnp.einsum(
            "qnd,qbd->qnb", q_QND, jnp.where(owned_QB[..., None], keys_QBD, 0), preferred_element_type=jnp.float32
        )
        new_QB = (jax.nn.relu(products_QNB) * weights_QN[..., None]).sum(axis=1)
        return lax.dynamic_update_slice_in_dim(scores_QS, new_QB, j * new_QB.shape[1], axis=1)

    return lax.fori_loop(0, blocks_for(bounds_Q.max(), page_size), block, jnp.zeros((Q, S), jnp.float32))


def _largest(scores_QS: jax.Array, bounds_Q: jax.Array, count: int) -> jax.Array:
    """bool [Q, S]: the `count` largest scores of each row below its bound, or all; of equal ones the lowest positions."""
    # -0.0 is no less than 0.0, which is the score of a key that no head looks for.
    scores_QS = jnp.where(scores_QS == 0, 0.0, jnp.where(jnp.isnan(scores_QS), jnp.inf, scores_QS))
    owned_QS = jnp.arange(scores_QS.shape[1]) < bounds_Q[:, None]
    keys_QS = jnp.where(owned_QS, ordered(scores_QS), LEAST_KEY)
    wanted_Q = jnp.minimum(bounds_Q, count)

    def key_of(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits ^ jnp.uint32(1 << 31), jnp.int32)

    def decide(i: jax.Array, bits_Q: jax.Array) -> jax.Array:
        """The bit 31 - i of the greatest key that so many keys reach."""
        candidate_Q = bits_Q | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reached_Q = (keys_QS >= key_of(candidate_Q)[:, None]).sum(axis=1, dtype=jnp.int32)
        return jnp.where(reached_Q >= wanted_Q, candidate_Q, bits_Q)

    least_Q = key_of(lax.fori_loop(0, 32, decide, jnp.zeros(bounds_Q.shape, jnp.uint32)))
    above_QS, equal_QS = keys_QS > least_Q[:, None], keys_QS == least_Q[:, None]
    left_Q = wanted_Q - above_QS.sum(axis=1, dtype=jnp.int32)
    first_QS = jnp.cumsum(equal_QS, axis=1, dtype=jnp.int32) <= left_Q[:, None]
    return owned_QS & (above_QS | (equal_QS & first_QS))


def _positions(chosen_QS: jax.Array, count: int) -> jax.Array:
    """int32 [Q, count]: where a row is true, ascending, then -1."""
    seen_QS = jnp.cumsum(chosen_QS, axis=1, dtype=jnp.int32)
    ranks = jnp.arange(1, count + 1, dtype=jnp.int32)
    found_QK = jax.vmap(lambda seen_S: jnp.searchsorted(seen_S, ranks))(seen_QS).astype(jnp.int32)
    return jnp.where(ranks <= seen_QS[:, -1:], found_QK, -1)
