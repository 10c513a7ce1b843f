"""Rows of `bench kernel` and `bench tune` for the MLP of a dense layer in bfloat16."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal, rounded
from bench.kernel.case import Case, WithOrWithout, once
from pallas_kernels.moe.api import mlp_to_add
from pallas_kernels.norm_linear.api import norm_linear


@dataclass(frozen=True)
class DenseMlp(Case):
    """T tokens through the MLPs of several layers, of GLM-4.5-Air's first layer's sizes, added to the stream and normed."""

    T: int
    H: int = 4096
    inner: int = 10944
    calls: int = 8
    labels: ClassVar[tuple[str, ...]] = ("T", "H", "inner")

    @property
    def bytes(self) -> float:
        return 2.0 * 3 * self.H * self.inner

    def inputs(self) -> Any:
        layers = [
            (
                normal(2 * i, (2, self.inner, self.H), self.H**-0.5),
                normal(2 * i + 1, (self.H, self.inner), self.inner**-0.5),
            )
            for i in range(self.calls)
        ]
        tokens = [normal(1000 + i, (self.T, self.H)) for i in range(self.calls)]
        return normal(998, (self.T, self.H)), normal(999, (self.H,)), tokens, layers

    def results(self) -> Any:
        return [(jax.ShapeDtypeStruct((self.T, self.H), jnp.bfloat16),) * 2] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        stream, norm, tokens, layers = inputs
        call = once(lambda x, *layer: norm_linear(stream, norm, (), eps=1e-6, delta=mlp_to_add(x, *layer))[:2])
        return [call(x, *layer) for x, layer in zip(tokens, layers, strict=True)]

    def error(self, inputs: Any, results: Any) -> float:
        """Of the last call."""
        stream, norm, tokens, layers = inputs
        x, (gate_up, down) = exact(tokens[-1]), (exact(each) for each in layers[-1])
        gate, up = x @ gate_up[0].T, x @ gate_up[1].T
        delta = rounded(gate / (1 + np.exp(-gate)) * up) @ down.T
        summed = rounded(exact(stream) + rounded(delta))
        normed = summed / np.sqrt(np.mean(summed**2, axis=1, keepdims=True) + 1e-6) * exact(norm)
        return max(largest_error(exact(got), want) for got, want in zip(results[-1], (summed, normed), strict=True))


@dataclass(frozen=True)
class DenseMlpWith(WithOrWithout, DenseMlp):
    labels: ClassVar[tuple[str, ...]] = ("T", "H", "inner", "kernel")
    up_to: ClassVar[str] = "mlp_kernel_tokens"


# Hidden and inner sizes of GLM-4.5-Air, Moonlight and MiniCPM3.
_SIZES = (4096, 10944), (2048, 11264), (2560, 6400)
DENSE_MLP: dict[str, list[Case]] = {
    "all": [DenseMlpWith(T, *sizes, 8, kernel) for sizes in _SIZES for T in (4, 32, 64, 128) for kernel in (1, 0)],
    "quick": [DenseMlpWith(32, *sizes, 8, kernel) for sizes in _SIZES[:2] for kernel in (1, 0)],
    "tiny": [DenseMlpWith(3, 32, 16, 3, kernel) for kernel in (1, 0)],
}
