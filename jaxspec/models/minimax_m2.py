"""MiniMax-M2, M2.1 and M2.5: grouped-query attention, partly rotated, one norm over all heads of queries and of keys.

Every layer is a mixture without shared experts: sigmoid scores, a bias that affects only the choice, normed weights.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.errors import ModelFormatError
from jaxspec.models.config import LayerSpec, ModelConfig, Published
from jaxspec.models.decoder import decoder_key_map
from jaxspec.models.fields import flag, text_or, whole_list, whole_or, with_defaults
from jaxspec.models.hf_fields import MAX_LAYERS, MAX_SIZE, common_fields, num_layers, rotary_dim, size, unsupported
from jaxspec.models.keymap import KeyMap, any_of, mixtral_name
from jaxspec.models.llama import harmless as llama_harmless
from jaxspec.models.llama import read_attention
from jaxspec.models.moe import MoESpec
from jaxspec.models.moe_fields import read_experts

ARCHITECTURES = {"MiniMaxM2ForCausalLM": Published("MiniMax-M2, M2.1, M2.5")}
# Layers of the multi-token prediction that its configurations advertise and no published checkpoint holds.
_MTP_LAYERS = 64


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    common = common_fields(hf, architecture)
    _check_options(hf)
    experts, top_k = read_experts(hf, "num_local_experts")
    moe = MoESpec(
        num_experts=experts,
        top_k=top_k,
        expert_dim=size(hf, "intermediate_size"),
        num_shared=0,
        scoring="sigmoid",
        normalize=True,
    )
    layer = LayerSpec(read_attention(_with_share(hf), qk_norm="whole", partial_rotary=1.0), moe)
    return ModelConfig(**common, layers=(layer,) * num_layers(hf))


def _check_options(hf: Mapping[str, Any]) -> None:
    """Raises `ModelFormatError` where a model differs from the published ones in what is not read."""
    for key in ("use_qk_norm", "use_routing_bias"):
        if not flag(hf, key, default=True):
            raise unsupported(key, False, "true")
    for key, value in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
        if text_or(hf, key, value) != value:
            raise unsupported(key, hf[key], value)
    if whole_or(hf, "shared_intermediate_size", 0, 0, MAX_SIZE):
        raise unsupported("shared_intermediate_size", hf["shared_intermediate_size"], "0")
    kinds = hf.get("attn_type_list")
    if kinds is not None and set(whole_list(kinds, "attn_type_list", items=MAX_LAYERS, least=0, most=9)) > {1}:
        raise unsupported("attn_type_list", kinds, "1 for every layer")


def _with_share(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with `partial_rotary_factor`, which the hub's has as a number of columns, `rotary_dim`."""
    if hf.get("rotary_dim") is None:
        return hf
    rotated, dim = rotary_dim("rotary_dim", size(hf, "rotary_dim")), size(hf, "head_dim")
    if rotated > dim:
        raise ModelFormatError(f"config.json has rotary_dim={rotated} and only head_dim={dim}")
    return with_defaults(hf, partial_rotary_factor=rotated / dim)


def harmless(config: ModelConfig) -> re.Pattern[str]:
    mtp = "|".join(str(config.num_layers + i) for i in range(_MTP_LAYERS))
    return any_of([llama_harmless(config).pattern, rf"model\.layers\.({mtp})\..*"])


def key_map(config: ModelConfig) -> KeyMap:
    """Paths of `CausalLM` -> pieces."""
    return {
        path: tuple(replace(piece, name=_renamed(piece.name)) for piece in pieces)
        for path, pieces in decoder_key_map(config).items()
    }


def _renamed(name: str) -> str:
    return mixtral_name(name).replace(".gate.e_score_correction_bias", ".e_score_correction_bias")
