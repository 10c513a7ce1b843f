"""Rows of `bench kernel` and `bench tune` for a norm with the projections that read it."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal
from bench.kernel.case import Case, once
from pallas_kernels.norm_linear.api import norm_linear
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


NORM_LINEAR: dict[str, list[Case]] = {
    "all": [NormLinear(T) for T in TOKENS],
    "quick": [NormLinear(1)],
    "tiny": [NormLinear(T, 32, (8, 4), 3) for T in (1, 3)],
}
