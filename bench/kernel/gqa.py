"""Rows of `bench kernel` for grouped-query attention: over decode windows, and over prompt chunks."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import (
    causal_pairs,
    chunk_places,
    exact,
    largest_error,
    normal,
    paged_cache,
    shuffled_tables,
    softmax,
    spread,
    take,
    window_bounds,
)
from bench.kernel.case import Case, once
from jaxspec.config import PAGE_SIZE
from pallas_kernels.gqa_decode.api import gqa_decode
from pallas_kernels.gqa_decode.shapes import CONTEXTS, HEADS, WINDOWS
from pallas_kernels.gqa_prefill.api import gqa_prefill
from pallas_kernels.gqa_prefill.shapes import CHUNKS


@dataclass(frozen=True)
class GqaDecode(Case):
    """B requests of S cached tokens, K key heads of D columns with G query heads each, windows of Q tokens.

    Attributes:
        window: of the keys that a query sees, the last ones alone; None: all. sinks: every head has one.
    """

    B: int
    S: int
    K: int
    G: int
    D: int
    Q: int
    window: int | None = None
    sinks: bool = False
    calls: int = 20
    labels: ClassVar[tuple[str, ...]] = ("B", "S", "K", "G", "D", "Q", "window", "sinks")

    @property
    def label(self) -> dict[str, int]:
        return super().label | {"window": self.window or 0, "sinks": int(self.sinks)}

    @property
    def flops(self) -> float:
        seen = np.minimum(self.bounds(), self.window or self.S)
        return 4.0 * self.D * self.K * self.G * float(seen.sum())

    @property
    def bytes(self) -> float:
        """Of the keys that any query of a request sees."""
        seen = self.S if self.window is None else min(self.S, self.window + self.Q - 1)
        return 4.0 * self.K * self.D * self.B * seen

    def bounds(self) -> np.ndarray:
        return window_bounds(self.B, self.S, self.Q)

    def inputs(self) -> Any:
        tables, free = shuffled_tables(self.B, self.S)
        qs = [normal(2 + i, (self.B, self.Q, self.K, self.G, self.D)) for i in range(self.calls)]
        sinks = _sinks(self.K, self.G) if self.sinks else None
        return qs, _caches(free, self.K, self.D), jnp.asarray(tables), jnp.asarray(self.bounds()), sinks

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.B, self.Q, self.K, self.G, self.D), jnp.bfloat16)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        qs, (k, v), tables, bounds, sinks = inputs
        call = once(lambda *args: gqa_decode(*args, scale=self.D**-0.5, window=self.window))
        return [call(q, k, v, tables, bounds, sinks) for q in qs]

    def error(self, inputs: Any, results: Any) -> float:
        """Of some key heads of the last request in the last call."""
        qs, caches, tables, _, sinks = inputs
        heads = spread(self.K, 2)
        return _error(
            exact(qs[-1])[-1][:, heads], caches, tables[-1], heads, self.bounds()[-1], results[-1][-1],
            window=self.window, sinks=sinks,
        )  # fmt: skip


@dataclass(frozen=True)
class GqaPrefill(Case):
    """A chunk of P prompt tokens of one request after a cached prefix; heads, window and sinks as for GqaDecode."""

    P: int
    prefix: int
    K: int
    G: int
    D: int
    window: int | None = None
    sinks: bool = False
    calls: int = 4
    labels: ClassVar[tuple[str, ...]] = ("P", "prefix", "K", "G", "D", "window", "sinks")

    @property
    def label(self) -> dict[str, int]:
        return super().label | {"window": self.window or 0, "sinks": int(self.sinks)}

    @property
    def flops(self) -> float:
        """For the pairs that are not masked."""
        if self.window is None:
            pairs = causal_pairs(self.prefix, self.P)
        else:
            pairs = int(np.minimum(self.prefix + 1 + np.arange(self.P), self.window).sum())
        return 4.0 * self.D * self.K * self.G * pairs

    def inputs(self) -> Any:
        tables, free = shuffled_tables(1, self.prefix + self.P)
        qs = [normal(2 + i, (self.P, self.K, self.G, self.D)) for i in range(self.calls)]
        sinks = _sinks(self.K, self.G) if self.sinks else None
        return qs, _caches(free, self.K, self.D), chunk_places(tables, self.prefix, self.P), sinks

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.P, self.K, self.G, self.D), jnp.bfloat16)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        qs, caches, where, sinks = inputs
        call = once(lambda *args: gqa_prefill(*args, scale=self.D**-0.5, window=self.window))
        return [call(q, *caches, *where, sinks) for q in qs]

    def error(self, inputs: Any, results: Any) -> float:
        """Of some tokens and key heads of the last call."""
        qs, caches, (tables, *_), sinks = inputs
        tokens, heads = spread(self.P, 3), spread(self.K, 2)
        q = exact(qs[-1])[tokens][:, heads]
        return _error(
            q, caches, tables[0], heads, self.prefix + tokens + 1, results[-1][tokens],
            window=self.window, sinks=sinks,
        )  # fmt: skip


def _sinks(K: int, G: int) -> jax.Array:
    """As large as scores are."""
    return normal(3, (K, G)).astype(jnp.float32)


def _caches(free: np.ndarray, K: int, D: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values, NaN in the pages that `free` marks."""
    shape = (len(free), PAGE_SIZE, K * D)
    k, v = (paged_cache(i, shape, jnp.asarray(free)).reshape(len(free), PAGE_SIZE, K, D) for i in range(2))
    return k, v


def _error(
    q: np.ndarray,
    caches: Any,
    table: Any,
    heads: np.ndarray,
    bounds: np.ndarray,
    computed: Any,
    *,
    window: int | None,
    sinks: Any,
) -> float:
    """The largest error of what was computed for queries [Q, len(heads), G, D] that see the keys below bounds [Q].

    Args:
        window: they see the last ones alone. sinks: [K, G], each one more key without a value; or None.
    """
    K, D = caches[0].shape[2:]
    k, v = (exact(take(cache, table)).reshape(-1, K, D)[: max(bounds), heads] for cache in caches)
    scores = D**-0.5 * np.einsum("qkgd,skd->qkgs", q, k, optimize=True)
    hidden = np.arange(len(k)) >= bounds[:, None]
    if window is not None:
        hidden |= np.arange(len(k)) < bounds[:, None] - window
    scores[np.broadcast_to(hidden[:, None, None], scores.shape)] = -np.inf
    if sinks is not None:
        of_heads = np.broadcast_to(np.asarray(sinks, np.float64)[heads][None, :, :, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, of_heads], axis=-1)
    true = np.einsum("qkgs,skd->qkgd", softmax(scores)[..., : len(k)], v, optimize=True)
    return largest_error(exact(computed)[:, heads], true)


def _decode_rows(contexts: tuple[tuple[int, int], ...]) -> list[Case]:
    return [
        GqaDecode(B, S, heads.keys, heads.group, heads.columns, Q, heads.window, heads.sinks)
        for B, S in contexts
        for heads in HEADS.values()
        for Q in WINDOWS
    ]


DECODE: dict[str, list[Case]] = {
    "all": _decode_rows(CONTEXTS),
    "quick": _decode_rows(((1, 8192), (32, 4096))),
    "tiny": [
        GqaDecode(1, 64, 2, 2, 16, 1, calls=3),
        GqaDecode(2, 192, 2, 2, 16, 2, calls=3),
        GqaDecode(2, 192, 2, 2, 16, 2, window=70, sinks=True, calls=3),
    ],
}
PREFILL: dict[str, list[Case]] = {
    "all": [GqaPrefill(P, prefix, *heads) for P, prefix in CHUNKS for heads in HEADS.values()],
    "quick": [GqaPrefill(4096, 0, *HEADS["llama-3.1-8b"]), GqaPrefill(2048, 2048, *HEADS["llama-3.2-1b"])],
    "tiny": [
        GqaPrefill(64, 0, 2, 2, 16, calls=2),
        GqaPrefill(48, 80, 2, 2, 16, calls=2),
        GqaPrefill(48, 80, 2, 2, 16, window=20, sinks=True, calls=2),
    ],
}
