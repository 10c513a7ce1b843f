"""Parts of the plain-XLA attention references: blocks of pages, and the online softmax over them.

Keys are visited in blocks of a few pages with a running maximum (arXiv 1805.02867), so that memory does not grow with
the context. Every key outside a row's bound is masked in the scores *and* replaced by zero before it is used: pages
that a row does not own may hold anything, NaN included.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

PAGES_PER_BLOCK = 4
# Finite, because the difference of two -inf is NaN.
MASKED = -1e30
# Query tokens that sparse attention works on at a time: each of them gathers keys of its own.
QUERIES = 16


def pad_tables(page_tables: jax.Array) -> jax.Array:
    """Page tables [..., max_pages] padded with the padding page to whole blocks."""
    extra = -page_tables.shape[-1] % PAGES_PER_BLOCK
    return jnp.pad(page_tables, [(0, 0)] * (page_tables.ndim - 1) + [(0, extra)])


def blocks_for(tokens: jax.Array, page_size: int) -> jax.Array:
    """How many blocks cover `tokens` keys."""
    return -(-tokens // (PAGES_PER_BLOCK * page_size))


def block_pages(page_tables: jax.Array, block: jax.Array) -> jax.Array:
    """Page ids [..., PAGES_PER_BLOCK] of one block."""
    return jax.lax.dynamic_slice_in_dim(page_tables, block * PAGES_PER_BLOCK, PAGES_PER_BLOCK, axis=-1)


def block_positions(block: jax.Array, page_size: int) -> jax.Array:
    """Key positions [PAGES_PER_BLOCK * page_size] of one block."""
    size = PAGES_PER_BLOCK * page_size
    return block * size + jnp.arange(size, dtype=jnp.int32)


class OnlineSoftmax:
    """Running softmax-weighted sum of values over blocks of keys, in float32. The state is (max, sum, accumulator)."""

    @staticmethod
    def init(shape: tuple[int, ...], value_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        return (
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, value_dim), jnp.float32),
        )

    @staticmethod
    def update(
        state: tuple[jax.Array, jax.Array, jax.Array],
        scores: jax.Array,
        mask: jax.Array,
        weigh: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Adds one block: scores and mask [*shape, keys]; `weigh` maps weights [*shape, keys] to [*shape, value_dim].

        A row that sees no key of the block keeps its accumulator as it is: another request's values may be NaN, and
        even a weight of 0 would carry that over.
        """
        old_max, total, acc = state
        scores = jnp.where(mask, scores, MASKED)
        new_max = jnp.maximum(old_max, scores.max(axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - new_max[..., None]), 0.0)
        shrink = jnp.exp(old_max - new_max)
        new_acc = acc * shrink[..., None] + weigh(weights)
        sees = jnp.broadcast_to(mask.any(axis=-1), new_max.shape)[..., None]
        return new_max, total * shrink + weights.sum(axis=-1), jnp.where(sees, new_acc, acc)

    @staticmethod
    def finish(state: tuple[jax.Array, jax.Array, jax.Array], sinks: jax.Array | None = None) -> jax.Array:
        """The weighted mean; rows that saw no key give 0.

        Args:
            sinks: scores that broadcast to the rows': each is one more key, with a value of 0.
        """
        top, total, acc = state
        if sinks is not None:
            new_top = jnp.maximum(top, sinks)
            shrink = jnp.exp(top - new_top)
            total, acc = total * shrink + jnp.exp(sinks - new_top), acc * shrink[..., None]
        return acc / jnp.where(total == 0, 1.0, total)[..., None]
