"""Tiny random Hugging Face checkpoints of every supported variant, made with the transformers classes.

Fresh models have unit norms and zero router biases, which hide mistakes, so here everything is random: weights
N(0, 1 / fan_in), embeddings N(0, 1), norms U(0.5, 1.5), router biases N(0, 0.1).
"""

import copy
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from torch import Tensor

Spelling = Literal["hub", "transformers"]

_COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MLA = _COMMON | {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 40, "first_k_dense_replace": 1, "moe_layer_freq": 1,
}  # fmt: skip
_V2 = _MLA | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "scoring_func": "softmax",
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
_V3 = _MLA | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# Values wider than the keys, and several ends of text.
_GLM_LITE = _MLA | {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "qk_nope_head_dim": 24, "v_head_dim": 32,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_shared_experts": 1,
    "num_nextn_predict_layers": 1, "eos_token_id": [2, 3, 5], "rms_norm_eps": 1e-5,
}  # fmt: skip
# Far fewer keys are chosen than tests have. With many heads no two keys score 0: the class lets any of equal ones win.
_DSA = _V3 | {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 16, "num_nextn_predict_layers": 1}
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, "head_dim": 16,
    "mlp_bias": False,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# Head size and hidden size are unrelated in Qwen3.
_QWEN3 = _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": [0], "norm_topk_prob": True,
}  # fmt: skip
# As GLM-4.6; GLM-4.5-Air has no norms of queries and keys.
_GLM4_MOE = _LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True,
    "partial_rotary_factor": 0.5, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "moe_intermediate_size": 40, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
_MINIMAX_M2 = _LLAMA | {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "intermediate_size": 40, "rotary_dim": 8,
    "num_local_experts": 8, "num_experts_per_tok": 3, "scoring_func": "sigmoid", "use_routing_bias": True,
    "use_qk_norm": True, "qk_norm_type": "per_layer", "attn_type_list": [1, 1, 1], "use_mtp": True,
    "num_mtp_modules": 3,
}  # fmt: skip
# A window of less than a page, that prompts and answers grow out of.
_GPT_OSS = _LLAMA | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "intermediate_size": 40,
    "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 20, "swiglu_limit": 1.5, "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip

# Sizes of which several are no multiple of the 128 x 128 blocks, and one whose rotary rows straddle a block boundary.
_FP8 = _V3 | {
    "intermediate_size": 160, "moe_intermediate_size": 136, "kv_lora_rank": 120, "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_QUANTIZATION = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip

# Heads and latents of MiniCPM3-4B in a narrow model. Its released long-context factors are equal for short and long.
_MINICPM3 = _COMMON | {
    "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "num_key_value_heads": 4, "kv_lora_rank": 256,
    "q_lora_rank": 24, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "scale_emb": 12,
    "scale_depth": 1.4, "dim_model_base": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "longrope", "original_max_position_embeddings": 128,
        "short_factor": [1.0 + 0.1 * i for i in range(16)], "long_factor": [1.0 + 0.1 * i for i in range(16)],
    },
}  # fmt: skip
# Heads of values that share a key, and both kinds of layers.
_QWEN3_5 = _LLAMA | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 3, "mtp_num_hidden_layers": 1,
}  # fmt: skip
_QWEN3_5_MOE = {key: value for key, value in _QWEN3_5.items() if key != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
}  # fmt: skip
_QWEN3_NEXT = {key: value for key, value in _QWEN3_5_MOE.items() if key != "mtp_num_hidden_layers"} | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "intermediate_size": 96, "mlp_only_layers": [1],
    "decoder_sparse_step": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.25,
}  # fmt: skip
# Both kinds of attention and of MLPs, and numbers of layers that count from 1.
_OTHERWISE_NAMED = ("max_position_embeddings", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
_KIMI_LINEAR = {key: value for key, value in _MLA.items() if key not in _OTHERWISE_NAMED} | {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "q_lora_rank": None, "mla_use_nope": True,
    "model_max_length": 512, "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 1, "num_expert_group": 1,
    "topk_group": 1, "use_grouped_topk": True, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 0, "pad_token_id": 0,
    "linear_attn_config": {
        "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1, 2], "full_attn_layers": [3],
    },
}  # fmt: skip
# The text part, as inside the released file, of a multimodal model.
_KIMI_TEXT = _V3 | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "rope_scaling": _YARN, "model_type": "kimi_k2"}
_KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "media_placeholder_token_id": 9,
    "tie_word_embeddings": True, "text_config": _KIMI_TEXT | {"eos_token_id": 3},
}  # fmt: skip

# In hub spelling. "v3-fp8-dequantised" has the weights of "v3-fp8" (same seed) in bfloat16, dequantised by PyTorch.
CONFIGS: dict[str, dict[str, Any]] = {
    "v2-lite": _V2 | {"q_lora_rank": None},
    "v2": _V2,
    "v2-grouped": _V2
    | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
    "v3": _V3,
    "v3-mtp": _V3 | {"num_nextn_predict_layers": 1},
    "v3-yarn": _V3 | {"rope_scaling": _YARN, "num_attention_heads": 2, "num_key_value_heads": 2},
    "glm4-lite": _GLM_LITE,
    "v32": _DSA | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "glm-dsa": _DSA
    | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "qk_nope_head_dim": 24, "v_head_dim": 32}
    | {"n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared", "full"]},
    "moonlight": _V3
    | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446},
    "kimi-k25": _KIMI,
    "minicpm3": _MINICPM3,
    "llama": _LLAMA,
    "llama3-rope": _LLAMA | {"rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE},
    "qwen3": _QWEN3,
    "qwen3-tied": _QWEN3 | {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3-moe": _QWEN3_MOE,
    "qwen3-moe-unnormalised": _QWEN3_MOE | {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2},
    "glm4-moe": _GLM4_MOE,
    "glm4-moe-air": _GLM4_MOE | {"use_qk_norm": False, "num_nextn_predict_layers": 0, "routed_scaling_factor": 1.0},
    "minimax-m2": _MINIMAX_M2,
    "gpt-oss": _GPT_OSS,
    "qwen3.5": _QWEN3_5,
    "qwen3.5-moe": _QWEN3_5_MOE,
    "qwen3-next": _QWEN3_NEXT,
    "kimi-linear": _KIMI_LINEAR,
    "v3-fp8": _FP8 | {"quantization_config": _QUANTIZATION},
    "v3-fp8-dequantised": _FP8,
}
VARIANTS = tuple(CONFIGS)
# Others differ from these in names or in a default only.
TWINS = ("v32", "kimi-k25", "qwen3-moe-unnormalised", "glm4-moe-air", "qwen3-next")
# What is in them is in others: v3-fp8, v2-lite and v2-grouped, qwen3-tied, qwen3.5-moe and llama, kimi-linear and glm-dsa.
COVERED = ("v3", "v3-mtp", "v3-fp8-dequantised", "v2", "qwen3", "qwen3-moe", "qwen3.5", "moonlight")


def variants(*left_out: str) -> list[Any]:
    """Parameters of a test for each variant; those of `TWINS` and `COVERED` are for full runs."""
    named = (v for v in VARIANTS if v not in left_out)
    return [pytest.param(v, marks=pytest.mark.full) if v in (*TWINS, *COVERED) else v for v in named]


def tiny_checkpoint(variant: str, folder: Path, seed: int = 0, *, spelling: Spelling = "hub", **changes: Any) -> Path:
    """Writes the checkpoint of a variant into `folder` and returns it. float32, but for the FP8 pair.

    Args:
        changes: of the variant's configuration.
        spelling: of config.json. "hub": `rope_theta`, `rope_scaling`, `topk_method` ... as published models have it.
            "transformers": what transformers 5 saves (`rope_parameters`, `dtype`; V3 without scoring_func).
    """
    import torch
    import transformers

    whole = copy.deepcopy(CONFIGS[variant])
    hub = whole.get("text_config", whole)
    hub |= changes
    folder.mkdir(parents=True, exist_ok=True)
    cls = getattr(transformers, hub["architectures"][0])
    unknown = {"scoring_func", "moe_layer_freq", "quantization_config", "torch_dtype"}
    unknown |= {"topk_method"} if hub["model_type"] != "deepseek_v2" else set()
    unknown |= {"model_type"}
    known = {k: v for k, v in hub.items() if k not in unknown}
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        model = cls(cls.config_class(**known))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_random(name, tensor.shape, generator))
    model.save_pretrained(folder)
    _rewrite(folder, hub, generator, wrapped=hub is not whole)
    if spelling == "hub":
        hub["torch_dtype"] = hub.get("torch_dtype", "float32")
        (folder / "config.json").write_text(json.dumps(whole))
    return folder


def _random(name: str, shape: Any, generator: Any) -> "Tensor":
    import torch

    if "norm" in name:  # layer norms, and the two of an MTP layer (enorm, hnorm)
        return torch.rand(shape, generator=generator) + 0.5
    value = torch.randn(shape, generator=generator)
    if name.endswith("sinks"):
        return value
    if "bias" in name:
        return 0.1 * value
    return value if "embed" in name else value / math.sqrt(shape[-1])


def _rewrite(folder: Path, hub: dict[str, Any], generator: Any, *, wrapped: bool) -> None:
    """Adds what transformers does not save: the MTP layer, FP8 weights and, if wrapped, the names of a multimodal model."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    if hub["model_type"] == "kimi_linear":
        # The hub's names: transformers saves a dense layer's MLP as a mixture.
        dense = [f"layers.{i}." for i in range(hub["first_k_dense_replace"])]
        tensors = {
            n.replace("block_sparse_moe", "mlp") if any(d in n for d in dense) else n: t for n, t in tensors.items()
        }
    if hub.get("num_nextn_predict_layers"):
        tensors |= _mtp(tensors, hub, generator)
    if hub.get("mtp_num_hidden_layers") or hub["model_type"] == "qwen3_next":
        tensors |= _qwen_mtp(tensors, hub, generator)
    if hub.get("torch_dtype") == "bfloat16":
        kept = "e_score_correction_bias"
        tensors = {name: t if name.endswith(kept) else t.bfloat16() for name, t in tensors.items()}
        tensors = _quantise(tensors, keep="quantization_config" in hub)
    if wrapped:
        tensors = {f"language_model.{name}": t for name, t in tensors.items()}
        tensors |= {f"{n}.weight": torch.ones(3) for n in ("vision_tower.patch_embed.proj", "mm_projector.pre_norm")}
    save_file(tensors, file, metadata={"format": "pt"})


def _mtp(tensors: "dict[str, Tensor]", hub: dict[str, Any], generator: Any) -> "dict[str, Tensor]":
    """The NextN layer of DeepSeek-V3 as the hub stores it, its copies of embedding and head included."""
    H, last = hub["hidden_size"], hub["num_hidden_layers"]
    old, new = f"model.layers.{last - 1}.", f"model.layers.{last}."
    shapes = {new + n.removeprefix(old): t.shape for n, t in tensors.items() if n.startswith(old)}
    shapes |= {f"{new}{n}.weight": (H,) for n in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{new}eh_proj.weight"] = (H, 2 * H)
    out = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    out[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    out[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return out


def _qwen_mtp(tensors: "dict[str, Tensor]", hub: dict[str, Any], generator: Any) -> "dict[str, Tensor]":
    """The NextN layer of Qwen3.5 and Qwen3-Next as the hub stores it."""
    H, old = hub["hidden_size"], f"model.layers.{hub['num_hidden_layers'] - 1}."
    shapes = {f"mtp.layers.0.{n.removeprefix(old)}": t.shape for n, t in tensors.items() if n.startswith(old)}
    shapes |= {f"mtp.{n}.weight": (H,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes["mtp.fc.weight"] = (H, 2 * H)
    return {name: _random(name, shape, generator) for name, shape in shapes.items()}


def _quantise(tensors: "dict[str, Tensor]", *, keep: bool) -> "dict[str, Tensor]":
    """DeepSeek's block scaling of all attention and MLP projections; without `keep`, dequantised again."""
    import torch

    out = {}
    for name, tensor in tensors.items():
        if "_proj" not in name or "eh_proj" in name:
            out[name] = tensor
            continue
        rows, cols = tensor.shape
        padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 128) * 128)
        padded[:rows, :cols] = tensor.float()
        blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
        weight = (tensor.float() / full).to(torch.float8_e4m3fn)
        if keep:
            out |= {name: weight, name + "_scale_inv": scale}
        else:
            out[name] = (weight.float() * full).bfloat16()
    return out
