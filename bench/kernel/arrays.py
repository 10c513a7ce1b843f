"""Arrays of the cases of `bench kernel`: random inputs, paged caches, and exact results to compare with."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxspec.config import pages_for

# Pages that no request owns, in random places.
SPARE_PAGES = 8


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: Any, shape: tuple[int, ...], deviation: float = 1.0) -> jax.Array:
    """bfloat16 N(0, deviation^2). Threefry would take minutes to compile and to run for the large shapes."""
    drawn = jax.random.normal(jax.random.key(seed, impl="rbg"), shape, jnp.float32)
    return (deviation * drawn).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=1)
def paged_cache(seed: Any, shape: tuple[int, ...], free: jax.Array) -> jax.Array:
    """A paged cache of normal numbers, NaN in the pages that `free` [pages] marks."""
    return jnp.where(free[:, None, None], jnp.nan, normal(seed, shape))


@jax.jit
def take(array: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take(array, indices, axis=0)


def exact(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def rounded(array: np.ndarray) -> np.ndarray:
    """To bfloat16 and back, as the kernels round intermediate results."""
    return array.astype(ml_dtypes.bfloat16).astype(np.float64)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def largest_error(computed: np.ndarray, true: np.ndarray) -> float:
    """The largest relative error of any vector along the last axis: one wrong row must not hide among many."""
    return float((np.linalg.norm(computed - true, axis=-1) / np.linalg.norm(true, axis=-1)).max())


def spread(count: int, most: int) -> np.ndarray:
    """At most `most` of 0..count-1, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def shuffled_tables(requests: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Page tables int32 [requests, pages] of random distinct pages, and bool [all pages], which pages nobody owns.

    Page 0, which pads tables, and `SPARE_PAGES` others are free.
    """
    pages = pages_for(tokens)
    order = 1 + np.random.default_rng(0).permutation(requests * pages + SPARE_PAGES)
    tables = order[: requests * pages].reshape(requests, pages).astype(np.int32)
    free = np.ones(len(order) + 1, bool)
    free[tables] = False
    return tables, free


def window_bounds(requests: int, tokens: int, window: int) -> np.ndarray:
    """int32 [requests, window]: how many keys each token of a window sees, the last one all `tokens`."""
    return np.tile(np.arange(tokens - window + 1, tokens + 1, dtype=np.int32), (requests, 1))


def chunk_places(tables: np.ndarray, prefix: int, tokens: int) -> tuple[jax.Array, ...]:
    """Where a chunk of one request sits: its table, row and position of each token, and the end of the row."""
    end = prefix + tokens
    positions = np.arange(prefix, end, dtype=np.int32)
    where = (tables, np.zeros(tokens, np.int32), positions, np.array([end], np.int32))
    return tuple(jnp.asarray(each) for each in where)


def causal_pairs(prefix: int, tokens: int) -> int:
    """Pairs of a query and a key that it sees, of a chunk after a cached prefix."""
    return tokens * prefix + tokens * (tokens + 1) // 2
