"""Kimi-Linear: three layers of Kimi Delta Attention to each one of latent attention, and DeepSeek-V3's mixtures.

Nothing is rotated: positions enter through what the linear layers forget. The 64 columns that latent attention rotates
elsewhere are there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxspec.errors import ModelFormatError
from jaxspec.models import deepseek
from jaxspec.models.config import AttentionSpec, LayerSpec, ModelConfig, Published
from jaxspec.models.decoder import decoder_key_map
from jaxspec.models.fields import (
    CONFIG,
    flag,
    real_or,
    require,
    section,
    text_or,
    whole,
    whole_list,
    whole_or,
    with_defaults,
)
from jaxspec.models.hf_fields import (
    MAX_LAYERS,
    MAX_POSITION,
    MAX_SIZE,
    MAX_TAPS,
    common_fields,
    layer_kinds,
    norm_eps,
    num_layers,
    size,
    unsupported,
)
from jaxspec.models.keymap import KeyMap, Piece, mixtral_name
from jaxspec.models.kimi_delta import KimiDeltaSpec
from jaxspec.models.layers import DenseSpec
from jaxspec.models.moe import MoESpec
from jaxspec.models.moe_fields import MAX_EXPERTS, read_experts

ARCHITECTURES = {"KimiLinearForCausalLM": Published("Kimi-Linear-48B-A3B")}
_LINEAR, _FULL = "linear_attention", "full_attention"
_SECTION = "linear_attn_config"
_WHERE = f"{_SECTION} of {CONFIG}"


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    if hf.get("max_position_embeddings") is None:
        hf = with_defaults(hf, max_position_embeddings=whole(hf, "model_max_length", 1, MAX_POSITION))
    common = common_fields(hf, architecture)
    _check_options(hf)
    linear = section(hf, _SECTION)
    specs: dict[str, AttentionSpec] = {
        _LINEAR: _read_linear(hf, linear),
        _FULL: deepseek.read_attention(hf, nope=True),
    }
    dense, mixture = DenseSpec(size(hf, "intermediate_size")), _read_mixture(hf)
    first = whole_or(hf, "first_k_dense_replace", 1, 0, MAX_LAYERS)
    mlps = layer_kinds(hf, "mlp_layer_types", "dense", "sparse") or [
        "dense" if i < first else "sparse" for i in range(num_layers(hf))
    ]
    kinds = layer_kinds(hf, "layer_types", _LINEAR, _FULL) or _listed_kinds(hf, linear)
    return ModelConfig(
        **common,
        layers=tuple(
            LayerSpec(specs[kind], mixture if mlp == "sparse" else dense) for kind, mlp in zip(kinds, mlps, strict=True)
        ),
    )


def _check_options(hf: Mapping[str, Any]) -> None:
    """Raises `ModelFormatError` where a model differs from the published ones in what is not read."""
    if not flag(hf, "mla_use_nope", default=True):
        raise unsupported("mla_use_nope", False, "true")
    if (scoring := text_or(hf, "moe_router_activation_func", "sigmoid")) != "sigmoid":
        raise unsupported("moe_router_activation_func", scoring, "sigmoid")
    for key, value, most in (
        ("moe_layer_freq", 1, MAX_LAYERS),
        ("num_expert_group", 1, MAX_EXPERTS),
        ("topk_group", 1, MAX_EXPERTS),
        ("num_nextn_predict_layers", 0, MAX_LAYERS),
    ):
        if (found := whole_or(hf, key, value, 0, most)) != value:
            raise unsupported(key, found, str(value))


def _read_linear(hf: Mapping[str, Any], linear: Mapping[str, Any]) -> KimiDeltaSpec:
    """From the hub's section, or where that lacks a number from the key that transformers writes."""

    def number(key: str, theirs: str, least: int, most: int) -> int:
        if linear.get(key) is None and hf.get(theirs) is not None:
            return whole(hf, theirs, least, most)
        return whole(linear, key, least, most, where=_WHERE)

    heads = number("num_heads", "linear_num_heads", 1, MAX_SIZE)
    dim = number("head_dim", "linear_head_dim", 1, MAX_SIZE // heads)
    taps = number("short_conv_kernel_size", "linear_conv_kernel_dim", 2, MAX_TAPS)
    return KimiDeltaSpec(heads, heads, dim, dim, taps, norm_eps(hf))


def _listed_kinds(hf: Mapping[str, Any], linear: Mapping[str, Any]) -> Sequence[str]:
    """The kind of each layer from two lists of numbers that count layers from 1."""
    keys, layers = {"kda_layers": _LINEAR, "full_attn_layers": _FULL}, num_layers(hf)
    require(linear, *keys, where=_WHERE)
    kinds = [
        (i - 1, kind)
        for key, kind in keys.items()
        for i in whole_list(linear[key], key, items=MAX_LAYERS, least=1, most=layers, where=_WHERE)
    ]
    if len(kinds) != layers or len(dict(kinds)) != layers:
        raise ModelFormatError(
            f"{' and '.join(keys)} in {_WHERE} must name each of num_hidden_layers={layers} layers once, counted from 1"
        )
    return [kind for _, kind in sorted(kinds)]


def _read_mixture(hf: Mapping[str, Any]) -> MoESpec:
    experts, top_k = read_experts(hf, "num_experts", chosen="num_experts_per_token")
    return MoESpec(
        num_experts=experts,
        top_k=top_k,
        expert_dim=size(hf, "moe_intermediate_size"),
        num_shared=whole_or(hf, "num_shared_experts", 1, 0, MAX_EXPERTS),
        scoring="sigmoid",
        normalize=flag(hf, "moe_renormalize", default=True),
        scale=real_or(hf, "routed_scaling_factor", 2.446, 1e-6, 1e6),
    )


harmless = deepseek.harmless


def key_map(config: ModelConfig) -> KeyMap:
    """Paths of `CausalLM` -> pieces. transformers saves a dense layer's MLP under the name of a mixture."""
    mixtures = {i for i, spec in enumerate(config.layers) if isinstance(spec.mlp, MoESpec)}

    def named(path: tuple[str | int, ...], piece: Piece) -> Piece:
        if path[0] != "layers" or path[2] != "mlp":
            return piece
        name = mixtral_name(piece.name)
        return replace(piece, name=name) if path[1] in mixtures else replace(piece, also=name)

    return {path: tuple(named(path, piece) for piece in pieces) for path, pieces in decoder_key_map(config).items()}
