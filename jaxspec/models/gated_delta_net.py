"""Gated delta nets (arXiv 2412.06464), as Qwen3.5 and Qwen3-Next have them: a head's whole state fades alike."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.delta_net import DeltaNet, DeltaSpec, Inputs
from jaxspec.models.keymap import Index, KeyMap, Piece
from jaxspec.models.layers import RMSNorm
from jaxspec.models.params import Declare
from pallas_kernels.quant.reference import linear


@dataclass(frozen=True)
class GatedDeltaSpec(DeltaSpec):
    """See `DeltaSpec`.

    Attributes:
        packed: checkpoints hold what reads the input in two tensors, in which the rows of a key head lie together.
    """

    packed: bool = False

    def build(self, hidden: int, declare: Declare, *, input_dim: int | None = None) -> "GatedDeltaNet":
        return GatedDeltaNet(input_dim or hidden, hidden, self, declare)

    def key_map(self, prefix: str, hidden: int, *, input_dim: int | None = None) -> KeyMap:
        K, R, inputs = self.key_heads, self.repeats, input_dim or hidden
        values = K * R * self.value_dim
        return (self._packed if self.packed else self._projections)(prefix, inputs) | {
            ("conv",): self._by_head(f"{prefix}conv1d.weight", 1, self.taps),
            ("decay",): (Piece(f"{prefix}A_log", (K * R,), view=(K, R)),),
            ("decay_bias",): (Piece(f"{prefix}dt_bias", (K * R,), view=(K, R)),),
            ("norm",): (Piece(f"{prefix}norm.weight", (self.value_dim,)),),
            ("out",): (Piece(f"{prefix}out_proj.weight", (hidden, values), view=(hidden, K, R, self.value_dim)),),
        }

    def _projections(self, prefix: str, inputs: int) -> KeyMap:
        K, R, V = self.key_heads, self.repeats, self.value_dim
        return {
            ("qkv",): self._by_head(f"{prefix}in_proj_qkv.weight", inputs),
            ("z",): (Piece(f"{prefix}in_proj_z.weight", (K * R * V, inputs), view=(K, R, V, inputs)),),
            ("gates",): tuple(
                Piece(f"{prefix}in_proj_{name}.weight", (K * R, inputs), (slice(None), i), view=(K, R, inputs))
                for i, name in enumerate("ba")
            ),
        }

    def _packed(self, prefix: str, inputs: int) -> KeyMap:
        """Of a key head first what is convolved, then the gates of its value heads; of these first all beta, then all decay."""
        K, R, V, every = self.key_heads, self.repeats, self.value_dim, slice(None)
        rows = self.columns + R * V

        def part(first: int, size: int, at: Index = ...) -> Piece:
            take = (every, slice(first, first + size))
            return Piece(f"{prefix}in_proj_qkvz.weight", (K * rows, inputs), at, view=(K, rows, inputs), take=take)

        return {
            ("qkv",): (part(0, self.columns),),
            ("z",): tuple(part(self.columns + r * V, V, (every, r)) for r in range(R)),
            ("gates",): (Piece(f"{prefix}in_proj_ba.weight", (K * 2 * R, inputs), view=(K, 2, R, inputs)),),
        }

    def _by_head(self, name: str, *dims: int) -> tuple[Piece, ...]:
        """A tensor whose rows are all queries, all keys, all values; the parameter has those of one key head together."""
        K, D, V = self.key_heads, self.key_dim, self.repeats * self.value_dim
        shape, pieces = (K * self.columns, *dims), []
        for first, size in ((0, D), (D, D), (2 * D, V)):
            places = np.repeat(np.arange(K), size), np.tile(np.arange(first, first + size), K)
            rows = slice(K * first, K * (first + size))
            pieces.append(Piece(name, shape, places, view=(shape[0], dims[-1]), take=rows))
        return tuple(pieces)


class GatedDeltaNet(DeltaNet):
    """See `DeltaNet`."""

    def __init__(self, input_dim: int, hidden: int, spec: GatedDeltaSpec, declare: Declare):
        super().__init__(input_dim, hidden, spec, declare)
        K, R = spec.key_heads, spec.repeats
        self.z = declare((K, R, spec.value_dim, input_dim), ("kv_heads", None, None, None))
        self.gates = declare((K, 2, R, input_dim), ("kv_heads", None, None, None))
        self.decay = declare((K, R), ("kv_heads", None), "zeros", dtype=jnp.float32)
        self.decay_bias = declare((K, R), ("kv_heads", None), "zeros", dtype=jnp.float32)

    def read(self, x_TH: jax.Array, norm: RMSNorm | None) -> Inputs:
        """See `DeltaNet`."""
        weights = (self.qkv[...], self.gates[...], self.z[...])
        columns, gates, z = norm.into(x_TH, *weights) if norm else (linear(x_TH, w) for w in weights)
        beta = jax.nn.sigmoid(gates[:, :, 0]).astype(jnp.float32)
        g = -jnp.exp(self.decay[...]) * jax.nn.softplus(gates[:, :, 1].astype(jnp.float32) + self.decay_bias[...])
        return Inputs(columns, jnp.stack([beta, g], axis=-1), z)

    def gated(self, read: jax.Array, z: jax.Array) -> jax.Array:
        """See `DeltaNet`."""
        normed = self.norm[...] * read.astype(z.dtype)
        return (normed * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)
