"""Qwen3.5, dense and mixtures, and Qwen3-Next: three layers of linear attention to each one of gated grouped-query
attention. Qwen3-Next is a mixture whose linear layers are stored in another way.

Norms are centred. The rotary positions of text have one dimension, so the published "mrope" is plain, partial RoPE.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.models.config import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, Published
from jaxspec.models.decoder import block_key_map, decoder_key_map
from jaxspec.models.fields import flag, text_or, whole, whole_or, with_defaults
from jaxspec.models.gated_delta_net import GatedDeltaSpec
from jaxspec.models.gated_shared import GatedSharedSpec
from jaxspec.models.hf_fields import (
    MAX_LAYERS,
    MAX_SIZE,
    MAX_TAPS,
    QWEN3_5,
    QWEN3_5_MOE,
    common_fields,
    divisible,
    layer_kinds,
    norm_eps,
    num_layers,
    size,
    unsupported,
)
from jaxspec.models.keymap import KeyMap, Piece, any_of, nested, norm_weight
from jaxspec.models.layers import DenseSpec
from jaxspec.models.llama import harmless as llama_harmless
from jaxspec.models.llama import read_attention
from jaxspec.models.moe import MoESpec
from jaxspec.models.moe_fields import read_experts
from jaxspec.models.qwen3_moe import layer_mlps

ARCHITECTURES = {
    QWEN3_5: Published("Qwen3.5 and 3.6, dense", mtp=True, note="text only"),
    QWEN3_5_MOE: Published("Qwen3.5 and 3.6, mixtures", mtp=True, note="text only"),
    "Qwen3_5ForCausalLM": Published("their dense language models alone", mtp=True),
    "Qwen3_5MoeForCausalLM": Published("their mixtures' language models alone", mtp=True),
    (QWEN3_NEXT := "Qwen3NextForCausalLM"): Published("Qwen3-Next-80B-A3B", mtp=True),
}
_LINEAR, _FULL = "linear_attention", "full_attention"


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    mixture, is_next = "Moe" in architecture, architecture == QWEN3_NEXT
    # Mixtures of Qwen3.5 have no dense layers, and their configurations no width of one.
    common = common_fields(with_defaults(hf, intermediate_size=1) if mixture else hf, architecture)
    if (state := text_or(hf, "mamba_ssm_dtype", "float32")) != "float32":
        raise unsupported("mamba_ssm_dtype", state, "float32")
    attention = read_attention(with_defaults(hf, head_dim=256), qk_norm="head", partial_rotary=0.25)
    full = replace(attention, gated=True)
    specs: dict[str, AttentionSpec] = {_LINEAR: replace(_read_linear(hf), packed=is_next), _FULL: full}
    mlp: MLPSpec
    if is_next:
        mlp = _read_mixture(hf, normalize=flag(hf, "norm_topk_prob", default=True))
    else:
        mlp = _read_mixture(hf) if mixture else DenseSpec(size(hf, "intermediate_size"))
    mlps = layer_mlps(hf, mlp) if is_next else [mlp] * num_layers(hf)
    interval = whole_or(hf, "full_attention_interval", 4, 1, MAX_LAYERS)
    kinds = layer_kinds(hf, "layer_types", _LINEAR, _FULL) or [
        _LINEAR if (i + 1) % interval else _FULL for i in range(num_layers(hf))
    ]
    # Qwen3-Next's configurations do not say that its checkpoints have one.
    drafts = whole_or(hf, "mtp_num_hidden_layers", int(is_next), 0, MAX_LAYERS)
    return ModelConfig(
        **common,
        layers=tuple(LayerSpec(specs[kind], inner) for kind, inner in zip(kinds, mlps, strict=True)),
        nextn_layers=(LayerSpec(full, mlp),) * drafts,
        centred_norms=True,
    )


def _read_linear(hf: Mapping[str, Any]) -> GatedDeltaSpec:
    keys, values = size(hf, "linear_num_key_heads"), size(hf, "linear_num_value_heads")
    divisible(hf, "linear_num_value_heads", values, "linear_num_key_heads", keys)
    return GatedDeltaSpec(
        key_heads=keys,
        value_heads=values,
        key_dim=whole(hf, "linear_key_head_dim", 1, MAX_SIZE // keys),
        value_dim=whole(hf, "linear_value_head_dim", 1, MAX_SIZE // values),
        taps=whole_or(hf, "linear_conv_kernel_dim", 4, 2, MAX_TAPS),
        norm_eps=norm_eps(hf),
    )


def _read_mixture(hf: Mapping[str, Any], *, normalize: bool = True) -> GatedSharedSpec:
    experts, top_k = read_experts(hf, "num_experts", "num_local_experts")
    routed = MoESpec(
        num_experts=experts,
        top_k=top_k,
        expert_dim=size(hf, "moe_intermediate_size"),
        num_shared=0,
        scoring="softmax",
        normalize=normalize,
    )
    return GatedSharedSpec(routed, DenseSpec(size(hf, "shared_expert_intermediate_size")))


def harmless(config: ModelConfig) -> re.Pattern[str]:
    """The NextN layer's own copies of embedding and head, and layers of it that are not run, are not read."""
    return any_of([llama_harmless(config).pattern, r"mtp\..*", r"model\.visual\..*"])


def key_map(config: ModelConfig) -> KeyMap:
    """Paths of `CausalLM` -> pieces: linear layers have another name than attention, all of a multimodal model a prefix."""
    linear = {i for i, spec in enumerate(config.layers) if isinstance(spec.attention, GatedDeltaSpec)}
    keys = {
        path: tuple(map(_linear, pieces)) if path[0] == "layers" and path[1] in linear else pieces
        for path, pieces in decoder_key_map(config).items()
    }
    if config.architecture not in (QWEN3_5, QWEN3_5_MOE):
        return keys
    return {path: tuple(map(_wrapped, pieces)) for path, pieces in keys.items()}


def _linear(piece: Piece) -> Piece:
    return replace(piece, name=piece.name.replace(".self_attn.", ".linear_attn."))


def _wrapped(piece: Piece) -> Piece:
    return replace(piece, name=re.sub(r"^model\.", "model.language_model.", piece.name))


def nextn_key_map(config: ModelConfig) -> KeyMap:
    """Paths of `NextN` -> pieces."""
    H = config.hidden_size
    return {("eh_proj",): (Piece("mtp.fc.weight", (H, 2 * H)),)} | nested(
        {
            "enorm": norm_weight("mtp.pre_fc_norm_embedding", H),
            "hnorm": norm_weight("mtp.pre_fc_norm_hidden", H),
            "layer": block_key_map(config.nextn_layers[0], H, "mtp.layers.0."),
            "norm": norm_weight("mtp.norm", H),
        }
    )
