"""DeepSeek-V2, V3 and V3.2 (also R1, Kimi-K2, Moonlight), GLM-4.7-Flash and GLM-5: latent attention, routed experts, and
from V3 on a NextN layer.

V3.2 and GLM-5 are V3 with indexers, which choose the `index_topk` keys that a query attends to (see `sparse_mla`). Up to so
many tokens they choose all of them: there the model is exactly V3.
"""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxspec.errors import ModelFormatError
from jaxspec.models.config import LayerSpec, ModelConfig, Published, RopeConfig
from jaxspec.models.fields import flag, real_or, require, text_list, text_or, whole_or, with_defaults, wrong
from jaxspec.models.hf_fields import (
    MAX_LAYERS,
    MAX_POSITION,
    MAX_SIZE,
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
from jaxspec.models.sparse_mla import IndexerSpec, SparseMLASpec

V2, V3, V32 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"
GLM_LITE, GLM_DSA = "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"
_NOT_RUN = "no GPU has run it in contexts over index_topk (2048) tokens yet"
ARCHITECTURES = {
    V3: Published("DeepSeek-V3 and R1, Kimi-K2, Moonlight", mtp=True),
    V2: Published("DeepSeek-V2, V2-Lite"),
    V32: Published("DeepSeek-V3.2", mtp=True, note=_NOT_RUN),
    GLM_LITE: Published("GLM-4.7-Flash", mtp=True),
    GLM_DSA: Published("GLM-5, 5.1, 5.2", mtp=True, note=_NOT_RUN),
}

# What config.json leaves out means what it means to the transformers class, where the tensors would not tell.
_SINCE_V3 = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3}
_DEFAULTS: dict[str, dict[str, Any]] = {
    V3: _SINCE_V3 | {"n_group": 8, "topk_group": 4},
    V32: _SINCE_V3,
    GLM_LITE: _SINCE_V3 | {"routed_scaling_factor": 1.8, "first_k_dense_replace": 1},
    GLM_DSA: _SINCE_V3,
}
# Of indexers in the same classes: the keys that one chooses, its heads and their size.
_INDEX_TOPK, _INDEX_HEADS, _INDEX_DIM = 2048, {V32: 64, GLM_DSA: 32}, 128
_FULL, _SHARED = "full", "shared"
# Layers that share another one's choice of keys need none of these.
_INDEXER = r"model\.layers\.\d+\.self_attn\.indexer\.((wq_b|wk|weights_proj)\.weight|k_norm\.(weight|bias))"
MAX_NEXTN_LAYERS = 64
_SCORING = (("sigmoid", "noaux_tc"), ("softmax", "greedy"), ("softmax", "group_limited_greedy"))


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    hf = with_defaults(hf, **_DEFAULTS.get(architecture, {}))
    common = common_fields(hf, architecture)
    layers = num_layers(hf)
    attention, dense = _read_attentions(hf, architecture, layers), DenseSpec(size(hf, "intermediate_size"))
    moe = read_moe(hf, v3=architecture != V2)
    nextn = whole_or(hf, "num_nextn_predict_layers", 0, 0, MAX_NEXTN_LAYERS)
    sparse = _sparse_layers(hf, layers)
    return ModelConfig(
        **common,
        layers=tuple(LayerSpec(attention[i], moe if moe and i in sparse else dense) for i in range(layers)),
        nextn_layers=(LayerSpec(attention[0], moe or dense),) * (nextn if ARCHITECTURES[architecture].mtp else 0),
        index_topk=attention[0].count if isinstance(attention[0], SparseMLASpec) else None,
    )


def _read_attentions(hf: Mapping[str, Any], architecture: str, layers: int) -> Sequence[MLASpec]:
    """Of each layer. The first one, and so that of NextN layers, has an indexer if any has."""
    attention = read_attention(hf)
    if architecture not in _INDEX_HEADS:
        return (attention,) * layers
    if attention.q_lora_rank is None:
        raise unsupported("q_lora_rank", None, "a number, where an indexer reads the queries' latent")
    indexer = IndexerSpec(
        whole_or(hf, "index_n_heads", _INDEX_HEADS[architecture], 1, MAX_SIZE),
        whole_or(hf, "index_head_dim", _INDEX_DIM, attention.rope_dim, MAX_SIZE),
        flag(hf, "indexer_rope_interleave", default=architecture == GLM_DSA),
    )
    count = whole_or(hf, "index_topk", _INDEX_TOPK, 1, MAX_POSITION)
    full = SparseMLASpec(**vars(attention), count=count, indexer=indexer)
    shared = replace(full, indexer=None)
    own = _layers_with_indexers(hf, layers) if architecture == GLM_DSA else range(layers)
    return tuple(full if i in own else shared for i in range(layers))


def _layers_with_indexers(hf: Mapping[str, Any], layers: int) -> Container[int]:
    """The layers that choose their keys; the others read the choice of the last one before them (IndexShare, GLM-5.2)."""
    key = "indexer_types"
    kinds: Sequence[str] = text_list(hf, key)
    if unknown := [kind for kind in kinds if kind not in (_FULL, _SHARED)]:
        raise unsupported(key, unknown[0], f"{_FULL}, {_SHARED}")
    if not kinds and (pattern := text_or(hf, "index_topk_pattern", "")):
        key = "index_topk_pattern"
        if set(pattern) - {"F", "S"}:
            raise wrong(key, 'a text of "F" and "S"', pattern)
        kinds = [_FULL if letter == "F" else _SHARED for letter in pattern]
    if not kinds:
        every, key = whole_or(hf, "index_topk_freq", 1, 0, MAX_LAYERS), "index_skip_topk_offset"
        first = whole_or(hf, key, 2, 0, MAX_LAYERS)
        kinds = [_SHARED if max(i - first + 1, 0) % max(every, 1) else _FULL for i in range(layers)]
    if len(kinds) < layers:  # there may be more: of NextN layers
        raise ModelFormatError(f"config.json has {len(kinds)} layers in {key} and num_hidden_layers={layers}")
    if kinds[0] != _FULL:
        raise ModelFormatError(
            f"{key} in config.json lets layer 0 share the keys that a layer before it chose, and there is none"
        )
    return {i for i, kind in enumerate(kinds[:layers]) if kind == _FULL}


def _sparse_layers(hf: Mapping[str, Any], layers: int) -> Container[int]:
    """The layers with routed experts."""
    if kinds := layer_kinds(hf, "mlp_layer_types", "dense", "sparse"):
        return {i for i, kind in enumerate(kinds) if kind == "sparse"}
    return range(whole_or(hf, "first_k_dense_replace", 0, 0, MAX_LAYERS), layers)


def read_attention(hf: Mapping[str, Any], *, nope: bool = False) -> MLASpec:
    """`nope`: no column is rotated, whatever the configuration says of a rotary embedding."""
    require(hf, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    nope_dim, rope_dim = size(hf, "qk_nope_head_dim"), rotary_dim("qk_rope_head_dim", size(hf, "qk_rope_head_dim"))
    rope = RopeConfig(rope_dim, 1.0, "none")
    if not nope:
        rope = read_rope(hf, rope_dim, interleaved=flag(hf, "rope_interleave", default=True))
    scale = (nope_dim + rope_dim) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return MLASpec(
        num_heads=size(hf, "num_attention_heads"),
        kv_lora_rank=size(hf, "kv_lora_rank"),
        q_lora_rank=None if hf.get("q_lora_rank") is None else size(hf, "q_lora_rank"),
        nope_dim=nope_dim,
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
