"""The other rows of `bench kernel`: routed experts, writing tokens into the latent cache, and absorbing queries."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.case import Case, exact, largest_error, normal, once, spread, take
from bench.kernel.mla import CACHED, LATENT, NOPE, ROPE
from jaxspec.config import PAGE_SIZE
from pallas_kernels.kv_write.api import write_latent
from pallas_kernels.mla_query.api import mla_query
from pallas_kernels.moe.api import experts
from pallas_kernels.norm_linear.api import norm_linear


@dataclass(frozen=True)
class Moe(Case):
    """T tokens through E routed experts of H x I, K of them each, as many layers in turn as no cache holds.

    All experts are equally likely. Every call has its own tokens and routes: what a kernel derives from the routes is
    a part of its work.
    """

    T: int
    H: int = 2048
    E: int = 64
    K: int = 6
    I: int = 1408  # noqa: E741
    layers: int = 4
    calls: int = 8
    labels: ClassVar[tuple[str, ...]] = ("T",)

    @property
    def flops(self) -> float:
        return 2.0 * self.T * self.K * 3 * self.H * self.I

    @property
    def bytes(self) -> float:
        """The weights of the experts that are touched, the mean of the calls."""
        touched = np.mean([len(np.unique(self.routes(i))) for i in range(self.calls)])
        return float(2 * 3 * self.H * self.I * touched)

    def routes(self, call: int) -> np.ndarray:
        """int32 [T, K]: distinct experts for each token."""
        rng = np.random.default_rng(call)
        return rng.permuted(np.tile(np.arange(self.E, dtype=np.int32), (self.T, 1)), axis=1)[:, : self.K]

    def inputs(self) -> Any:
        layers = [
            (
                normal(2 * i, (self.E, 2, self.I, self.H), self.H**-0.5),
                normal(2 * i + 1, (self.E, self.H, self.I), self.I**-0.5),
            )
            for i in range(self.layers)
        ]
        tokens = []
        for i in range(self.calls):
            weights = np.random.default_rng(1000 + i).dirichlet(np.ones(self.K), self.T).astype(np.float32)
            tokens.append((normal(1000 + i, (self.T, self.H)), jnp.asarray(weights), jnp.asarray(self.routes(i))))
        return layers, tokens, jnp.asarray(np.ones(self.T, bool))

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.T, self.H), jnp.bfloat16)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        layers, tokens, live = inputs
        call = once(experts)
        return [call(x, *layers[i % self.layers], weights, ids, live) for i, (x, weights, ids) in enumerate(tokens)]

    def error(self, inputs: Any, results: Any) -> float:
        """Of the first and the last token of the last call."""
        layers, tokens, _ = inputs
        gate_up, down = layers[(self.calls - 1) % self.layers]
        x, weights, ids = (np.asarray(array) for array in tokens[-1])
        errors = []
        for token in spread(self.T, 2):
            chosen = jnp.asarray(ids[token])
            gate, up = np.einsum("kgih,h->gki", exact(take(gate_up, chosen)), exact(x[token]), optimize=True)
            inner = gate / (1 + np.exp(-gate)) * up
            each = np.einsum("ki,khi->kh", inner, exact(take(down, chosen)), optimize=True)
            errors.append(largest_error(exact(results[-1])[token], weights[token] @ each))
        return float(np.max(errors))  # NaN, if one is


@dataclass(frozen=True)
class MoeShared(Moe):
    """The same with shared experts of a joint inner size of `pieces` routed ones."""

    pieces: int = 2

    @property
    def bytes(self) -> float:
        return super().bytes + float(2 * 3 * self.H * self.I * self.pieces)

    def inputs(self) -> Any:
        inner = self.pieces * self.I
        shared = [
            (normal(100 + 2 * i, (2, inner, self.H), self.H**-0.5), normal(101 + 2 * i, (self.H, inner), inner**-0.5))
            for i in range(self.layers)
        ]
        return super().inputs(), shared

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        (layers, tokens, live), shared = inputs
        call = once(experts)
        at = [i % self.layers for i in range(self.calls)]
        return [
            call(x, *layers[j], weights, ids, live, shared[j]) for j, (x, weights, ids) in zip(at, tokens, strict=True)
        ]

    def error(self, inputs: Any, results: Any) -> float:
        (layers, tokens, live), shared = inputs
        gate_up, down = shared[(self.calls - 1) % self.layers]
        rows = spread(self.T, 2)
        gate, up = np.einsum("gih,th->gti", exact(gate_up), exact(tokens[-1][0])[rows], optimize=True)
        beside = np.zeros((self.T, self.H))
        beside[rows] = gate / (1 + np.exp(-gate)) * up @ exact(down).T
        # Without the shared experts, what is left is the routed ones'.
        return super().error((layers, tokens, live), [exact(results[-1]) - beside])


@dataclass(frozen=True)
class NormLinear(Case):
    """T tokens normed, and their projections to the queries of 16 heads and to a latent, by many layers in turn."""

    T: int
    H: int = 2048
    outs: tuple[int, ...] = (16 * 192, CACHED)
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
        """Of all tokens of the last call; infinite if anything was written elsewhere, or not written."""
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


@dataclass(frozen=True)
class MlaQuery(Case):
    """T tokens of H heads taken into latent space and rotated, by as many layers in turn as no cache holds."""

    T: int
    H: int = 16
    layers: int = 40
    calls: int = 40
    labels: ClassVar[tuple[str, ...]] = ("T", "H")

    @property
    def flops(self) -> float:
        return 2.0 * self.T * self.H * NOPE * LATENT

    @property
    def bytes(self) -> float:
        return 2.0 * self.H * (NOPE * LATENT + self.T * (NOPE + ROPE + CACHED))

    def inputs(self) -> Any:
        angles = np.random.default_rng(1).uniform(0, 6, (self.T, ROPE // 2))
        cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        weights = [normal(i, (self.H, NOPE, LATENT), NOPE**-0.5) for i in range(self.layers)]
        return [normal(1000 + i, (self.T, self.H, NOPE + ROPE)) for i in range(self.calls)], weights, cos, sin

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
        absorbed = np.einsum("thd,hdl->thl", q[..., :NOPE], w_uk, optimize=True)
        turns = (exact(cos) + 1j * exact(sin))[tokens, None]
        z = (q[..., NOPE : NOPE + ROPE // 2] + 1j * q[..., NOPE + ROPE // 2 :]) * turns
        parts = [absorbed, np.concatenate([z.real, z.imag], axis=-1)]
        got = np.split(exact(results[-1])[tokens], [LATENT], axis=-1)
        return float(np.max([largest_error(a, b) for a, b in zip(got, parts, strict=True)]))  # NaN, if one is


MOE: dict[str, list[Case]] = {
    "all": [Moe(T) for T in (1, 8, 32, 64, 128, 512, 2048)],
    "quick": [Moe(T) for T in (1, 32, 512)],
    "tiny": [Moe(T, 32, 8, 2, 16, 2, 4) for T in (1, 6)],
}
KV_WRITE: dict[str, list[Case]] = {
    "all": [KvWrite(T) for T in (1, 32, 128, 2048)],
    "quick": [KvWrite(T) for T in (1, 128)],
    "tiny": [KvWrite(T, 4, 3) for T in (1, 5)],
}
NORM_LINEAR: dict[str, list[Case]] = {
    "all": [NormLinear(T) for T in (1, 2, 4, 8)],
    "quick": [NormLinear(1)],
    "tiny": [NormLinear(T, 32, (8, 4), 3) for T in (1, 3)],
}
MLA_QUERY: dict[str, list[Case]] = {
    "all": [MlaQuery(T) for T in (1, 4, 8, 32, 128, 512, 1024)] + [MlaQuery(128, 128, 5)],
    "quick": [MlaQuery(T) for T in (1, 32)],
    "tiny": [MlaQuery(T, 2, 2, 3) for T in (1, 5)],
}
