"""Tiny random EAGLE3 checkpoints in the layout of the published heads, for the targets of tests/tiny_models.py."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

Head = Literal["llama", "mla"]

VOCAB, H = 256, 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": H, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
_YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.8, "mscale_all_dim": 0.8,
}  # fmt: skip
# Head size and hidden size are unrelated; derived configurations keep keys of a mixture of experts.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_key_value_heads": 2, "head_dim": 24},
    "mla": _COMMON
    | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "num_key_value_heads": 4,
        "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 20,
        "rope_scaling": _YARN, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    },
}  # fmt: skip


def tiny_draft(
    folder: Path,
    head: Head = "llama",
    *,
    prefix: str = "midlayer.",
    own_embedding: bool = False,
    own_head: bool = True,
    draft_vocab_size: int | None = None,
    seed: int = 0,
    speculators: bool = False,
    **config: Any,
) -> Path:
    """Writes a head into `folder` and returns it. `config` changes keys of config.json; None leaves one out.

    With `speculators` config.json has the layout of that library: the layer's own keys are nested.
    """
    hf = CONFIGS[head] | ({"draft_vocab_size": draft_vocab_size} if draft_vocab_size else {}) | config
    hf = {key: value for key, value in hf.items() if value is not None}
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.uniform(0.5, 1.5, shape) if "norm" in name else _normal(rng, name, shape)).astype(np.float32)
        for name, shape in _shapes(hf, prefix, own_embedding, own_head).items()
    }
    if draft_vocab_size:
        ids = np.sort(rng.permutation(hf["vocab_size"])[:draft_vocab_size])
        tensors["d2t"] = (ids - np.arange(draft_vocab_size)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(hf["vocab_size"]), ids)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_as_speculators(hf) if speculators else hf))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# Keys that the speculators layout has at the top; all others are the layer's.
_OF_SPECULATORS = (
    "draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids", "tie_word_embeddings", "torch_dtype",
)  # fmt: skip


def _as_speculators(hf: dict[str, Any]) -> dict[str, Any]:
    top = {key: hf[key] for key in _OF_SPECULATORS if key in hf}
    layer = {key: value for key, value in hf.items() if key not in top and key != "architectures"}
    verifier = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    return top | {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "target_hidden_size": None, "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
    }  # fmt: skip


def _normal(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape) * (1.0 if name == "embed_tokens.weight" else shape[-1] ** -0.5)


def _shapes(hf: dict[str, Any], prefix: str, own_embedding: bool, own_head: bool) -> dict[str, tuple[int, ...]]:
    hidden, heads, inner, vocab = (
        hf[k] for k in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    )
    attention: dict[str, tuple[int, ...]]
    if "kv_lora_rank" in hf:
        rank, nope, rope, v = (hf[k] for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        attention = {
            "q_a_proj": (hf["q_lora_rank"], 2 * hidden), "q_a_layernorm": (hf["q_lora_rank"],),
            "q_b_proj": (heads * (nope + rope), hf["q_lora_rank"]), "kv_a_proj_with_mqa": (rank + rope, 2 * hidden),
            "kv_a_layernorm": (rank,), "kv_b_proj": (heads * (nope + v), rank), "o_proj": (hidden, heads * v),
        }  # fmt: skip
    else:
        size, kv = hf["head_dim"], hf["num_key_value_heads"]
        attention = {
            "q_proj": (heads * size, 2 * hidden), "k_proj": (kv * size, 2 * hidden), "v_proj": (kv * size, 2 * hidden),
            "o_proj": (hidden, heads * size),
        }  # fmt: skip
    key = "eagle_aux_hidden_state_layer_ids"
    captured = len(hf.get("eagle_config", hf).get(key) or hf.get(key) or (0, 1, 2))
    out = {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
    out |= {f"{prefix}{n}.weight": (hidden,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    out |= {f"{prefix}mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
    out |= {f"{prefix}mlp.down_proj.weight": (hidden, inner), "norm.weight": (hidden,)}
    out["fc.weight"] = (hidden, captured * hidden)
    if hf.get("norm_before_fc"):
        out["input_norm.weight"] = (captured * hidden,)
    if hf.get("use_aux_norm"):
        out |= {f"aux_norm_{which}.weight": (hidden,) for which in ("low", "mid", "high")}
    if hf.get("fc_norm"):
        out |= {f"fc_norm.{i}.weight": (hidden,) for i in range(captured)}
    if own_embedding:
        out["embed_tokens.weight"] = (vocab, hidden)
    if own_head:
        out["lm_head.weight"] = (hf.get("draft_vocab_size", vocab), hidden)
    return out
