"""Plain XLA: scores of a few query tokens at a time."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference_attention import (
    QUERIES,
    block_pages,
    block_positions,
    blocks_for,
    pad_tables,
)
from pallas_kernels.unrolling import by_queries


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
            return _largest(scores_QS, bounds_Q, count)

        def everything() -> jax.Array:
            places = jnp.arange(count, dtype=jnp.int32)
            return jnp.where(places < bounds_Q[:, None], places, -1)

        return lax.cond(bounds_Q.max() > count, by_score, everything)

    return by_queries(choose, QUERIES, q, weights, rows, bounds)


def _largest(scores_QS: jax.Array, bounds_Q: jax.Array, count: int) -> jax.Array:
    """int32 [Q, count]: see `places.places`, whose oracle this is."""
    # -0.0 is no less than 0.0, which is the score of a key that no head looks for.
    scores_QS = jnp.where(scores_QS == 0, 0.0, jnp.where(jnp.isnan(scores_QS), jnp.inf, scores_QS))
    positions_S = jnp.arange(scores_QS.shape[1], dtype=jnp.int32)
    _, best_QK = lax.top_k(jnp.where(positions_S < bounds_Q[:, None], scores_QS, -jnp.inf), count)
    chosen_QK = jnp.arange(count) < bounds_Q[:, None]
    places_QK = jnp.sort(jnp.where(chosen_QK, best_QK, scores_QS.shape[1]), axis=1)
    return jnp.where(chosen_QK, places_QK, -1)


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
