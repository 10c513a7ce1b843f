"""Rows of scores, and which of them are the largest."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.key_choice.places import key_of, places


def largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Positions of the largest of [S], ascending, then -1: [count]. Of equal ones the lowest; NaN is the largest."""
    scores = np.where(np.isnan(scores), np.inf, scores) + 0.0
    best = np.sort(np.argsort(-scores, kind="stable")[:count])
    return np.pad(best, (0, count - len(best)), constant_values=-1)


def scores_of(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """float32 of a kind: "normal", "few values", "one value" or "wide" (every exponent, infinities and NaN)."""
    normal = rng.standard_normal(shape, np.float32)
    match kind:
        case "few values":
            return np.round(normal)
        case "one value":
            return np.where(normal > 0, np.float32(0), np.float32(-0.0))
        case "wide":
            bits = rng.integers(0, 2**32, shape, np.uint32)
            return bits.view(np.float32)
    return normal


def check_places(tokens: int, columns: int, count: int, kind: str, interpret: Any = False) -> Any:
    """Returns the places, which are those of NumPy, each time."""
    rng = np.random.default_rng(0)
    scores, bounds = scores_of(kind, rng, (tokens, columns)), rng.integers(0, columns + 1, tokens).astype(np.int32)
    edges = np.array([columns, count, count + 1, count - 1, 0, columns - 1], np.int32)[:tokens]
    bounds[: len(edges)] = edges
    scores[np.arange(columns) >= bounds[:, None]] = np.nan
    keys = key_of(jnp.asarray(scores))
    first, second = (places(keys, jnp.asarray(bounds), count, interpret=interpret) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    for t, bound in enumerate(bounds):
        np.testing.assert_array_equal(first[t], largest(scores[t, :bound], count))
    return first
