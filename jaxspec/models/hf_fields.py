"""Reading a Hugging Face `config.json`: what the families have in common.

Both spellings are accepted: the hub's (`rope_theta` + `rope_scaling`, `torch_dtype`) and the one that transformers 5
writes (`rope_parameters`, `dtype`, and no `scoring_func`/`topk_method`).
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ModelFormatError
from jaxspec.models.config import RopeConfig


def require(hf: Mapping[str, Any], *keys: str) -> None:
    missing = [k for k in keys if hf.get(k) is None]
    if missing:
        raise ModelFormatError(f"config.json lacks {', '.join(missing)}")


def unsupported(key: str, value: object, supported: str) -> ModelFormatError:
    return ModelFormatError(f"config.json has {key}={value!r}, which is not supported (supported: {supported})")


def common_fields(hf: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Arguments of `ModelConfig` that every family reads alike: all but its layers."""
    require(
        hf, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps",
        "max_position_embeddings",
    )  # fmt: skip
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise unsupported(key, hf[key], "false")
    if hf.get("hidden_act", "silu") != "silu":
        raise unsupported("hidden_act", hf["hidden_act"], "silu")
    return {
        "architecture": architecture,
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "rms_norm_eps": float(hf["rms_norm_eps"]),
        "max_position": hf["max_position_embeddings"],
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "dtype": hf.get("dtype") or hf.get("torch_dtype") or "bfloat16",
        "eos_token_ids": eos_ids(hf.get("eos_token_id")),
    }


def eos_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def read_rope(hf: Mapping[str, Any], dim: int, *, interleaved: bool) -> RopeConfig:
    """The rotary embedding of a Hugging Face config."""
    raw: dict[str, Any] = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
    theta = float(raw.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind: Any = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise unsupported("rope type", kind, "default, linear, yarn, llama3")
    if kind == "default":
        return RopeConfig(dim, theta, interleaved=interleaved)
    original = raw.get("original_max_position_embeddings") or hf.get("max_position_embeddings")
    return RopeConfig(
        dim,
        theta,
        kind,
        interleaved,
        factor=float(raw.get("factor") or 1.0),
        original_max_position=int(original or 0),
        beta_fast=float(raw.get("beta_fast") or 32),
        beta_slow=float(raw.get("beta_slow") or 1),
        mscale=raw.get("mscale"),
        mscale_all_dim=raw.get("mscale_all_dim"),
        attention_factor=raw.get("attention_factor"),
        low_freq_factor=float(raw.get("low_freq_factor") or 1.0),
        high_freq_factor=float(raw.get("high_freq_factor") or 4.0),
    )
