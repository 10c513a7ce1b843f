"""GLM-4.5, 4.6 and 4.7: grouped-query attention with half of each head rotated, DeepSeek-V3's mixture, a NextN layer."""

from collections.abc import Mapping
from typing import Any, Literal

from jaxspec.models.config import LayerSpec, ModelConfig, Published
from jaxspec.models.deepseek import MAX_NEXTN_LAYERS, harmless, read_moe
from jaxspec.models.fields import flag, require, whole_or, with_defaults
from jaxspec.models.hf_fields import MAX_LAYERS, common_fields, num_layers, size
from jaxspec.models.layers import DenseSpec
from jaxspec.models.llama import read_attention

ARCHITECTURES = {"Glm4MoeForCausalLM": Published("GLM-4.5, 4.5-Air, 4.6, 4.7", mtp=True)}

__all__ = ["ARCHITECTURES", "harmless", "read_config"]


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    common = common_fields(hf, architecture, biases=True)
    require(hf, "n_routed_experts")
    # The class norms the chosen scores where the key is absent; DeepSeek's does not.
    dense, moe = DenseSpec(size(hf, "intermediate_size")), read_moe(with_defaults(hf, norm_topk_prob=True), v3=True)
    qk_norm: Literal["head"] | None = "head" if flag(hf, "use_qk_norm") else None
    attention = read_attention(hf, qk_norm=qk_norm, partial_rotary=0.5, out_bias=False)
    layers, num_dense = num_layers(hf), whole_or(hf, "first_k_dense_replace", 1, 0, MAX_LAYERS)
    nextn = whole_or(hf, "num_nextn_predict_layers", 0, 0, MAX_NEXTN_LAYERS)
    return ModelConfig(
        **common,
        layers=tuple(LayerSpec(attention, moe if moe and i >= num_dense else dense) for i in range(layers)),
        nextn_layers=(LayerSpec(attention, moe or dense),) * nextn,
    )
