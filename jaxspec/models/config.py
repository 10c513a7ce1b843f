"""Model configurations, read once from a Hugging Face `config.json` into frozen dataclasses.

Both spellings are accepted: the hub's (`rope_theta` + `rope_scaling`, `torch_dtype`) and the one that transformers 5
writes (`rope_parameters`, `dtype`, and no `scoring_func`/`topk_method`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxspec.errors import ModelFormatError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over `dim` dimensions. `kind` other than "default" rescales the frequencies.

    Attributes:
        interleaved: the checkpoint pairs dimensions (0,1), (2,3), ... (GPT-J style). The converter permutes such rows
            once, so that all model code rotates halves.
        factor, original_max_position, beta_fast, beta_slow, mscale, mscale_all_dim: YaRN (arXiv 2309.00071), with
            DeepSeek's two temperature factors. `factor` also serves kinds "linear" and "llama3".
        low_freq_factor, high_freq_factor: kind "llama3".
    """

    dim: int
    theta: float
    kind: Literal["default", "linear", "yarn", "llama3"] = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1): sizes of the latent and the heads."""

    kv_lora_rank: int
    q_lora_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    softmax_scale: float
    # The reference implementations build the two latent norms with their class default, not with rms_norm_eps.
    latent_norm_eps: float = 1e-6

    @property
    def cache_dim(self) -> int:
        """Values cached for one token in one layer: the normed latent and the rotated shared key."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention. `qk_norm`: an RMS norm over each head's query and key (Qwen3)."""

    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    qk_norm: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts (DeepSeek-V3, arXiv 2412.19437 section 2.1.2; V2, arXiv 2405.04434 section 2.2).

    `scoring` "sigmoid" selects with a learned bias and sums the best two scores of a group; "softmax" selects without
    bias and takes a group's best score.
    """

    num_experts: int
    top_k: int
    expert_dim: int
    num_shared: int
    scoring: Literal["sigmoid", "softmax"]
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = False
    scale: float = 1.0
    first_layer: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model: everything the model code needs, nothing it does not."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    attention: MLAConfig | GQAConfig
    moe: MoEConfig | None = None
    num_nextn_layers: int = 0
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.first_layer


def _require(hf: Mapping[str, Any], *keys: str) -> None:
    missing = [k for k in keys if hf.get(k) is None]
    if missing:
        raise ModelFormatError(f"config.json lacks {', '.join(missing)}")


def _unsupported(key: str, value: object, wanted: str) -> ModelFormatError:
    return ModelFormatError(f"config.json has {key}={value!r}, which is not supported (supported: {wanted})")


def read_rope(hf: Mapping[str, Any], dim: int, *, interleaved: bool) -> RopeConfig:
    """The rotary embedding of a Hugging Face config."""
    raw: dict[str, Any] = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
    theta = float(raw.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind: Any = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise _unsupported("rope type", kind, "default, linear, yarn, llama3")
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


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, as in the DeepSeek model files."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_mla(hf: Mapping[str, Any], rope: RopeConfig) -> MLAConfig:
    nope, rope_dim = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    scale = (nope + rope_dim) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return MLAConfig(
        kv_lora_rank=hf["kv_lora_rank"],
        q_lora_rank=hf.get("q_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=hf["v_head_dim"],
        softmax_scale=scale,
        latent_norm_eps=float(hf.get("latent_norm_eps") or 1e-6),
    )


def _read_moe(hf: Mapping[str, Any], *, v3: bool) -> MoEConfig | None:
    if not hf.get("n_routed_experts"):
        return None
    _require(hf, "num_experts_per_tok", "moe_intermediate_size")
    scoring: Any = hf.get("scoring_func") or ("sigmoid" if v3 else "softmax")
    method = hf.get("topk_method") or ("noaux_tc" if v3 else "greedy")
    if (scoring, method) not in (
        ("sigmoid", "noaux_tc"),
        ("softmax", "greedy"),
        ("softmax", "group_limited_greedy"),
    ):
        raise _unsupported(
            "scoring_func, topk_method",
            (scoring, method),
            "sigmoid with noaux_tc; softmax with greedy or group_limited_greedy",
        )
    if hf.get("moe_layer_freq", 1) != 1:
        raise _unsupported("moe_layer_freq", hf["moe_layer_freq"], "1")
    grouped = method != "greedy"
    return MoEConfig(
        num_experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        expert_dim=hf["moe_intermediate_size"],
        num_shared=hf.get("n_shared_experts") or 0,
        scoring=scoring,
        num_groups=(hf.get("n_group") or 1) if grouped else 1,
        top_groups=(hf.get("topk_group") or 1) if grouped else 1,
        # Hugging Face's V2 never renormalises, whatever the config says; every released V2 has it false.
        normalize=bool(hf.get("norm_topk_prob")) and v3,
        scale=float(hf.get("routed_scaling_factor") or 1.0),
        first_layer=hf.get("first_k_dense_replace") or 0,
    )


def eos_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _common(hf: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    _require(
        hf, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps",
        "max_position_embeddings",
    )  # fmt: skip
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise _unsupported(key, hf[key], "false")
    if hf.get("hidden_act", "silu") != "silu":
        raise _unsupported("hidden_act", hf["hidden_act"], "silu")
    return {
        "architecture": architecture,
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "mlp_dim": hf["intermediate_size"],
        "rms_norm_eps": float(hf["rms_norm_eps"]),
        "max_position": hf["max_position_embeddings"],
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "dtype": hf.get("dtype") or hf.get("torch_dtype") or "bfloat16",
        "eos_token_ids": eos_ids(hf.get("eos_token_id")),
    }


def read_deepseek(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    """`DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM` (also R1, Kimi-K2, Moonlight)."""
    _require(hf, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    v3 = architecture == "DeepseekV3ForCausalLM"
    rope = read_rope(hf, hf["qk_rope_head_dim"], interleaved=bool(hf.get("rope_interleave", True)))
    return ModelConfig(
        **_common(hf, architecture),
        rope=rope,
        attention=_read_mla(hf, rope),
        moe=_read_moe(hf, v3=v3),
        num_nextn_layers=(hf.get("num_nextn_predict_layers") or 0) if v3 else 0,
    )


def read_llama(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    """`LlamaForCausalLM` and `Qwen3ForCausalLM`, dense."""
    common = _common(hf, architecture)
    if hf.get("use_sliding_window"):
        raise _unsupported("use_sliding_window", True, "false")
    head_dim = hf.get("head_dim") or common["hidden_size"] // common["num_heads"]
    num_kv_heads = hf.get("num_key_value_heads") or common["num_heads"]
    return ModelConfig(
        **common,
        rope=read_rope(hf, head_dim, interleaved=False),
        attention=GQAConfig(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            softmax_scale=head_dim**-0.5,
            qk_norm=architecture == "Qwen3ForCausalLM",
        ),
    )


READERS = {
    "DeepseekV2ForCausalLM": read_deepseek,
    "DeepseekV3ForCausalLM": read_deepseek,
    "LlamaForCausalLM": read_llama,
    "Qwen3ForCausalLM": read_llama,
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a Hugging Face `config.json`, already parsed as JSON.

    Raises:
        ModelFormatError: an architecture or option that is not supported; the text lists what is.
    """
    architectures = hf.get("architectures") or []
    for architecture in architectures:
        if architecture in READERS:
            return READERS[architecture](hf, architecture)
    raise ModelFormatError(
        f"unsupported architecture {', '.join(map(str, architectures)) or '(none named in config.json)'}; "
        f"supported: {', '.join(READERS)}"
    )
