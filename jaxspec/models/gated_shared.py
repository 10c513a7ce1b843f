"""A mixture of experts beside a shared expert with a gate of its own (Qwen3.5-MoE)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.keymap import KeyMap, Piece
from jaxspec.models.layers import MLP, Attended, DenseSpec, RMSNorm, Stream
from jaxspec.models.moe import MoE, MoESpec
from jaxspec.models.params import Declare


@dataclass(frozen=True)
class GatedSharedSpec:
    """Routed experts, and an MLP for all tokens times the sigmoid of a linear map of each."""

    routed: MoESpec
    shared: DenseSpec

    def build(self, hidden: int, declare: Declare) -> "GatedSharedMoE":
        return GatedSharedMoE(hidden, self, declare)

    def key_map(self, prefix: str, hidden: int) -> KeyMap:
        parts = {
            "routed": self.routed.key_map(prefix, hidden),
            "shared": self.shared.key_map(f"{prefix}shared_expert.", hidden),
        }
        out = {(part, *path): pieces for part, keys in parts.items() for path, pieces in keys.items()}
        return out | {("gate",): (Piece(f"{prefix}shared_expert_gate.weight", (1, hidden), view=(hidden,)),)}


class GatedSharedMoE(nnx.Module):
    """A `ResidualMLP`."""

    def __init__(self, hidden: int, spec: GatedSharedSpec, declare: Declare):
        self.routed: MoE = spec.routed.build(hidden, declare)
        self.shared: MLP = spec.shared.build(hidden, declare)
        self.gate = declare((hidden,), (None,))

    @property
    def num_experts(self) -> int:
        """See `ResidualMLP`."""
        return self.routed.num_experts

    def add_to(
        self,
        x_TH: jax.Array,
        attended: Attended,
        norm: RMSNorm,
        live_T: jax.Array,
        following: RMSNorm | None = None,  # noqa: ARG002
    ) -> Stream:
        """See `ResidualMLP`."""
        x_TH, normed_TH, logits = self.routed.logits(x_TH, attended, norm)
        gate_T = jax.nn.sigmoid(jnp.einsum("th,h->t", normed_TH, self.gate[...]))
        stream = self.routed.add_experts(x_TH, normed_TH, logits, live_T)
        return Stream(stream.x + gate_T[:, None] * self.shared(normed_TH))

    def chosen_experts(self, x_TH: jax.Array, attended: Attended, norm: RMSNorm) -> Any:
        """See `ResidualMLP`."""
        return self.routed.chosen_experts(x_TH, attended, norm)
