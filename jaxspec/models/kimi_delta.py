"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): a gated delta net in which each channel of a key fades by itself.

Two more linear maps go through a bottleneck of a head's width: to the channels' decay and to the gate of the result.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.models.delta_net import DeltaNet, DeltaSpec, Inputs
from jaxspec.models.keymap import KeyMap, Piece
from jaxspec.models.layers import RMSNorm
from jaxspec.models.params import Declare
from pallas_kernels.quant.reference import linear


@dataclass(frozen=True)
class KimiDeltaSpec(DeltaSpec):
    """See `DeltaSpec`. A head's keys and values are equally wide, and each key head has one value head."""

    @property
    def decays(self) -> int:
        """See `DeltaSpec`."""
        return self.key_dim

    def build(self, hidden: int, declare: Declare, *, input_dim: int | None = None) -> "KimiDeltaAttention":
        return KimiDeltaAttention(input_dim or hidden, hidden, self, declare)

    def key_map(self, prefix: str, hidden: int, *, input_dim: int | None = None) -> KeyMap:
        K, D, inputs = self.key_heads, self.key_dim, input_dim or hidden
        every = slice(None)
        thirds = {name: slice(i * D, (i + 1) * D) for i, name in enumerate("qkv")}

        def by_head(name: str, width: int) -> Piece:
            return Piece(f"{prefix}{name}.weight", (K * D, width), view=(K, 1, D, width))

        return {
            ("qkv",): tuple(
                Piece(f"{prefix}{name}_proj.weight", (K * D, inputs), (every, rows), view=(K, D, inputs))
                for name, rows in thirds.items()
            ),
            ("conv",): tuple(
                Piece(f"{prefix}{name}_conv1d.weight", (K * D, 1, self.taps), (every, rows), view=(K, D, self.taps))
                for name, rows in thirds.items()
            ),
            ("narrow",): tuple(Piece(f"{prefix}{name}_a_proj.weight", (D, inputs), i) for i, name in enumerate("fg")),
            ("fade",): (by_head("f_b_proj", D),),
            ("z",): (by_head("g_b_proj", D),),
            ("beta",): (Piece(f"{prefix}b_proj.weight", (K, inputs), view=(K, 1, inputs)),),
            ("decay",): (Piece(f"{prefix}A_log", (1, 1, K, 1), view=(K, 1)),),
            ("decay_bias",): (Piece(f"{prefix}dt_bias", (K * D,), view=(K, 1, D)),),
            ("norm",): (Piece(f"{prefix}o_norm.weight", (D,)),),
            ("out",): (Piece(f"{prefix}o_proj.weight", (hidden, K * D), view=(hidden, K, 1, D)),),
        }


class KimiDeltaAttention(DeltaNet):
    """See `DeltaNet`."""

    def __init__(self, input_dim: int, hidden: int, spec: KimiDeltaSpec, declare: Declare):
        super().__init__(input_dim, hidden, spec, declare)
        K, D, heads = spec.key_heads, spec.key_dim, ("kv_heads", None)
        self.narrow = declare((2, D, input_dim), (None, None, None))
        self.fade = declare((K, 1, D, D), (*heads, None, None))
        self.z = declare((K, 1, D, D), (*heads, None, None))
        self.beta = declare((K, 1, input_dim), (*heads, None))
        self.decay = declare((K, 1), heads, "zeros", dtype=jnp.float32)
        self.decay_bias = declare((K, 1, D), (*heads, None), "zeros", dtype=jnp.float32)

    def read(self, x_TH: jax.Array, norm: RMSNorm | None) -> Inputs:
        """See `DeltaNet`."""
        weights = (self.qkv[...], self.beta[...], self.narrow[...])
        columns, beta, narrow = norm.into(x_TH, *weights) if norm else (linear(x_TH, w) for w in weights)
        beta = jax.nn.sigmoid(beta).astype(jnp.float32)
        fade = linear(narrow[:, 0], self.fade[...]).astype(jnp.float32) + self.decay_bias[...]
        g = -jnp.exp(self.decay[...])[..., None] * jax.nn.softplus(fade)
        return Inputs(columns, jnp.concatenate([beta[..., None], g], axis=-1), linear(narrow[:, 1], self.z[...]))

    def gated(self, read: jax.Array, z: jax.Array) -> jax.Array:
        """See `DeltaNet`."""
        read = self.norm[...].astype(jnp.float32) * read
        return (read * jax.nn.sigmoid(z.astype(jnp.float32))).astype(z.dtype)
