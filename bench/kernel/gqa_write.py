"""Rows of `bench kernel` for placing heads of grouped-query attention and writing them to its caches."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal
from bench.kernel.case import Case, WithOrWithout, once
from jaxspec.config import PAGE_SIZE
from pallas_kernels.gqa_decode.shapes import HEADS, Heads
from pallas_kernels.gqa_write.api import write_heads
from pallas_kernels.gqa_write.reference import HeadNorms
from pallas_kernels.gqa_write.shapes import TOKENS

EPS = 1e-6


@dataclass(frozen=True)
class GqaWrite(Case):
    """T tokens' heads, each with its norm, rotated and written to random places of donated caches, call after call."""

    T: int
    heads: Heads = HEADS["qwen3-30b-a3b"]
    pages: int = 4096
    calls: int = 20
    labels: ClassVar[tuple[str, ...]] = ("T",)
    fill: ClassVar[float] = 0.0

    @property
    def bytes(self) -> float:
        K, G, D, *_ = self.heads
        return 2.0 * 2 * self.T * K * (G + 2) * D

    def places(self) -> np.ndarray:
        """int32 [calls, T] of distinct places in the caches; none in page 0."""
        places = np.random.default_rng(0).permutation((self.pages - 1) * PAGE_SIZE)[: self.calls * self.T]
        return (PAGE_SIZE + places).reshape(self.calls, self.T).astype(np.int32)

    def inputs(self) -> Any:
        K, G, D, *_ = self.heads
        angles = np.random.default_rng(1).uniform(0, 6, (self.T, D // 2))
        cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        each = [
            (normal(2 + i, (self.T, K, G + 2, D)), jnp.asarray(at // PAGE_SIZE), jnp.asarray(at % PAGE_SIZE))
            for i, at in enumerate(self.places())
        ]
        return each, (HeadNorms(normal(0, (D,)), normal(1, (D,))), cos, sin)

    def results(self) -> Any:
        K, G, D, *_ = self.heads
        cache = jax.ShapeDtypeStruct((self.pages, PAGE_SIZE, K, D), jnp.bfloat16)
        return cache, cache, [jax.ShapeDtypeStruct((self.T, K, G, D), jnp.bfloat16)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        each, (norms, cos, sin) = inputs
        keys, values, _ = results
        queries = []
        # A function of this case alone: traced under its tuning.
        call = once(lambda k, v, qkv, *at: write_heads(k, v, qkv, None, norms, cos, sin, *at, eps=EPS))
        for qkv, pages, offsets in each:
            keys, values, q = call(keys, values, qkv, pages, offsets)
            queries.append(q)
        return keys, values, queries

    def error(self, inputs: Any, results: Any) -> float:
        """Of all tokens of the last call; infinite if anything was written elsewhere or not at all."""
        each, (norms, cos, sin) = inputs
        K, _, D, *_ = self.heads
        qkv, cos, sin = exact(each[-1][0]), exact(cos)[:, None], exact(sin)[:, None]
        last = self.places()[-1]

        def placed(x: np.ndarray, factor: jax.Array) -> np.ndarray:
            x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * exact(factor)
            a, b = np.split(x.reshape(self.T, -1, D), 2, axis=-1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        keys, values = (np.asarray(cache).reshape(-1, K, D) for cache in results[:2])
        for cache in (keys, values):
            written = np.flatnonzero((cache.view(np.uint16) != 0).any(axis=(1, 2)))
            if not np.array_equal(written, np.sort(self.places(), axis=None)):
                return float("inf")
        queries = exact(results[2][-1]).reshape(self.T, -1, D)
        return max(
            largest_error(exact(keys[last]), placed(qkv[:, :, -2], norms.k)),
            largest_error(exact(values[last]), qkv[:, :, -1]),
            largest_error(queries, placed(qkv[:, :, :-2], norms.q)),
        )


@dataclass(frozen=True)
class GqaWriteWith(WithOrWithout, GqaWrite):
    labels: ClassVar[tuple[str, ...]] = ("T", "kernel")
    up_to: ClassVar[str] = "head_kernel_tokens"


GQA_WRITE: dict[str, list[Case]] = {
    "all": [GqaWriteWith(T, kernel=kernel) for T in TOKENS for kernel in (1, 0)],
    "quick": [GqaWriteWith(T, kernel=kernel) for T in (1, 128) for kernel in (1, 0)],
    "tiny": [GqaWriteWith(T, Heads(2, 4, 64), 4, 3, kernel) for T in (1, 5) for kernel in (1, 0)],
}
