"""Rows of `bench kernel` for linear attention: decode windows, and prompts in chunks."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal
from bench.kernel.case import Case, once
from pallas_kernels import tuning
from pallas_kernels.gated_delta.api import read_prompts, replay_and_read
from pallas_kernels.gated_delta.chunks import cut
from pallas_kernels.gated_delta.reference import Tokens
from pallas_kernels.gated_delta.shapes import CALLS, HEADS, PROMPTS, Heads


def tokens_of(call: int, heads: Heads, *leading: int) -> Tokens:
    """Random tokens [*leading, ...] of one call."""
    K, R, dk, dv, fades = heads
    draw = functools.partial(normal, 4 * call)
    q, k = (normal(4 * call + i, (*leading, K, dk), dk**-0.5).astype(jnp.float32) for i in (0, 1))
    g, beta = (draw((*leading, K, R, size)).astype(jnp.float32) for size in (fades, 1))
    v = normal(4 * call + 2, (*leading, K, R, dv)).astype(jnp.float32)
    return Tokens(q * dk**-0.5, k, v, -jax.nn.softplus(g), jax.nn.sigmoid(beta[..., 0]))


@dataclass(frozen=True)
class GatedDelta(Case):
    """A window of n tokens of each row after one that was accepted whole, in turn by layers with donated states."""

    D: int
    n: int
    heads: Heads
    calls: int = 30
    labels: ClassVar[tuple[str, ...]] = ("D", "n", "fades")
    fill: ClassVar[float] = 0.0

    @property
    def fades(self) -> int:
        return self.heads.fades

    @property
    def bytes(self) -> float:
        """The states, read and written."""
        K, R, dk, dv, _ = self.heads
        return 2.0 * 4 * self.D * K * R * dk * dv

    def inputs(self) -> Any:
        slots = jnp.asarray(1 + np.random.default_rng(0).permutation(self.D).astype(np.int32))
        each = [tokens_of(call, self.heads, self.D, 2 * self.n) for call in range(self.calls)]
        return each, slots, jnp.full(self.D, self.n, jnp.int32)

    def results(self) -> Any:
        K, R, dk, dv, _ = self.heads
        read = jax.ShapeDtypeStruct((self.D, self.n, K, R, dv), jnp.float32)
        states = jax.ShapeDtypeStruct((self.D + 1, 1, K, R, dv, dk), jnp.float32)
        return [(read, states)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        each, slots, counts = inputs
        call = once(functools.partial(replay_and_read, replayed=self.n))
        return [call(states, slots, counts, tokens) for tokens, (_, states) in zip(each, results, strict=True)]

    def error(self, inputs: Any, results: Any) -> float:
        """Of the first row of the last call, from a state of zeros."""
        each, slots, _ = inputs
        past, window = ([exact(x)[0, part] for x in each[-1]] for part in (slice(self.n), slice(self.n, None)))
        read, states = results[-1]
        K, R, dk, dv, _ = self.heads
        _, written = by_definition(np.zeros((K, R, dv, dk)), past)
        true, _ = by_definition(written, window)
        errors = [largest_error(exact(read)[0], true), largest_error(exact(states[int(slots[0]), 0]), written)]
        return float(np.max(errors))  # NaN, if one is


@dataclass(frozen=True)
class GatedDeltaPrompts(Case):
    """B prompts of P tokens, in turn by layers with donated states."""

    B: int
    P: int
    heads: Heads
    calls: int = 4
    labels: ClassVar[tuple[str, ...]] = ("B", "P", "fades")
    fill: ClassVar[float] = 0.0

    @property
    def fades(self) -> int:
        return self.heads.fades

    @property
    def bytes(self) -> float:
        """Queries, keys and values, what is read, and the states, read and written."""
        K, R, dk, dv, _ = self.heads
        return 2.0 * 4 * self.B * K * (self.P * (dk + R * dv) + R * dk * dv)

    def inputs(self) -> Any:
        each = [tokens_of(call, self.heads, self.B * self.P) for call in range(self.calls)]
        return each, jnp.repeat(jnp.arange(self.B), self.P), jnp.full(self.B, self.P)

    def results(self) -> Any:
        K, R, dk, dv, _ = self.heads
        read = jax.ShapeDtypeStruct((self.B * self.P, K, R, dv), jnp.float32)
        return [(read, jax.ShapeDtypeStruct((self.B, K, R, dv, dk), jnp.float32))] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        each, rows, lengths = inputs
        call = once(functools.partial(read_prompts))  # a function of this case alone: traced under its tuning
        return [call(states, tokens, cut(rows, lengths)) for tokens, (_, states) in zip(each, results, strict=True)]

    def error(self, inputs: Any, results: Any) -> float:
        """Of the first key head of the last prompt of the last call, from a state of zeros."""
        each, *_ = inputs
        _, R, dk, dv, _ = self.heads
        read, states = results[-1]
        true, state = by_definition(np.zeros((1, R, dv, dk)), [exact(x[-self.P :, :1]) for x in each[-1]])
        errors = [largest_error(exact(read[-self.P :, :1]), true), largest_error(exact(states[-1, :1]), state)]
        return float(np.max(errors))


@dataclass(frozen=True)
class PromptsWith(GatedDeltaPrompts):
    """The same with the kernel (1) or in plain XLA (0), whatever is chosen for the device."""

    kernel: int = 1
    labels: ClassVar[tuple[str, ...]] = ("B", "P", "fades", "kernel")

    def many(self, inputs: Any, results: Any) -> Any:
        with tuning.use(dataclasses.replace(tuning.current(), delta_chunk_kernel=bool(self.kernel))):
            return super().many(inputs, results)


def by_definition(state: np.ndarray, tokens: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What the tokens of one row, the fields [n, ...] of `Tokens`, read, and its state [K, R, dv, dk] after them."""
    read = []
    for q, k, v, g, beta in zip(*tokens, strict=True):
        state = state * np.exp(g)[:, :, None]
        held = np.einsum("krvd,kd->krv", state, k)
        update = (v - held) * beta[..., None]
        state = state + np.einsum("krv,kd->krvd", update, k)
        read.append(np.einsum("krvd,kd->krv", state, q))
    return np.stack(read), state


GATED_DELTA: dict[str, list[Case]] = {
    "all": [GatedDelta(*call, heads) for heads in HEADS.values() for call in CALLS],
    "quick": [GatedDelta(*call, HEADS["Qwen3.5-35B-A3B"]) for call in ((1, 1), (32, 4), (128, 4))],
    "tiny": [GatedDelta(2, 2, Heads(1, 2, 16, 64, fades), 2) for fades in (1, 16)],
}

GATED_DELTA_PROMPTS: dict[str, list[Case]] = {
    "all": [
        PromptsWith(*call, heads, kernel=kernel) for heads in HEADS.values() for call in PROMPTS for kernel in (0, 1)
    ],
    "quick": [PromptsWith(1, 2048, HEADS["Qwen3.5-35B-A3B"], kernel=kernel) for kernel in (0, 1)],
    "tiny": [PromptsWith(2, 70, Heads(1, 2, 16, 64, fades), 2, kernel) for fades, kernel in ((1, 0), (1, 1), (16, 1))],
}
