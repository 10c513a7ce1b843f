"""Qwen3-MoE: grouped-query attention with normed queries and keys, and experts chosen by a softmax."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.models.config import LayerSpec, MLPSpec, ModelConfig, Published
from jaxspec.models.fields import flag, whole_list, whole_or
from jaxspec.models.hf_fields import MAX_LAYERS, common_fields, num_layers, size
from jaxspec.models.layers import DenseSpec
from jaxspec.models.llama import harmless, read_attention
from jaxspec.models.moe import MoESpec
from jaxspec.models.moe_fields import read_experts

ARCHITECTURES = {"Qwen3MoeForCausalLM": Published("Qwen3-30B-A3B, 235B-A22B, Coder")}

__all__ = ["ARCHITECTURES", "harmless", "layer_mlps", "read_config"]


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    common = common_fields(hf, architecture, biases=True)
    # The hub's name for the number, and the one that transformers 5 writes.
    experts, top_k = read_experts(hf, "num_experts", "num_local_experts")
    moe = MoESpec(
        num_experts=experts,
        top_k=top_k,
        expert_dim=size(hf, "moe_intermediate_size"),
        num_shared=0,
        scoring="softmax",
        normalize=flag(hf, "norm_topk_prob"),
    )
    attention = read_attention(hf, qk_norm="head")
    return ModelConfig(**common, layers=tuple(LayerSpec(attention, mlp) for mlp in layer_mlps(hf, moe)))


def layer_mlps(hf: Mapping[str, Any], mixture: MLPSpec) -> Sequence[MLPSpec]:
    """Of each layer: the mixture, or a dense MLP where the configuration asks for one."""
    dense = DenseSpec(size(hf, "intermediate_size"))
    step = whole_or(hf, "decoder_sparse_step", 1, 1, MAX_LAYERS)
    listed = hf.get("mlp_only_layers")
    is_dense = whole_list(
        [] if listed is None else listed, "mlp_only_layers", items=MAX_LAYERS, least=0, most=MAX_LAYERS
    )
    return [dense if i in is_dense or (i + 1) % step else mixture for i in range(num_layers(hf))]
