"""MiniCPM3: latent attention with dense MLPs, and three scalars: of embeddings, of each branch, of the last hidden state."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.models.config import LayerSpec, ModelConfig, Published
from jaxspec.models.deepseek import harmless, read_attention
from jaxspec.models.fields import flag, real_or
from jaxspec.models.hf_fields import common_fields, divisible, num_layers, size
from jaxspec.models.layers import DenseSpec

ARCHITECTURES = {"MiniCPM3ForCausalLM": Published("MiniCPM3-4B")}

__all__ = ["ARCHITECTURES", "harmless", "read_config"]


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    common = common_fields(hf, architecture)
    layers, hidden = num_layers(hf), common["hidden_size"]
    branch = _scalar(hf, "scale_depth", 1.4, neutral=math.sqrt(layers)) / math.sqrt(layers)
    attention = replace(read_attention(_as_deepseek(hf)), output_scale=branch)
    layer = LayerSpec(attention, DenseSpec(size(hf, "intermediate_size"), scale=branch))
    return ModelConfig(
        **common | {"tie_embeddings": flag(hf, "tie_word_embeddings", default=True)},
        layers=(layer,) * layers,
        embed_scale=_scalar(hf, "scale_emb", 12.0, neutral=1.0),
        logit_scale=_scalar(hf, "dim_model_base", 256.0, neutral=hidden) / hidden,
    )


def _as_deepseek(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Queries and keys are always rotated by halves; the width of values may follow from that of the model."""
    out = {**hf, "rope_interleave": False}
    if out.get("v_head_dim") is None:
        heads, hidden = size(hf, "num_attention_heads"), size(hf, "hidden_size")
        divisible(hf, "hidden_size", hidden, "num_attention_heads", heads)
        out["v_head_dim"] = hidden // heads
    return out


def _scalar(hf: Mapping[str, Any], key: str, default: float, *, neutral: float) -> float:
    """The class's default where the key is absent; null stands for a scalar without effect there."""
    return neutral if hf.get(key, default) is None else real_or(hf, key, default, 1e-6, 1e6)
