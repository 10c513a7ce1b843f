"""DeepSeek-V2, V3 and V3.2 (also R1, Kimi-K2, Moonlight), GLM-4.7-Flash and GLM-5: latent attention, routed experts, and
from V3 on a NextN layer.

V3.2 and GLM-5 are V3 with an indexer, which chooses the `index_topk` keys that a query attends to. Up to so many tokens it
chooses all of them: there the model is exactly V3, and the indexer's tensors are left unread.
"""

import re
from collections.abc import Container, Mapping
from typing import Any

from jaxspec.errors import ModelFormatError
from jaxspec.models.config import LayerSpec, ModelConfig, Published
from jaxspec.models.fields import flag, real_or, require, text_or, whole_or, with_defaults
from jaxspec.models.hf_fields import (
    MAX_LAYERS,
    MAX_POSITION,
    common_fields,
    divisible,
    layer_kinds,
    num_layers,
    read_rope,
    rotary_dim,
    size,
    unsupported,
)
from jaxspec.models.keymap import ROTARY_TABLES, any_of
from jaxspec.models.layers import DenseSpec, yarn_mscale
from jaxspec.models.mla import MLASpec
from jaxspec.models.moe import MoESpec
from jaxspec.models.moe_fields import MAX_EXPERTS, read_experts
from jaxspec.models.mtp import nextn_prefix

V2, V3, V32 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"
GLM_LITE, GLM_DSA = "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"
_SHORT = "contexts up to index_topk (2048) tokens"
ARCHITECTURES = {
    V3: Published("DeepSeek-V3 and R1, Kimi-K2, Moonlight", mtp=True),
    V2: Published("DeepSeek-V2, V2-Lite"),
    V32: Published("DeepSeek-V3.2", mtp=True, note=_SHORT),
    GLM_LITE: Published("GLM-4.7-Flash", mtp=True),
    GLM_DSA: Published("GLM-5, 5.1, 5.2", mtp=True, note=_SHORT),
}

# What config.json leaves out means what it means to the transformers class, where the tensors would not tell.
_SINCE_V3 = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3}
_DEFAULTS: dict[str, dict[str, Any]] = {
    V3: _SINCE_V3 | {"n_group": 8, "topk_group": 4},
    V32: _SINCE_V3,
    GLM_LITE: _SINCE_V3 | {"routed_scaling_factor": 1.8, "first_k_dense_replace": 1},
    GLM_DSA: _SINCE_V3,
}
# Keys that an indexer chooses, in the same classes.
_INDEX_TOPK = 2048
# Layers of GLM-5.2 that share another one's choice of keys have none of these.
_INDEXER = r"model\.layers\.\d+\.self_attn\.indexer\.((wq_b|wk|weights_proj)\.weight|k_norm\.(weight|bias))"
MAX_NEXTN_LAYERS = 64
_SCORING = (("sigmoid", "noaux_tc"), ("softmax", "greedy"), ("softmax", "group_limited_greedy"))


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    hf = with_defaults(hf, **_DEFAULTS.get(architecture, {}))
    common = common_fields(hf, architecture)
    layers = num_layers(hf)
    attention, dense = read_attention(hf), DenseSpec(size(hf, "intermediate_size"))
    moe = read_moe(hf, v3=architecture != V2)
    nextn = whole_or(hf, "num_nextn_predict_layers", 0, 0, MAX_NEXTN_LAYERS)
    sparse = _sparse_layers(hf, layers)
    return ModelConfig(
        **common,
        layers=tuple(LayerSpec(attention, moe if moe and i in sparse else dense) for i in range(layers)),
        nextn_layers=(LayerSpec(attention, moe or dense),) * (nextn if ARCHITECTURES[architecture].mtp else 0),
        index_topk=whole_or(hf, "index_topk", _INDEX_TOPK, 1, MAX_POSITION) if architecture in (V32, GLM_DSA) else None,
    )


def _sparse_layers(hf: Mapping[str, Any], layers: int) -> Container[int]:
    """The layers with routed experts."""
    if kinds := layer_kinds(hf, "mlp_layer_types", "dense", "sparse"):
        return {i for i, kind in enumerate(kinds) if kind == "sparse"}
    return range(whole_or(hf, "first_k_dense_replace", 0, 0, MAX_LAYERS), layers)


def read_attention(hf: Mapping[str, Any]) -> MLASpec:
    require(hf, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    nope, rope_dim = size(hf, "qk_nope_head_dim"), rotary_dim("qk_rope_head_dim", size(hf, "qk_rope_head_dim"))
    rope = read_rope(hf, rope_dim, interleaved=flag(hf, "rope_interleave", default=True))
    scale = (nope + rope_dim) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return MLASpec(
        num_heads=size(hf, "num_attention_heads"),
        kv_lora_rank=size(hf, "kv_lora_rank"),
        q_lora_rank=None if hf.get("q_lora_rank") is None else size(hf, "q_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=size(hf, "v_head_dim"),
        softmax_scale=scale,
        rope=rope,
        latent_norm_eps=real_or(hf, "latent_norm_eps", 1e-6, 0, 1),
    )


def read_moe(hf: Mapping[str, Any], *, v3: bool) -> MoESpec | None:
    """The mixture of a DeepSeek configuration, with V3's defaults or V2's; None where it has no routed experts."""
    if not whole_or(hf, "n_routed_experts", 0, 0, MAX_EXPERTS):
        return None
    scoring: Any = text_or(hf, "scoring_func", "sigmoid" if v3 else "softmax")
    method = text_or(hf, "topk_method", "noaux_tc" if v3 else "greedy")
    if (scoring, method) not in _SCORING:
        raise unsupported(
            "scoring_func, topk_method",
            (scoring, method),
            "sigmoid with noaux_tc; softmax with greedy or group_limited_greedy",
        )
    if whole_or(hf, "moe_layer_freq", 1, 1, MAX_LAYERS) != 1:
        raise unsupported("moe_layer_freq", hf["moe_layer_freq"], "1")
    experts, top_k = read_experts(hf, "n_routed_experts")
    groups, top_groups = _read_groups(hf, experts, top_k) if method != "greedy" else (1, 1)
    return MoESpec(
        num_experts=experts,
        top_k=top_k,
        expert_dim=size(hf, "moe_intermediate_size"),
        num_shared=whole_or(hf, "n_shared_experts", 0, 0, MAX_EXPERTS),
        scoring=scoring,
        num_groups=groups,
        top_groups=top_groups,
        # Hugging Face's V2 never renormalises, whatever the config says; every released V2 has it false.
        normalize=flag(hf, "norm_topk_prob") and v3,
        scale=real_or(hf, "routed_scaling_factor", 1.0, 1e-6, 1e6),
    )


def _read_groups(hf: Mapping[str, Any], experts: int, top_k: int) -> tuple[int, int]:
    """The number of groups of experts, and how many of them a token may choose from."""
    groups = whole_or(hf, "n_group", 1, 1, MAX_EXPERTS)
    divisible(hf, "n_routed_experts", experts, "n_group", groups)
    if groups > 1 and experts // groups < 2:
        raise ModelFormatError(
            f"config.json has n_routed_experts={experts} and n_group={groups}; a group holds at least 2 experts"
        )
    top_groups = whole_or(hf, "topk_group", 1, 1, MAX_EXPERTS)
    if top_groups > groups:
        raise ModelFormatError(f"config.json has topk_group={top_groups} and only n_group={groups}")
    if top_k > (choice := top_groups * (experts // groups)):
        raise ModelFormatError(
            f"config.json has num_experts_per_tok={top_k}, but topk_group={top_groups} of n_group={groups} groups hold "
            f"only {choice} experts"
        )
    return groups, top_groups


def harmless(config: ModelConfig) -> re.Pattern[str]:
    patterns = [ROTARY_TABLES, *([_INDEXER] if config.index_topk else [])]
    if config.nextn_layers:  # the NextN layer's copies of the target's embedding and head
        patterns.append(re.escape(nextn_prefix(config)) + r"(embed_tokens|shared_head\.head)\.weight")
    if config.tie_embeddings:  # some writers store the head although it is the embedding
        patterns.append(r"lm_head\.weight")
    return any_of(patterns)
