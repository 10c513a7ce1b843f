"""Llama and Qwen3, dense: grouped-query attention, in Qwen3 with normed queries and keys."""

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.models.config import LayerSpec, ModelConfig
from jaxspec.models.gqa import GQASpec
from jaxspec.models.hf_fields import common_fields, read_rope, unsupported
from jaxspec.models.keymap import ROTARY_TABLES, any_of
from jaxspec.models.layers import DenseSpec

LLAMA, QWEN3 = ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    common = common_fields(hf, architecture)
    layer = LayerSpec(read_attention(hf, qk_norm=architecture == QWEN3), DenseSpec(hf["intermediate_size"]))
    return ModelConfig(**common, layers=(layer,) * hf["num_hidden_layers"])


def read_attention(hf: Mapping[str, Any], *, qk_norm: bool = False) -> GQASpec:
    if hf.get("use_sliding_window"):
        raise unsupported("use_sliding_window", True, "false")
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    return GQASpec(
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        rope=read_rope(hf, head_dim, interleaved=False),
        qk_norm=qk_norm,
        norm_eps=float(hf["rms_norm_eps"]),
    )


def harmless(config: ModelConfig) -> re.Pattern[str]:
    # Some writers store the head although it is the embedding.
    return any_of([ROTARY_TABLES, *([r"lm_head\.weight"] if config.tie_embeddings else [])])
