"""Llama and Qwen3, dense: grouped-query attention, in Qwen3 with normed queries and keys."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxspec.models.config import LayerSpec, ModelConfig, Published
from jaxspec.models.fields import flag
from jaxspec.models.gqa import GQASpec
from jaxspec.models.hf_fields import (
    common_fields,
    divisible,
    norm_eps,
    num_layers,
    partial_rotary_dim,
    read_rope,
    rotary_dim,
    size,
    unsupported,
)
from jaxspec.models.keymap import ROTARY_TABLES, any_of
from jaxspec.models.layers import DenseSpec

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
ARCHITECTURES = {LLAMA: Published("Llama and models of its layout"), QWEN3: Published("Qwen3, dense")}


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    common = common_fields(hf, architecture, biases=True)
    attention = read_attention(hf, qk_norm="head" if architecture == QWEN3 else None)
    layer = LayerSpec(attention, DenseSpec(size(hf, "intermediate_size")))
    return ModelConfig(**common, layers=(layer,) * num_layers(hf))


def read_attention(
    hf: Mapping[str, Any],
    *,
    qk_norm: Literal["head", "whole"] | None = None,
    partial_rotary: float | None = None,
    out_bias: bool = True,
) -> GQASpec:
    """
    Args:
        partial_rotary: the share of a head that is rotated where the configuration does not say it; None: all of it,
            whatever the configuration says.
        out_bias: `attention_bias` is also said of the output.
    """
    if flag(hf, "use_sliding_window"):
        raise unsupported("use_sliding_window", True, "false")
    heads = size(hf, "num_attention_heads")
    kv_heads = heads if hf.get("num_key_value_heads") is None else size(hf, "num_key_value_heads")
    divisible(hf, "num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_dim = _head_dim(hf, heads)
    rotated = head_dim if partial_rotary is None else partial_rotary_dim(hf, head_dim, default=partial_rotary)
    biases = flag(hf, "attention_bias")
    return GQASpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        rope=read_rope(hf, rotated, interleaved=False),
        qk_norm=qk_norm,
        norm_eps=norm_eps(hf),
        bias=biases,
        out_bias=biases and out_bias,
    )


def _head_dim(hf: Mapping[str, Any], heads: int) -> int:
    if hf.get("head_dim") is not None:
        return rotary_dim("head_dim", size(hf, "head_dim"))
    hidden = size(hf, "hidden_size")
    divisible(hf, "hidden_size", hidden, "num_attention_heads", heads)
    return rotary_dim("hidden_size / num_attention_heads", hidden // heads)


def harmless(config: ModelConfig) -> re.Pattern[str]:
    # Some writers store the head although it is the embedding.
    return any_of([ROTARY_TABLES, *([r"lm_head\.weight"] if config.tie_embeddings else [])])
