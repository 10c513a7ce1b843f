"""gpt-oss: attention sinks, sliding windows in every second layer, biases everywhere, experts with a clamped SwiGLU.

In bfloat16 its RMS norms are rounded before their weight, as every model's here; its own files round after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxspec.models.config import LayerSpec, ModelConfig, Published
from jaxspec.models.fields import real_or, whole_or, with_defaults
from jaxspec.models.hf_fields import MAX_POSITION, common_fields, layer_kinds, num_layers, size
from jaxspec.models.keymap import KeyMap, Piece
from jaxspec.models.llama import harmless, read_attention
from jaxspec.models.moe import MoESpec
from jaxspec.models.moe_fields import read_experts
from pallas_kernels.moe.activation import Clamp

ARCHITECTURES = {"GptOssForCausalLM": Published("gpt-oss-20b, 120b")}
SLIDING, FULL = "sliding_attention", "full_attention"

__all__ = ["ARCHITECTURES", "harmless", "read_config"]


@dataclass(frozen=True)
class StackedMoESpec(MoESpec):
    """A mixture whose experts are stored together, [in, out], rows of gate and up in turn."""

    def key_map(self, prefix: str, hidden: int) -> KeyMap:
        E, inner, experts = self.num_experts, self.expert_dim, f"{prefix}experts."
        return {
            ("router",): (Piece(f"{prefix}router.weight", (E, hidden)),),
            ("logit_bias",): (Piece(f"{prefix}router.bias", (E,)),),
            ("gate_up",): (
                Piece(f"{experts}gate_up_proj", (E, hidden, 2 * inner), view=(E, hidden, inner, 2), order=(0, 3, 2, 1)),
            ),
            ("gate_up_bias",): (
                Piece(f"{experts}gate_up_proj_bias", (E, 2 * inner), view=(E, inner, 2), order=(0, 2, 1)),
            ),
            ("down",): (Piece(f"{experts}down_proj", (E, inner, hidden), order=(0, 2, 1)),),
            ("down_bias",): (Piece(f"{experts}down_proj_bias", (E, hidden)),),
        }


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    hf = with_defaults(hf, attention_bias=True)
    common = common_fields(hf, architecture, biases=True)
    experts, top_k = read_experts(hf, "num_local_experts")
    moe = StackedMoESpec(
        num_experts=experts,
        top_k=top_k,
        expert_dim=size(hf, "intermediate_size"),
        num_shared=0,
        # A softmax over the chosen logits, which is one over all of them, normed.
        scoring="softmax",
        normalize=True,
        biases=True,
        clamp=Clamp(real_or(hf, "swiglu_alpha", 1.702, 1e-3, 1e3), real_or(hf, "swiglu_limit", 7.0, 1e-3, 1e6)),
    )
    full = replace(read_attention(hf), sinks=True)
    sliding = replace(full, window=whole_or(hf, "sliding_window", 128, 1, MAX_POSITION))
    layer = {SLIDING: LayerSpec(sliding, moe), FULL: LayerSpec(full, moe)}
    kinds = layer_kinds(hf, "layer_types", SLIDING, FULL) or [(SLIDING, FULL)[i % 2] for i in range(num_layers(hf))]
    return ModelConfig(**common, layers=tuple(layer[kind] for kind in kinds))
