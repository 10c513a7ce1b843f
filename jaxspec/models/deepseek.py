"""DeepSeek-V2 and V3 (also R1, Kimi-K2, Moonlight): latent attention, routed experts, and a NextN layer in V3."""

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.models.config import LayerSpec, ModelConfig
from jaxspec.models.hf_fields import common_fields, read_rope, require, unsupported
from jaxspec.models.keymap import ROTARY_TABLES, any_of
from jaxspec.models.layers import DenseSpec, yarn_mscale
from jaxspec.models.mla import MLASpec
from jaxspec.models.moe import MoESpec
from jaxspec.models.mtp import nextn_prefix

V2, V3 = ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    common = common_fields(hf, architecture)
    attention, dense = read_attention(hf), DenseSpec(hf["intermediate_size"])
    moe = _read_moe(hf, v3=architecture == V3)
    num_dense = (hf.get("first_k_dense_replace") or 0) if moe else hf["num_hidden_layers"]
    nextn = (hf.get("num_nextn_predict_layers") or 0) if architecture == V3 else 0
    return ModelConfig(
        **common,
        layers=tuple(
            LayerSpec(attention, moe if moe and i >= num_dense else dense) for i in range(hf["num_hidden_layers"])
        ),
        nextn_layers=(LayerSpec(attention, moe or dense),) * nextn,
    )


def read_attention(hf: Mapping[str, Any]) -> MLASpec:
    require(hf, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    nope, rope_dim = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    rope = read_rope(hf, rope_dim, interleaved=bool(hf.get("rope_interleave", True)))
    scale = (nope + rope_dim) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return MLASpec(
        num_heads=hf["num_attention_heads"],
        kv_lora_rank=hf["kv_lora_rank"],
        q_lora_rank=hf.get("q_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=hf["v_head_dim"],
        softmax_scale=scale,
        rope=rope,
        latent_norm_eps=float(hf.get("latent_norm_eps") or 1e-6),
    )


def _read_moe(hf: Mapping[str, Any], *, v3: bool) -> MoESpec | None:
    if not hf.get("n_routed_experts"):
        return None
    require(hf, "num_experts_per_tok", "moe_intermediate_size")
    scoring: Any = hf.get("scoring_func") or ("sigmoid" if v3 else "softmax")
    method = hf.get("topk_method") or ("noaux_tc" if v3 else "greedy")
    if (scoring, method) not in (
        ("sigmoid", "noaux_tc"),
        ("softmax", "greedy"),
        ("softmax", "group_limited_greedy"),
    ):
        raise unsupported(
            "scoring_func, topk_method",
            (scoring, method),
            "sigmoid with noaux_tc; softmax with greedy or group_limited_greedy",
        )
    if hf.get("moe_layer_freq", 1) != 1:
        raise unsupported("moe_layer_freq", hf["moe_layer_freq"], "1")
    grouped = method != "greedy"
    return MoESpec(
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
    )


def harmless(config: ModelConfig) -> re.Pattern[str]:
    patterns = [ROTARY_TABLES]
    if config.nextn_layers:  # the NextN layer's copies of the target's embedding and head
        patterns.append(re.escape(nextn_prefix(config)) + r"(embed_tokens|shared_head\.head)\.weight")
    if config.tie_embeddings:  # some writers store the head although it is the embedding
        patterns.append(r"lm_head\.weight")
    return any_of(patterns)
