"""What `bench kernel` measures, in general: some calls of one operation in one executable, beside a slow exact result."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

# Of one output vector's length. Rounding the weights, the products and the output to bfloat16 costs 0.2-0.5 %.
LARGEST_ERROR = 0.02


class Case:
    """One row of the table: a shape of one operation.

    The executable makes `calls` calls, each with inputs of its own where equal ones would be merged. Its second argument
    is donated and becomes its result, so that a result, given back, is written in the same place again: graphs never
    have to be recorded for new addresses, and poison put there shows what a kernel does not write.

    Attributes:
        fill: what is in the donated arrays before the launch whose results are checked.
    """

    labels: ClassVar[tuple[str, ...]] = ()
    fill: ClassVar[float] = float("nan")
    calls: int

    @property
    def label(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.labels}

    @property
    def flops(self) -> float:
        """Of one call; 0 where the matrix units have nothing to do."""
        return 0.0

    @property
    def bytes(self) -> float:
        """That one call has to read (and write, where that is its work); 0 where matmuls are all that counts."""
        return 0.0

    def inputs(self) -> Any:
        """Draws the inputs; the same ones every time."""
        raise NotImplementedError

    def results(self) -> Any:
        """Shapes of what the executable returns and is given to write in."""
        raise NotImplementedError

    def many(self, inputs: Any, results: Any) -> Any:
        """`calls` calls. What is in `results` counts only for operations that work in place."""
        raise NotImplementedError

    def error(self, inputs: Any, results: Any) -> float:
        """The largest relative error of what was computed, in a sample, against float64."""
        raise NotImplementedError

    def lower(self) -> Any:
        shapes = jax.eval_shape(self.inputs)
        # An unused argument would not be an argument, and could not give its buffer.
        return jax.jit(self.many, donate_argnums=1, keep_unused=True).lower(shapes, self.results())


def once(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Traces and lowers a call once, however often an executable makes it. XLA inlines it again."""
    return jax.jit(operation)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: Any, shape: tuple[int, ...], deviation: float = 1.0) -> jax.Array:
    """bfloat16 N(0, deviation^2). Threefry would take minutes to compile and to run for the large shapes."""
    drawn = jax.random.normal(jax.random.key(seed, impl="rbg"), shape, jnp.float32)
    return (deviation * drawn).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=1)
def latents(seed: Any, shape: tuple[int, ...], free: jax.Array) -> jax.Array:
    """A cache of normal latents, with NaN in the pages that `free` [pages] marks."""
    return jnp.where(free[:, None, None], jnp.nan, normal(seed, shape))


@jax.jit
def take(array: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take(array, indices, axis=0)


def exact(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def rounded(array: np.ndarray) -> np.ndarray:
    """To bfloat16 and back: what the models' arithmetic rounds too."""
    return array.astype(ml_dtypes.bfloat16).astype(np.float64)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def largest_error(computed: np.ndarray, true: np.ndarray) -> float:
    """The largest relative error of a vector along the last axis: one wrong row must not hide among many right ones."""
    return float((np.linalg.norm(computed - true, axis=-1) / np.linalg.norm(true, axis=-1)).max())


def spread(count: int, most: int) -> np.ndarray:
    """At most `most` of 0..count-1, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def shuffled_tables(rng: np.random.Generator, rows: int, pages: int, spare: int) -> tuple[np.ndarray, np.ndarray]:
    """Page tables int32 [rows, pages] of random distinct pages, and bool [all pages], which pages nobody owns.

    Page 0, which pads tables, and `spare` others are free.
    """
    order = 1 + rng.permutation(rows * pages + spare)
    tables = order[: rows * pages].reshape(rows, pages).astype(np.int32)
    free = np.ones(len(order) + 1, bool)
    free[tables] = False
    return tables, free
