"""Rows of `bench kernel` and `bench tune` for a norm with the projections that read it."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal, rounded
from bench.kernel.case import Case, WithOrWithout, once
from pallas_kernels.norm_linear.api import joined_linear, joins_linears, linear_to_add, norm_linear
from pallas_kernels.norm_linear.shapes import READERS, TOKENS

ATTENTION = READERS["moonlight, attention"]


@dataclass(frozen=True)
class NormLinear(Case):
    """T tokens normed, and their projections to the queries of 16 heads and to a latent, in turn by many layers."""

    T: int
    H: int = ATTENTION.hidden
    outs: tuple[int, ...] = tuple(math.prod(shape) for shape in ATTENTION.outputs)
    calls: int = 24
    labels: ClassVar[tuple[str, ...]] = ("T", "H")

    @property
    def bytes(self) -> float:
        return 2.0 * self.H * sum(self.outs)

    def inputs(self) -> Any:
        weights = [
            tuple(normal(10 * i + j, (out, self.H), self.H**-0.5) for j, out in enumerate(self.outs))
            for i in range(self.calls)
        ]
        tokens = [normal(1000 + i, (self.T, self.H)) for i in range(self.calls)]
        return tokens, normal(999, (self.H,)), weights

    def results(self) -> Any:
        return [tuple(jax.ShapeDtypeStruct((self.T, out), jnp.bfloat16) for out in self.outs)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        tokens, norm, weights = inputs
        call = once(lambda *args: norm_linear(*args, eps=1e-6)[2])
        return [call(x, norm, each) for x, each in zip(tokens, weights, strict=True)]

    def error(self, inputs: Any, results: Any) -> float:
        """Of the last call."""
        tokens, norm, weights = inputs
        x = exact(tokens[-1])
        normed = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * exact(norm)
        true = [normed @ exact(w).T for w in weights[-1]]
        return max(largest_error(exact(got), want) for got, want in zip(results[-1], true, strict=True))


@dataclass(frozen=True)
class JoinedLinear(NormLinear):
    """The same projections of tokens that are normed already."""

    @property
    def outputs(self) -> int:
        return sum(self.outs)

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        tokens, _, weights = inputs

        def project(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            if joins_linears(x, weights):
                joined = joined_linear(x, weights)
            else:
                joined = jnp.tensordot(x, jnp.concatenate(weights), axes=(-1, -1))
            return tuple(jnp.split(joined, np.cumsum(self.outs[:-1]), axis=1))

        call = once(project)
        return [call(x, each) for x, each in zip(tokens, weights, strict=True)]

    def error(self, inputs: Any, results: Any) -> float:
        """Of the last call."""
        tokens, _, weights = inputs
        true = [exact(tokens[-1]) @ exact(w).T for w in weights[-1]]
        return max(largest_error(exact(got), want) for got, want in zip(results[-1], true, strict=True))


@dataclass(frozen=True)
class AddLinear(Case):
    """What T tokens' heads gather projected, added to the residual stream and normed, in turn by many layers."""

    T: int
    H: int = ATTENTION.hidden
    heads: tuple[int, int] = (16, 128)
    calls: int = 24
    labels: ClassVar[tuple[str, ...]] = ("T", "H")

    @property
    def columns(self) -> int:
        return math.prod(self.heads)

    @property
    def bytes(self) -> float:
        return 2.0 * self.H * self.columns

    def inputs(self) -> Any:
        deviation = math.prod(self.heads) ** -0.5
        weights = [normal(i, (self.H, *self.heads), deviation) for i in range(self.calls)]
        values = [normal(1000 + i, (self.T, *self.heads)) for i in range(self.calls)]
        return normal(998, (self.T, self.H)), normal(999, (self.H,)), values, weights

    def results(self) -> Any:
        return [(jax.ShapeDtypeStruct((self.T, self.H), jnp.bfloat16),) * 2] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        x, norm, values, weights = inputs
        call = once(lambda v, w: norm_linear(x, norm, (), eps=1e-6, delta=linear_to_add(v, w))[:2])
        return [call(v, w) for v, w in zip(values, weights, strict=True)]

    def error(self, inputs: Any, results: Any) -> float:
        """Of the last call."""
        x, norm, values, weights = inputs
        delta = exact(values[-1]).reshape(self.T, -1) @ exact(weights[-1]).reshape(self.H, -1).T
        summed = rounded(exact(x) + rounded(delta))
        normed = summed / np.sqrt(np.mean(summed**2, axis=1, keepdims=True) + 1e-6) * exact(norm)
        return max(largest_error(exact(got), want) for got, want in zip(results[-1], (summed, normed), strict=True))


@dataclass(frozen=True)
class JoinedLinearWith(WithOrWithout, JoinedLinear):
    labels: ClassVar[tuple[str, ...]] = ("T", "H", "outputs", "kernel")
    up_to: ClassVar[str] = "joined_linear_tokens"


@dataclass(frozen=True)
class AddLinearWith(WithOrWithout, AddLinear):
    labels: ClassVar[tuple[str, ...]] = ("T", "H", "columns", "kernel")
    up_to: ClassVar[str] = "split_linear_tokens"


NORM_LINEAR: dict[str, list[Case]] = {
    "all": [NormLinear(T) for T in TOKENS],
    "quick": [NormLinear(1)],
    "tiny": [NormLinear(T, 32, (8, 4), 3) for T in (1, 3)],
}
# The projections of Moonlight and GLM-4.7-Flash (queries and latents), Qwen3-30B-A3B, MiniMax-M2 and GLM-4.5-Air: hidden size,
# outputs.
_JOINED = (2048, (3072, 576)), (768, (5120,)), (2048, (1344,)), (2048, (5120,)), (3072, (8192,)), (4096, (14336,))
# The output projections of the same, and of GLM-4.5-Air: hidden size, heads.
_ADDED = (2048, (16, 128)), (2048, (20, 256)), (2048, (32, 128)), (3072, (48, 128)), (4096, (96, 128))
_TOKENS = (4, 32, 64, 128, 256)
JOINED_LINEAR: dict[str, list[Case]] = {
    "all": [JoinedLinearWith(T, H, outs, 12, kernel) for H, outs in _JOINED for T in _TOKENS for kernel in (1, 0)],
    "quick": [JoinedLinearWith(32, kernel=kernel) for kernel in (1, 0)],
    "tiny": [JoinedLinearWith(3, 32, (8, 4), 3, kernel) for kernel in (1, 0)],
}
ADD_LINEAR: dict[str, list[Case]] = {
    "all": [AddLinearWith(T, H, heads, 8, kernel) for H, heads in _ADDED for T in _TOKENS for kernel in (1, 0)],
    "quick": [AddLinearWith(32, kernel=kernel) for kernel in (1, 0)],
    "tiny": [AddLinearWith(3, 32, (2, 8), 3, kernel) for kernel in (1, 0)],
}
