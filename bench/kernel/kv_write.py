"""Rows of `bench kernel` for writing tokens into the latent cache."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal
from bench.kernel.case import Case, once
from jaxspec.config import PAGE_SIZE
from pallas_kernels.kv_write.api import write_latent
from pallas_kernels.kv_write.shapes import TOKENS
from pallas_kernels.mla_decode.shapes import CACHED, LATENT, ROPE


@dataclass(frozen=True)
class KvWrite(Case):
    """T tokens normed, rotated and written to random places of a donated latent cache, call after call."""

    T: int
    pages: int = 4096
    calls: int = 20
    labels: ClassVar[tuple[str, ...]] = ("T",)
    fill: ClassVar[float] = 0.0

    @property
    def bytes(self) -> float:
        return 2.0 * 2 * CACHED * self.T

    def places(self) -> np.ndarray:
        """int32 [calls, T] of distinct places in the cache; none in page 0."""
        places = np.random.default_rng(0).permutation((self.pages - 1) * PAGE_SIZE)[: self.calls * self.T]
        return (PAGE_SIZE + places).reshape(self.calls, self.T).astype(np.int32)

    def inputs(self) -> Any:
        angles = np.random.default_rng(1).uniform(0, 6, (self.T, ROPE // 2))
        cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        each = [
            (normal(1 + i, (self.T, CACHED)), jnp.asarray(at // PAGE_SIZE), jnp.asarray(at % PAGE_SIZE))
            for i, at in enumerate(self.places())
        ]
        return each, (normal(0, (LATENT,)), cos, sin)

    def results(self) -> Any:
        return jax.ShapeDtypeStruct((self.pages, PAGE_SIZE, CACHED), jnp.bfloat16)

    def many(self, inputs: Any, results: Any) -> Any:
        each, shared = inputs
        call = once(lambda *args: write_latent(*args, eps=1e-6))
        for kv_a, pages, offsets in each:
            results = call(results, kv_a, *shared, pages, offsets)
        return results

    def error(self, inputs: Any, results: Any) -> float:
        """Of all tokens of the last call; infinite if anything was written elsewhere or not at all."""
        each, (norm, cos, sin) = inputs
        cache = np.asarray(results).reshape(-1, CACHED)
        written = np.flatnonzero((cache.view(np.uint16) != 0).any(axis=1))
        if not np.array_equal(written, np.sort(self.places(), axis=None)):
            return float("inf")
        kv_a = exact(each[-1][0])
        latent = kv_a[:, :LATENT] / np.sqrt(np.mean(kv_a[:, :LATENT] ** 2, axis=1, keepdims=True) + 1e-6) * exact(norm)
        a, b = np.split(kv_a[:, LATENT:], 2, axis=1)
        cos, sin = exact(cos), exact(sin)
        true = np.concatenate([latent, a * cos - b * sin, b * cos + a * sin], axis=1)
        return largest_error(exact(cache[self.places()[-1]]), true)


KV_WRITE: dict[str, list[Case]] = {
    "all": [KvWrite(T) for T in TOKENS],
    "quick": [KvWrite(T) for T in (1, 128)],
    "tiny": [KvWrite(T, 4, 3) for T in (1, 5)],
}
