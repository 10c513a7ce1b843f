"""Layers of the gated delta rule (`gated_delta`): linear attention with a state of fixed size a request.

What its heads read and forget, and how their result is gated, is the business of each kind: `gated_delta_net`, `kimi_delta`.

A state cannot forget a rejected draft, so no window is ever written into one. A slot keeps its state up to the token at
`start`, and beside it what the layer read of each token of its newest window. The next step knows from its positions how
many of these were accepted: it first repeats them on the state, and then runs its own window from there.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxspec import comm
from jaxspec.models.cache import CacheArray, CacheSpec, LayerCache
from jaxspec.models.gated_delta import convolve, unit
from jaxspec.models.layers import RMSNorm
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.params import Declare
from pallas_kernels.gated_delta.api import read_prompts, replay_and_read, unsupported_reason
from pallas_kernels.gated_delta.chunks import cut
from pallas_kernels.gated_delta.reference import Tokens


@dataclass(frozen=True)
class DeltaSpec:
    """Sizes of a layer with K key heads, each of which serves as many consecutive value heads.

    Attributes:
        taps: tokens that the causal convolution of queries, keys and values sees, the own one included.
        norm_eps: of the norm of what a head reads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm_eps: float

    rope = None

    @property
    def repeats(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def columns(self) -> int:
        """Of a key head that are convolved: its query, its key and its value heads."""
        return 2 * self.key_dim + self.repeats * self.value_dim

    @property
    def decays(self) -> int:
        """Numbers that say how much of a head's state fades: one for all of it, or one for each channel of its keys."""
        return 1


class Inputs(NamedTuple):
    """What a layer reads of T tokens.

    Attributes:
        columns: [T, K, 2 dk + R dv] before the convolution.
        gates: float32 [T, K, R, 1 + c] beta and g.
        z: [T, K, R, dv].
    """

    columns: jax.Array
    gates: jax.Array
    z: jax.Array


class DeltaNet(nnx.Module):
    """An `Attention` without positions or pages. A kind has `read`, `gated`, and the parameters of these beside its own."""

    def __init__(self, input_dim: int, hidden: int, spec: DeltaSpec, declare: Declare):
        K, R, D, V = spec.key_heads, spec.repeats, spec.key_dim, spec.value_dim
        f32, i32 = np.dtype(np.float32), np.dtype(np.int32)
        self.spec = spec
        heads = ("kv_heads", None)
        self.cache_spec = CacheSpec(
            (
                CacheArray("state", "slot", (K, R, V, D), f32, (*heads, None, None)),
                CacheArray("convolved", "slot", (K, spec.columns), declare.dtype, heads, versions=spec.taps - 1),
                # Tokens that are in the two above.
                CacheArray("start", "slot", (), i32, ()),
                CacheArray("columns", "window", (K, spec.columns), declare.dtype, heads),
                CacheArray("gates", "window", (K, R, 1 + spec.decays), f32, (*heads, None)),
            )
        )
        self.qkv = declare((K, spec.columns, input_dim), ("kv_heads", None, None))
        self.conv = declare((K, spec.columns, spec.taps), ("kv_heads", None, None))
        self.norm = declare((V,), (None,), "ones")
        self.out = declare((hidden, K, R, V), (None, "kv_heads", None, None))

    def __call__(
        self,
        x_TH: jax.Array,
        cache: LayerCache,
        meta: StepMetadata,
        rope: None,  # noqa: ARG002
        norm: RMSNorm | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """See `Attention`."""
        inputs = self.read(x_TH, norm)
        P, parts = meta.num_prefill_tokens, []
        if P:
            read, cache = self._prefill(Inputs(*(x[:P] for x in inputs)), cache, meta)
            parts.append(read)
        if meta.decode_bounds.shape[0]:
            shape = meta.decode_bounds.shape
            windows = Inputs(*(x[P:].reshape(*shape, *x.shape[1:]) for x in inputs))
            read, cache = self._decode(windows, cache, meta)
            parts.append(read.reshape(-1, *read.shape[2:]))
        return self._output(jnp.concatenate(parts), inputs.z), cache

    def catch_up(
        self, x_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata, rope: None
    ) -> tuple[jax.Array, LayerCache]:
        """See `Attention`. What a token reads follows from all before it, so nothing is skipped."""
        out_TH, cache = self(x_TH, cache, meta, rope)
        return out_TH[live.tokens], cache

    def write_keys(self, x_TH: jax.Array, cache: LayerCache, meta: StepMetadata, rope: None) -> LayerCache:
        """See `Attention`."""
        return self(x_TH, cache, meta, rope)[1]

    @abstractmethod
    def read(self, x_TH: jax.Array, norm: RMSNorm | None) -> Inputs:
        """Of the layer's input [T, input_dim], or of `norm` of it."""

    @abstractmethod
    def gated(self, read: jax.Array, z: jax.Array) -> jax.Array:
        """The weighted and gated norm of what the heads read, in z's type.

        Args:
            read: float32 [T, K, R, dv], divided by its root mean square.
            z: [T, K, R, dv].
        """

    def _tokens(self, convolved: jax.Array, gates: jax.Array) -> Tokens:
        """Of convolved columns [..., K, 2 dk + R dv] and gates [..., K, R, 1 + c]."""
        D, spec = self.spec.key_dim, self.spec
        q, k, v = jnp.split(convolved.astype(jnp.float32), (D, 2 * D), axis=-1)
        v = v.reshape(*v.shape[:-1], spec.repeats, spec.value_dim)
        return Tokens(unit(q) * D**-0.5, unit(k), v, g=gates[..., 1:], beta=gates[..., 0])

    def _prefill(self, inputs: Inputs, cache: LayerCache, meta: StepMetadata) -> tuple[jax.Array, LayerCache]:
        """P prompt tokens: [P, K, R, dv], and the cache with their rows' states in it."""
        taps, E = self.spec.taps, meta.prefill_slots.shape[0]
        P = meta.num_prefill_tokens
        lengths_E = jnp.maximum(meta.prefill_ends - meta.prefill_starts, 0)
        first_E = jnp.cumsum(lengths_E) - lengths_E
        # A new request's slot holds whatever the last one left.
        old_E = meta.prefill_starts > 0
        state_E, tail_E = (
            jnp.where(old_E.reshape(-1, *[1] * (a.ndim - 1)), a[meta.prefill_slots], 0) for a in cache[:2]
        )
        # For each token the columns of the taps - 1 before it, some of them from before the chunk.
        row_P = jnp.minimum(meta.prefill_rows, E - 1)
        offset_P = jnp.arange(P) - first_E[row_P]

        def column(position: jax.Array, row: jax.Array) -> jax.Array:
            """By position in a row's chunk: from -(taps - 1)."""
            of_chunk = inputs.columns[jnp.clip(first_E[row] + position, 0, P - 1)]
            of_tail = tail_E[row, jnp.clip(taps - 1 + position, 0, taps - 2)]
            return jnp.where((position >= 0)[..., None, None], of_chunk, of_tail)

        seen = [column(offset_P - back, row_P) for back in range(taps - 1, 0, -1)]
        convolved = convolve(jnp.stack([*seen, inputs.columns], axis=1), self.conv[...])[:, 0]
        tokens = self._tokens(convolved, inputs.gates)
        read, state_E = read_prompts(state_E[:, 0], tokens, cut(meta.prefill_rows, lengths_E))

        last = lengths_E[:, None] + jnp.arange(-(taps - 1), 0)
        tail_E = column(last, jnp.arange(E)[:, None])
        slots_E = _or_drop(meta.prefill_slots, cache[0])
        states, tails, starts, *window = cache
        return read, (
            states.at[slots_E, 0].set(state_E, mode="drop"),
            tails.at[slots_E].set(tail_E, mode="drop"),
            starts.at[slots_E, 0].set(meta.prefill_ends, mode="drop"),
            *window,
        )

    def _decode(self, inputs: Inputs, cache: LayerCache, meta: StepMetadata) -> tuple[jax.Array, LayerCache]:
        """D windows of n tokens, [D, n, ...] -> [D, n, K, R, dv]: the accepted ones of the window before are committed."""
        taps, (D, n) = self.spec.taps, meta.decode_bounds.shape
        slots_D = meta.decode_slots
        tail_D, start_D, columns_D, gates_D = (a[slots_D] for a in cache[1:])
        position_D = meta.positions[meta.num_prefill_tokens :].reshape(D, n)[:, 0]
        most = columns_D.shape[1]
        accepted_D = jnp.clip(position_D - start_D[:, 0], 0, most)

        # What was rejected, or left by other requests, is nothing: it may be NaN.
        kept_Dn = jnp.arange(most) < accepted_D[:, None]
        past_D = jnp.concatenate([tail_D, jnp.where(kept_Dn[..., None, None], columns_D, 0)], axis=1)
        tail_D = jax.vmap(lambda past, first: lax.dynamic_slice_in_dim(past, first, taps - 1))(past_D, accepted_D)

        windows = past_D, jnp.concatenate([tail_D, inputs.columns], axis=1)
        convolved = jnp.concatenate([convolve(window, self.conv[...]) for window in windows], axis=1)
        tokens = self._tokens(convolved, jnp.concatenate([gates_D, inputs.gates], axis=1))
        states, tails, starts, columns, gates = cache
        read, states = replay_and_read(states, slots_D, accepted_D, tokens, replayed=most)

        slots_D = _or_drop(slots_D, states)
        return read, (
            states,
            tails.at[slots_D].set(tail_D, mode="drop"),
            starts.at[slots_D, 0].set(position_D, mode="drop"),
            columns.at[slots_D, :n].set(inputs.columns, mode="drop"),
            gates.at[slots_D, :n].set(inputs.gates, mode="drop"),
        )

    def _output(self, read: jax.Array, z: jax.Array) -> jax.Array:
        """[T, H] of what the heads read, float32 [T, K, R, dv], each normed and gated."""
        # Rounded where the classes of transformers round.
        read = read.astype(z.dtype).astype(jnp.float32)
        read = read * lax.rsqrt(jnp.mean(jnp.square(read), axis=-1, keepdims=True) + self.spec.norm_eps)
        return comm.total(jnp.einsum("tkrv,hkrv->th", self.gated(read, z), self.out[...]))

    def kernels_missing(self, dtype: Any) -> str | None:  # noqa: ARG002 - states are float32
        """See `NeedsKernels`. Prompts may run on plain XLA, as those of other layers where only decoding has a kernel."""
        state = self.cache_spec.arrays[0]
        reason = unsupported_reason(jax.ShapeDtypeStruct((1, 1, *state.shape), state.dtype))
        return reason and f"linear attention (gated delta rule) has no decode kernel here: {reason}"


def _or_drop(slots: jax.Array, states: jax.Array) -> jax.Array:
    """Slots to write to. Padding rows write nowhere: the padding slot stays as it is."""
    return jnp.where(slots > 0, slots, states.shape[0])
