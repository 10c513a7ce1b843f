"""The random checkpoints and prompts of `bench draft_ids`."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
# Sizes of attention as published: kernels are built for them.
MTP: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 3,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 256, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1,
}  # fmt: skip
# Eight layers: the default choice of captured layers, (2, L // 2, L - 3), must be three different ones.
TARGET: dict[str, Any] = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "mlp_bias": False,
}  # fmt: skip
EAGLE3: dict[str, Any] = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 2048,
}  # fmt: skip

# vLLM's NextN layer reads a zero embedding with the first hidden state of a text; jaxspec, like the other engines, the
# second token's. Every prompt has this token there, whose embedding is zero, so that both read the same.
BLANK = 1

# Checkpoints, and the folder of each one's draft where it is not part of it.
DRAFTS = {"mtp": None, "eagle3": "eagle3-head"}


def make(folder: Path, seed: int = 0) -> None:
    """Writes the folders mtp, eagle3 and eagle3-head: Hugging Face layout, bfloat16, the same bits for one seed."""
    from jaxspec.models.decoder import decoder_key_map
    from jaxspec.models.eagle3 import eagle3_key_map, read_eagle3_config
    from jaxspec.models.mtp import nextn_key_map
    from jaxspec.models.registry import read_config

    rng = np.random.default_rng(seed)
    config = read_config(MTP)
    tensors = _random_tensors(rng, _shapes(decoder_key_map(config)) | _shapes(nextn_key_map(config)))
    nextn = f"model.layers.{config.num_layers}."
    tensors[f"{nextn}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{nextn}shared_head.head.weight"] = tensors["lm_head.weight"]
    _write(folder / "mtp", MTP, tensors)

    _write(folder / "eagle3", TARGET, _random_tensors(rng, _shapes(decoder_key_map(read_config(TARGET)))))

    head = read_eagle3_config(EAGLE3)
    pieces = eagle3_key_map(head, names=["midlayer."], own_embedding=False, own_head=True)
    tensors = _random_tensors(rng, _shapes(pieces))
    V, Vd = head.model.vocab_size, head.draft_vocab_size
    chosen = np.sort(rng.permutation(V)[:Vd])
    tensors["d2t"] = chosen - np.arange(Vd)
    tensors["t2d"] = np.isin(np.arange(V), chosen)
    _write(folder / "eagle3-head", EAGLE3, tensors)


def _shapes(pieces: Any) -> dict[str, tuple[int, ...]]:
    return {piece.name: piece.shape for group in pieces.values() for piece in group}


def _random_tensors(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """float32. Weights N(0, 1 / fan_in), embeddings N(0, 1), norms U(0.5, 1.5), router biases N(0, 0.1)."""
    out = {}
    for name, shape in shapes.items():
        if "norm" in name:
            out[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            continue
        value = rng.standard_normal(shape, np.float32)
        if "bias" in name:
            value *= 0.1
        elif "embed" in name:
            value[BLANK] = 0
        else:
            value /= math.sqrt(shape[-1])
        # Which of two equally good experts comes fourth is a near-tie too: no single one may decide a token.
        if "mlp.experts" in name and "down_proj" in name:
            value *= 0.5
        out[name] = value
    return out


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    import ml_dtypes
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    half = {
        name: value if value.dtype != np.float32 or "bias" in name else value.astype(ml_dtypes.bfloat16)
        for name, value in tensors.items()
    }
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})


def make_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Random ids, from 3 tokens to some pages of them; see BLANK."""
    rng = np.random.default_rng(1)
    lengths = np.geomspace(3, 300, count).round().astype(int)
    prompts = [rng.integers(3, vocab_size, n).tolist() for n in lengths]
    return [[prompt[0], BLANK, *prompt[2:]] for prompt in prompts]
