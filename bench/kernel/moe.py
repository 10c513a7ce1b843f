"""Rows of `bench kernel` and `bench tune` for routed experts, with and without shared ones."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal, rounded, spread, take
from bench.kernel.case import Case, once
from pallas_kernels.moe.activation import Clamp
from pallas_kernels.moe.api import add_routed_experts, experts, logit_parts, splits_router
from pallas_kernels.moe.shapes import LAYERS, TOKENS
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.norm_linear.api import norm_linear, norm_linear_and_zero
from pallas_kernels.quant import activations
from pallas_kernels.quant.reference import dequantise
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL, INT4_G32, MXFP4, NVFP4, SCHEMES, VALUES
from pallas_kernels.quant.values import Quantised

MOONLIGHT = LAYERS["moonlight"]
# Mixtures beside grouped-query attention; gpt-oss has rows of its own.
GROUPED_QUERY = ("qwen3-30b-a3b", "glm-4.5-air", "minimax-m2")


@dataclass(frozen=True)
class Moe(Case):
    """T tokens through E routed experts of H x I, K of them each, in turn through more layers than any cache holds.

    All experts are equally likely. Each call has its own tokens and routes: deriving tables from the routes is part of
    a kernel's work.
    """

    T: int
    H: int = MOONLIGHT.hidden
    E: int = MOONLIGHT.experts
    K: int = MOONLIGHT.top_k
    I: int = MOONLIGHT.inner  # noqa: E741
    layers: int = 4
    calls: int = 8
    labels: ClassVar[tuple[str, ...]] = ("T", "H", "E", "K", "I")

    @property
    def flops(self) -> float:
        return 2.0 * self.T * self.K * 3 * self.H * self.I

    @property
    def bytes(self) -> float:
        """The weights of the experts that are touched, the mean over the calls."""
        touched = np.mean([len(np.unique(self.routes(i))) for i in range(self.calls)])
        return float(2 * 3 * self.H * self.I * touched)

    def routes(self, call: int) -> np.ndarray:
        """int32 [T, K]: distinct experts for each token."""
        rng = np.random.default_rng(call)
        return rng.permuted(np.tile(np.arange(self.E, dtype=np.int32), (self.T, 1)), axis=1)[:, : self.K]

    def weights(self, layer: int) -> ExpertWeights:
        return ExpertWeights(
            normal(2 * layer, (self.E, 2, self.I, self.H), self.H**-0.5),
            normal(2 * layer + 1, (self.E, self.H, self.I), self.I**-0.5),
        )

    def inputs(self) -> Any:
        layers = [self.weights(i) for i in range(self.layers)]
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
        return [call(x, layers[i % self.layers], weights, ids, live) for i, (x, weights, ids) in enumerate(tokens)]

    def numbers(self, weight: Any, chosen: jax.Array) -> np.ndarray:
        """Of the chosen experts."""
        return exact(take(weight, chosen))

    def activations(self, x: np.ndarray) -> np.ndarray:
        """What the matmuls get for these tokens."""
        return x

    def error(self, inputs: Any, results: Any) -> float:
        """Of the first and the last token of the last call."""
        layers, tokens, _ = inputs
        layer = layers[(self.calls - 1) % self.layers]
        x, weights, ids = (np.asarray(array) for array in tokens[-1])
        errors = []
        for token in spread(self.T, 2):
            each = self.chosen_mlps(layer, exact(x[token]), jnp.asarray(ids[token]))
            errors.append(largest_error(exact(results[-1])[token], weights[token] @ each))
        return float(np.max(errors))  # NaN, if one is

    def chosen_mlps(self, layer: ExpertWeights, x: np.ndarray, chosen: jax.Array) -> np.ndarray:
        """What each of a token's experts [K] makes of it, [K, H]."""
        gate_up, down = (self.numbers(weight, chosen) for weight in (layer.gate_up, layer.down))
        gate, up = np.einsum("kgih,h->gki", gate_up, self.activations(x), optimize=True)
        inner = self.activations(gate / (1 + np.exp(-gate)) * up)
        return np.einsum("ki,khi->kh", inner, down, optimize=True)


@dataclass(frozen=True)
class MoeClamped(Moe):
    """The same with biases and a clamp, as gpt-oss has them."""

    def weights(self, layer: int) -> ExpertWeights:
        biases = normal(300 + layer, (self.E, 2, self.I)), normal(400 + layer, (self.E, self.H))
        return dataclasses.replace(super().weights(layer), biases=biases, clamp=Clamp())

    def chosen_mlps(self, layer: ExpertWeights, x: np.ndarray, chosen: jax.Array) -> np.ndarray:
        assert layer.biases is not None
        gate_up, down, of_inner, of_out = (
            self.numbers(weight, chosen) for weight in (layer.gate_up, layer.down, *layer.biases)
        )
        gate, up = np.einsum("kgih,h->gki", gate_up, x, optimize=True) + np.swapaxes(of_inner, 0, 1)
        clamp = Clamp()
        gate, up = np.minimum(gate, clamp.limit), np.clip(up, -clamp.limit, clamp.limit)
        inner = (up + 1) * gate / (1 + np.exp(-clamp.alpha * gate))
        return np.einsum("ki,khi->kh", inner, down, optimize=True) + of_out


@dataclass(frozen=True)
class MoeShared(Moe):
    """The same with shared experts, of the joint inner size of `pieces` routed ones."""

    pieces: int = MOONLIGHT.shared // MOONLIGHT.inner

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
            call(x, dataclasses.replace(layers[j], shared=shared[j]), weights, ids, live)
            for j, (x, weights, ids) in zip(at, tokens, strict=True)
        ]

    def error(self, inputs: Any, results: Any) -> float:
        (layers, tokens, live), shared = inputs
        gate_up, down = shared[(self.calls - 1) % self.layers]
        rows = spread(self.T, 2)
        gate, up = np.einsum("gih,th->gti", exact(gate_up), exact(tokens[-1][0])[rows], optimize=True)
        beside = np.zeros((self.T, self.H))
        beside[rows] = gate / (1 + np.exp(-gate)) * up @ exact(down).T
        # What remains without the shared experts is the routed ones'.
        return super().error((layers, tokens, live), [exact(results[-1]) - beside])


@dataclass(frozen=True)
class MoeQuantised(Moe):
    """The same with weights in a scheme: all codes are equally likely, and the scales are of one size."""

    scheme: str = INT4_G32.name

    @property
    def bytes(self) -> float:
        """As a part of what bfloat16 has."""
        arrays = SCHEMES[self.scheme].arrays((self.H, self.I)).values()
        size = sum(array.size * array.dtype.itemsize for array in arrays)
        return super().bytes * size / (2 * self.H * self.I)

    def weights(self, layer: int) -> ExpertWeights:
        gate_up = self._drawn(2 * layer, (self.E, 2, self.I, self.H))
        return ExpertWeights(gate_up, self._drawn(2 * layer + 1, (self.E, self.H, self.I)))

    def _drawn(self, seed: int, shape: tuple[int, ...]) -> Quantised:
        scheme = SCHEMES[self.scheme]
        codes = jax.random.bits(jax.random.key(seed, impl="rbg"), scheme.codes_shape(shape), jnp.uint8)
        if scheme.values == "e4m3":  # but for the two that are no numbers
            codes = jax.lax.bitcast_convert_type(jnp.where(codes & 0x7F == 0x7F, codes - 1, codes), scheme.codes)
        deviation = shape[-1] ** -0.5 / np.sqrt(np.nanmean(VALUES[scheme.values].astype(np.float64) ** 2))
        factor = jnp.full(shape[:-2], deviation, jnp.float32) if scheme.factor else None
        number = 127 + np.round(np.log2(deviation)) if scheme.scale == np.uint8 else 1.0 if scheme.factor else deviation
        return Quantised(codes, jnp.full(scheme.scale_shape(shape), number, scheme.scale), scheme, factor)

    def activations(self, x: np.ndarray) -> np.ndarray:
        """On a CPU the reference takes them as they are."""
        if SCHEMES[self.scheme].values != "e4m3" or jax.default_backend() != "gpu":
            return x
        codes = activations.quantise(jnp.asarray(np.atleast_2d(x), jnp.float32))
        return exact(activations.dequantise(codes)).reshape(x.shape)

    def numbers(self, weight: Any, chosen: jax.Array) -> np.ndarray:
        return exact(dequantise(jax.tree.map(lambda array: take(array, chosen), weight), jnp.bfloat16))


@dataclass(frozen=True)
class MoeBlock(Moe):
    """The whole second half of a block without shared experts: sum, norm, router, experts, sum, and the norm after it."""

    # Of a sigmoid routing without groups.
    scale: float = 2.446

    def inputs(self) -> Any:
        layers, tokens, live = super().inputs()
        router = normal(200, (self.E, self.H), self.H**-0.5).astype(jnp.float32)
        gain, bias = normal(201, (self.H,)), jnp.zeros(self.E)
        streams = [(x, normal(2000 + i, x.shape)) for i, (x, _, _) in enumerate(tokens)]
        return layers, streams, live, router, gain, bias

    def results(self) -> Any:
        return [(jax.ShapeDtypeStruct((self.T, self.H), jnp.bfloat16),) * 2] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        layers, streams, live, router, gain, bias = inputs

        def block(parameters: ExpertWeights, x: Any, attended: Any) -> tuple[jax.Array, jax.Array]:
            split = splits_router(x, router)
            weights = () if split else (router,)
            x, normed, made, zero = norm_linear_and_zero(x, gain, weights, eps=1e-6, delta=attended)
            logits, zero = logit_parts(normed, router) if split else (made[0], zero)
            out, following = add_routed_experts(
                x, normed, parameters, logits, bias, live, (gain, 1e-6), zero,
                top_k=self.K, num_groups=1, top_groups=1, normalize=True, scale=self.scale,
            )  # fmt: skip
            return out, norm_linear(out, gain, (), eps=1e-6)[1] if following is None else following

        call = once(block)
        return [call(layers[i % self.layers], *stream) for i, stream in enumerate(streams)]

    def error(self, inputs: Any, results: Any) -> float:
        """Of the first and the last token of the last call."""
        layers, streams, _, router, gain, _ = inputs
        layer = layers[(self.calls - 1) % self.layers]
        rows = spread(self.T, 2)
        x, attended = (exact(np.asarray(array)[rows]) for array in streams[-1])
        x = rounded(x + attended)

        def norm(row: np.ndarray) -> np.ndarray:
            return rounded(rounded(row / np.sqrt(np.mean(row**2) + 1e-6)) * exact(gain))

        errors = []
        for token, row in zip(rows, x, strict=True):
            normed = norm(row)
            scores = 1 / (1 + np.exp(-(exact(router) @ normed)))
            ids = np.argsort(-scores, kind="stable")[: self.K]
            weights = self.scale * scores[ids] / scores[ids].sum()
            gate, up = np.einsum("kgih,h->gki", exact(take(layer.gate_up, jnp.asarray(ids))), normed, optimize=True)
            each = np.einsum("ki,khi->kh", gate / (1 + np.exp(-gate)) * up, exact(take(layer.down, jnp.asarray(ids))))
            true = row + weights @ each
            out, following = (exact(result[token]) for result in results[-1])
            errors += [largest_error(out, true), largest_error(following, norm(true))]
        return float(np.max(errors))


MOE: dict[str, list[Case]] = {
    "all": [
        *(Moe(T) for T in TOKENS),
        *(Moe(T, *LAYERS[name][:4], layers=2) for name in GROUPED_QUERY for T in (1, 32, 128, 2048)),
        *(MoeClamped(T, *LAYERS["gpt-oss-20b"][:4], layers=2) for T in (1, 32, 128, 2048)),
    ],
    "quick": [Moe(T) for T in (1, 32, 512)],
    "tiny": [*(Moe(T, 32, 8, 2, 16, 2, 4) for T in (1, 6)), MoeClamped(6, 32, 8, 2, 16, 2, 4)],
}
# Quantised weights: with codes of four bits, and in FP8 (with activations in FP8).
MOE_QUANTISED: dict[str, dict[str, list[Case]]] = {
    f"moe_{scheme}": {
        "all": [MoeQuantised(T, scheme=name) for T in TOKENS],
        "quick": [MoeQuantised(T, scheme=name) for T in (1, 32, 512)],
        "tiny": [MoeQuantised(T, 32, 8, 2, 32, 2, 4, scheme=name) for T in (1, 6)],
    }
    for scheme, name in (
        ("int4", INT4_G32.name),
        ("nvfp4", NVFP4.name),
        ("mxfp4", MXFP4.name),
        ("fp8", FP8_BLOCK.name),
        ("fp8_channel", FP8_CHANNEL.name),
    )
}
MOE_BLOCK: dict[str, list[Case]] = {
    "all": [MoeBlock(T) for T in (1, 4, 16, 32, 64, 128)],
    "quick": [MoeBlock(32)],
    "tiny": [MoeBlock(6, 32, 8, 2, 16, 2, 4)],
}
