"""Rows of `bench kernel` for decode windows of linear attention."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal
from bench.kernel.case import Case, once
from pallas_kernels.gated_delta.api import replay_and_read
from pallas_kernels.gated_delta.reference import Tokens
from pallas_kernels.gated_delta.shapes import CALLS, HEADS, Heads


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
        K, R, dk, dv, fades = self.heads
        leading = (self.D, 2 * self.n, K)

        def tokens(call: int) -> Tokens:
            draw = functools.partial(normal, 4 * call)
            q, k = (normal(4 * call + i, (*leading, dk), dk**-0.5).astype(jnp.float32) for i in (0, 1))
            g, beta = (draw((*leading, R, size)).astype(jnp.float32) for size in (fades, 1))
            v = normal(4 * call + 2, (*leading, R, dv)).astype(jnp.float32)
            return Tokens(q * dk**-0.5, k, v, -jax.nn.softplus(g), jax.nn.sigmoid(beta[..., 0]))

        slots = jnp.asarray(1 + np.random.default_rng(0).permutation(self.D).astype(np.int32))
        return [tokens(call) for call in range(self.calls)], slots, jnp.full(self.D, self.n, jnp.int32)

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
        q, k, v, g, beta = (exact(x)[0] for x in each[-1])
        read, states = results[-1]
        K, R, dk, dv, _ = self.heads
        state, true = np.zeros((K, R, dv, dk)), []
        for i in range(2 * self.n):
            if i == self.n:
                written = state
            state = state * np.exp(g[i])[:, :, None]
            held = np.einsum("krvd,kd->krv", state, k[i])
            update = (v[i] - held) * beta[i][..., None]
            state = state + np.einsum("krv,kd->krvd", update, k[i])
            true.append(np.einsum("krvd,kd->krv", state, q[i]))
        errors = [
            largest_error(exact(read)[0], np.stack(true[self.n :])),
            largest_error(exact(states[int(slots[0]), 0]), written),
        ]
        return float(np.max(errors))  # NaN, if one is


GATED_DELTA: dict[str, list[Case]] = {
    "all": [GatedDelta(*call, heads) for heads in HEADS.values() for call in CALLS],
    "quick": [GatedDelta(*call, HEADS["Qwen3.5-35B-A3B"]) for call in ((1, 1), (32, 4), (128, 4))],
    "tiny": [GatedDelta(2, 2, Heads(1, 2, 16, 64, fades), 2) for fades in (1, 16)],
}
