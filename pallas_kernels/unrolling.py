"""Straight code instead of loops, which would keep a decode step from being one CUDA graph."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Parts in straight code at most: each is compiled again in every layer. Of 128 tokens they hold a decode step of 256 rows
# with three drafts each; larger steps read prompts.
MOST_PARTS = 8


def unrolls() -> bool:
    """Whether passes are traced one by one: a loop would keep a decode step from being one CUDA graph. A CPU compiles a loop
    much sooner."""
    return jax.devices()[0].platform != "cpu"


def repeated(count: int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`step` of 0, 1 ... `count` - 1 and what the one before returned."""
    if not unrolls():
        return lax.fori_loop(0, count, step, carry)
    for i in range(count):
        carry = step(i, carry)
    return carry


def by_queries(function: Callable[..., jax.Array], most: int, *arrays: jax.Array, straight: bool = False) -> jax.Array:
    """function(*arrays) over their first axis, at most `most` of it at a time, which bounds the memory that it takes.

    Args:
        straight: a few parts follow each other without a loop, where it would have no other.
    """
    T = arrays[0].shape[0]
    if most >= T:
        return function(*arrays)
    parts = -(-T // most)
    if straight and parts <= MOST_PARTS and unrolls():
        return _one_after_another(function, [tuple(a[i : i + most] for a in arrays) for i in range(0, T, most)])

    def cut(array: jax.Array) -> jax.Array:
        """The last part is filled up with zeros, and what it gives for them is dropped."""
        filled = jnp.pad(array, [(0, parts * most - T)] + [(0, 0)] * (array.ndim - 1))
        return filled.reshape(parts, most, *array.shape[1:])

    out = lax.map(lambda part: function(*part), tuple(map(cut, arrays)))
    return out.reshape(-1, *out.shape[2:])[:T]


def _one_after_another(function: Callable[..., jax.Array], parts: list[tuple[jax.Array, ...]]) -> jax.Array:
    """function(*part) of all parts, joined.

    A part's inputs are there when the part before has ended. So XLA joins no operations of different parts, and a schedule
    for least memory gives each part that of the one before.
    """
    results = [function(*parts[0])]
    for part in parts[1:]:
        ready, results[-1] = lax.optimization_barrier((part, results[-1]))
        results.append(function(*ready))
    return jnp.concatenate(results)
