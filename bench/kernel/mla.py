"""Rows of `bench kernel` for MLA: absorbed over decode windows, decompressed over prompt chunks."""

from dataclasses import dataclass, replace
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
    rounded,
    shuffled_tables,
    softmax,
    spread,
    take,
    window_bounds,
)
from bench.kernel.case import Case, once
from jaxspec.config import PAGE_SIZE
from pallas_kernels.latents import GROUP, dequantise, quantise
from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.mla_decode.reference import values
from pallas_kernels.mla_decode.shapes import (
    CACHED,
    CONTEXTS,
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    SCALE,
    VALUE,
    WIDE_HEADS,
    WIDE_NOPE,
    WIDE_VALUE,
    WINDOWS,
)
from pallas_kernels.mla_prefill.api import mla_prefill
from pallas_kernels.mla_prefill.shapes import CHUNKS


@dataclass(frozen=True)
class MlaDecode(Case):
    """B requests of S cached tokens, H query heads on the one latent head, windows of Q tokens."""

    B: int
    S: int
    H: int
    Q: int
    calls: int = 20
    labels: ClassVar[tuple[str, ...]] = ("B", "S", "H", "Q")

    @property
    def flops(self) -> float:
        return 2.0 * self.H * (CACHED + LATENT) * float(self.bounds().sum())

    @property
    def bytes(self) -> float:
        return 2.0 * CACHED * self.B * self.S

    def bounds(self) -> np.ndarray:
        return window_bounds(self.B, self.S, self.Q)

    def inputs(self) -> Any:
        tables, free = shuffled_tables(self.B, self.S)
        cache = paged_cache(0, (len(free), PAGE_SIZE, CACHED), jnp.asarray(free))
        qs = [normal(1 + i, (self.B, self.Q, self.H, CACHED)) for i in range(self.calls)]
        return qs, cache, jnp.asarray(tables), jnp.asarray(self.bounds())

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.B, self.Q, self.H, LATENT), jnp.bfloat16)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        qs, cache, tables, bounds = inputs
        call = once(lambda *args: mla_decode(*args, scale=SCALE, value_dim=LATENT))
        return [call(q, cache, tables, bounds) for q in qs]

    def error(self, inputs: Any, results: Any) -> float:
        """Of some heads of the last request in the last call."""
        heads = spread(self.H, 16)
        return largest_error(exact(results[-1])[-1][:, heads], self.attended(inputs, heads))

    def attended(self, inputs: Any, heads: np.ndarray) -> np.ndarray:
        """The exact result [Q, heads, LATENT] of the last request in the last call."""
        qs, cache, tables, _ = inputs
        pages = jax.tree.map(lambda array: take(array, tables[-1]), cache)
        keys = exact(dequantise(pages, jnp.bfloat16)).reshape(-1, CACHED)[: self.S]
        q = exact(qs[-1])[-1][:, heads]
        scores = SCALE * np.einsum("qhc,sc->qhs", q, keys, optimize=True)
        scores[np.broadcast_to((np.arange(self.S) >= self.bounds()[-1][:, None])[:, None], scores.shape)] = -np.inf
        return np.einsum("qhs,sv->qhv", softmax(scores), keys[:, :LATENT], optimize=True)


@dataclass(frozen=True)
class MlaDecodeFp8(MlaDecode):
    """The same with latents in FP8 (1), or in bfloat16 (0) to compare with."""

    fp8: int = 1
    labels: ClassVar[tuple[str, ...]] = ("B", "S", "H", "Q", "fp8")

    @property
    def bytes(self) -> float:
        return (CACHED + ROPE + 4.0 * LATENT / GROUP) * self.B * self.S if self.fp8 else super().bytes

    def inputs(self) -> Any:
        qs, cache, *rest = super().inputs()
        return qs, quantise(cache[..., :LATENT], cache[..., LATENT:]) if self.fp8 else cache, *rest


@dataclass(frozen=True)
class MlaValues(MlaDecode):
    """The same with the up-projection of values, in turn by many layers."""

    V: int = VALUE

    def inputs(self) -> Any:
        weights = [normal(500 + i, (self.H, self.V, LATENT), LATENT**-0.5) for i in range(self.calls)]
        return super().inputs(), weights

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.B, self.Q, self.H, self.V), jnp.bfloat16)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        (qs, cache, tables, bounds), weights = inputs
        call = once(lambda *args: mla_decode(*args, scale=SCALE, value_dim=LATENT))
        return [call(q, cache, tables, bounds, w_uv) for q, w_uv in zip(qs, weights, strict=True)]

    def error(self, inputs: Any, results: Any) -> float:
        attention, weights = inputs
        heads = spread(self.H, 16)
        true = np.einsum("qhl,hvl->qhv", self.attended(attention, heads), exact(weights[-1])[heads], optimize=True)
        return largest_error(exact(results[-1])[-1][:, heads], true)


@dataclass(frozen=True)
class MlaValuesWith(MlaValues):
    """The same with the values from our kernels (1) or from XLA's matmul (0), whatever is chosen for the device."""

    kernel: int = 1
    labels: ClassVar[tuple[str, ...]] = ("B", "H", "Q", "V", "kernel")

    def many(self, inputs: Any, results: Any) -> Any:
        if self.kernel:
            return super().many(inputs, results)
        (qs, cache, tables, bounds), weights = inputs
        attend = once(lambda *args: mla_decode(*args, scale=SCALE, value_dim=LATENT))
        project = once(values)
        return [project(attend(q, cache, tables, bounds), w_uv) for q, w_uv in zip(qs, weights, strict=True)]


@dataclass(frozen=True)
class MlaPrefill(Case):
    """A chunk of P prompt tokens of one request after a cached prefix, H heads."""

    P: int
    prefix: int
    H: int = HEADS["moonlight"]
    calls: int = 4
    nope: int = NOPE
    value: int = VALUE
    labels: ClassVar[tuple[str, ...]] = ("P", "prefix", "H")

    @property
    def flops(self) -> float:
        """Of the decompressed form, for the pairs that are not masked; decompressing is not counted."""
        return 2.0 * (self.nope + ROPE + self.value) * self.H * causal_pairs(self.prefix, self.P)

    def inputs(self) -> Any:
        """Each call has its own cache and weights: XLA would decompress common ones once for all calls."""
        tables, free = shuffled_tables(1, self.prefix + self.P)
        marked = jnp.asarray(free)
        each = [
            (
                normal(5 * i, (self.P, self.H, self.nope)),
                normal(5 * i + 1, (self.P, self.H, ROPE)),
                normal(5 * i + 2, (self.H, self.nope, LATENT), LATENT**-0.5),
                normal(5 * i + 3, (self.H, self.value, LATENT), LATENT**-0.5),
                paged_cache(5 * i + 4, (len(free), PAGE_SIZE, CACHED), marked),
            )
            for i in range(self.calls)
        ]
        return each, chunk_places(tables, self.prefix, self.P)

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.P, self.H, self.value), jnp.bfloat16)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        each, where = inputs
        call = once(lambda *args: mla_prefill(*args, scale=SCALE))
        return [call(*own, *where) for own in each]

    def error(self, inputs: Any, results: Any) -> float:
        """Of some tokens and heads of the last call."""
        each, (tables, *_) = inputs
        q_nope, q_rope, w_uk, w_uv, cache = each[-1]
        tokens, heads = spread(self.P, 3), spread(self.H, 2)
        total = self.prefix + self.P
        cached = exact(take(cache, tables[0])).reshape(-1, CACHED)[:total]
        keys = rounded(np.einsum("sl,hdl->hsd", cached[:, :LATENT], exact(w_uk)[heads], optimize=True))
        values = rounded(np.einsum("sl,hvl->hsv", cached[:, :LATENT], exact(w_uv)[heads], optimize=True))
        scores = np.einsum("phd,hsd->phs", exact(q_nope)[tokens][:, heads], keys, optimize=True)
        scores += np.einsum("phr,sr->phs", exact(q_rope)[tokens][:, heads], cached[:, LATENT:], optimize=True)
        masked = np.arange(total) > self.prefix + tokens[:, None]
        scores[np.broadcast_to(masked[:, None], scores.shape)] = -np.inf
        true = np.einsum("phs,hsv->phv", softmax(SCALE * scores), values, optimize=True)
        return largest_error(exact(results[-1])[tokens][:, heads], true)


def _decode_rows(contexts: tuple[tuple[int, int], ...], windows: tuple[int, ...] = WINDOWS) -> list[Case]:
    """With so many calls that launching does not count: a host may need 0.3 ms for one of our executables."""
    heads = (HEADS["moonlight"], HEADS["deepseek-v3"])
    cases = [MlaDecode(B, S, H, Q) for B, S in contexts for H in heads for Q in windows]
    return [replace(case, calls=8 if case.flops > 2.5e11 else 60 if case.B * case.S <= 8192 else 20) for case in cases]


DECODE: dict[str, list[Case]] = {
    "all": _decode_rows(CONTEXTS),
    "quick": _decode_rows(((1, 8192), (32, 4096), (128, 4096))),
    "tiny": [MlaDecode(1, 64, 4, 1, calls=3), MlaDecode(2, 192, 4, 2, calls=3)],
}
SHORT = ((32, 1024), (128, 1024))
DECODE_FP8: dict[str, list[Case]] = {
    rows: [MlaDecodeFp8(**vars(case), fp8=fp8) for case in cases for fp8 in (1, 0)]
    for rows, cases in {
        # Short contexts too, which own items split more often (`items_of_a_block`).
        "all": _decode_rows(((1, 1024), (1, 8192), *SHORT, (32, 4096), (32, 8192), (128, 4096), (128, 8192))),
        "quick": _decode_rows(((1, 1024), *SHORT, (32, 8192), (128, 8192)), (1,)),
        "tiny": DECODE["tiny"],
    }.items()
}
# Heads, value columns, and requests with the tokens of their windows.
_VALUES = [
    (H, V, B, Q)
    for H, V in ((HEADS["moonlight"], VALUE), (24, WIDE_VALUE))
    for B, Q in ((8, 1), (32, 1), (64, 1), (128, 1), (32, 4), (128, 4))
]
VALUES: dict[str, list[Case]] = {
    "all": [MlaValuesWith(B, 1024, H, Q, 8, V, k) for H, V, B, Q in _VALUES for k in (1, 0)],
    "quick": [MlaValuesWith(32, 1024, HEADS["moonlight"], 1, 8, kernel=k) for k in (1, 0)],
    "tiny": [MlaValuesWith(2, 70, 2, 4, 2, 64, k) for k in (1, 0)],
}
_GLM = {"H": WIDE_HEADS["glm-4.7-flash"], "nope": WIDE_NOPE, "value": WIDE_VALUE}
PREFILL: dict[str, list[Case]] = {
    "all": [*(MlaPrefill(P, prefix) for P, prefix in CHUNKS), *(MlaPrefill(*chunk, **_GLM) for chunk in CHUNKS[::3])],
    "quick": [MlaPrefill(4096, 0), MlaPrefill(2048, 2048)],
    "tiny": [MlaPrefill(64, 0, 2, 2), MlaPrefill(48, 80, 2, 2)],
}
