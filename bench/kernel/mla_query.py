"""Rows of `bench kernel` for absorbed queries."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal, spread
from bench.kernel.case import Case, once
from pallas_kernels.mla_decode.shapes import CACHED, HEADS, LATENT, NOPE, ROPE, WIDE_HEADS, WIDE_NOPE
from pallas_kernels.mla_query.api import mla_query
from pallas_kernels.mla_query.shapes import TOKENS


@dataclass(frozen=True)
class MlaQuery(Case):
    """T tokens of H heads absorbed into latent space and rotated, in turn by more layers than any cache holds."""

    T: int
    H: int = HEADS["moonlight"]
    layers: int = 40
    calls: int = 40
    nope: int = NOPE
    labels: ClassVar[tuple[str, ...]] = ("T", "H")

    @property
    def flops(self) -> float:
        return 2.0 * self.T * self.H * self.nope * LATENT

    @property
    def bytes(self) -> float:
        return 2.0 * self.H * (self.nope * LATENT + self.T * (self.nope + ROPE + CACHED))

    def inputs(self) -> Any:
        angles = np.random.default_rng(1).uniform(0, 6, (self.T, ROPE // 2))
        cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        weights = [normal(i, (self.H, self.nope, LATENT), self.nope**-0.5) for i in range(self.layers)]
        return [normal(1000 + i, (self.T, self.H, self.nope + ROPE)) for i in range(self.calls)], weights, cos, sin

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.T, self.H, CACHED), jnp.bfloat16)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        qs, weights, cos, sin = inputs
        call = once(mla_query)
        return [call(q, weights[i % self.layers], cos, sin) for i, q in enumerate(qs)]

    def error(self, inputs: Any, results: Any) -> float:
        """Of some tokens of the last call."""
        qs, weights, cos, sin = inputs
        tokens = spread(self.T, 4)
        q, w_uk = exact(qs[-1])[tokens], exact(weights[(self.calls - 1) % self.layers])
        absorbed = np.einsum("thd,hdl->thl", q[..., : self.nope], w_uk, optimize=True)
        turns = (exact(cos) + 1j * exact(sin))[tokens, None]
        z = (q[..., self.nope : self.nope + ROPE // 2] + 1j * q[..., self.nope + ROPE // 2 :]) * turns
        parts = [absorbed, np.concatenate([z.real, z.imag], axis=-1)]
        got = np.split(exact(results[-1])[tokens], [LATENT], axis=-1)
        return float(np.max([largest_error(a, b) for a, b in zip(got, parts, strict=True)]))  # NaN, if one is


GLM = [MlaQuery(T, WIDE_HEADS["glm-4.7-flash"], nope=WIDE_NOPE) for T in (4, 128)]
MLA_QUERY: dict[str, list[Case]] = {
    "all": [*(MlaQuery(T) for T in TOKENS), MlaQuery(128, HEADS["deepseek-v3"], 5), *GLM],
    "quick": [MlaQuery(T) for T in (1, 32)],
    "tiny": [MlaQuery(T, 2, 2, 3) for T in (1, 5)],
}
