"""Sizes of published models, some cut to fewer layers, and tiny ones.

Moonlight-16B-A3B, GLM-4.7-Flash, Qwen3-30B-A3B, GLM-4.5-Air, MiniMax-M2, gpt-oss-20b, Qwen3.5-35B-A3B, Kimi-Linear-48B-A3B,
DeepSeek-V3, DeepSeek-V3.2, GLM-5 and Kimi-K2, from huggingface.co/{moonshotai/Moonlight-16B-A3B, zai-org/GLM-4.7-Flash,
Qwen/Qwen3-30B-A3B, zai-org/GLM-4.5-Air, MiniMaxAI/MiniMax-M2, openai/gpt-oss-20b, Qwen/Qwen3.5-35B-A3B,
moonshotai/Kimi-Linear-48B-A3B-Instruct, deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-V3.2, zai-org/GLM-5,
moonshotai/Kimi-K2-Instruct}. Those of GLM, MiniMax, gpt-oss, Qwen3.5, Kimi-Linear and DeepSeek-V3.2 are the defaults of
transformers' configuration classes (of gpt-oss with the layers and experts of the smaller model, of Qwen3.5 with the MTP
layer that the checkpoints have); tests/bench/test_shapes.py counts their parameters. Kimi-K2-Thinking and K2.5 have the
text model of Kimi-K2.

All widths are the published ones. So that random weights fit on one GPU with room for KV, GLM-4.7-Flash has 24 of 47
layers, Qwen3 24 of 48, GLM-4.5-Air 7 of 46, MiniMax-M2 4 of 62, gpt-oss 16 of 24, Qwen3.5 12 of 40 and Kimi-Linear 8 of 27.
DeepSeek-V3, V3.2, GLM-5 and Kimi-K2 are whole: they need several GPUs and quantised weights, or `--layers`. The toys have
their structure in widths for a CPU, which eight devices split between blocks of every scheme.
"""

from typing import Any

_MLA_OF_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "moe_layer_freq": 1, "hidden_size": 7168, "num_hidden_layers": 61,
    "intermediate_size": 18432, "rms_norm_eps": 1e-6, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
_YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
_DEEPSEEK_V3 = _MLA_OF_V3 | {
    "model_type": "deepseek_v3", "vocab_size": 129280, "num_attention_heads": 128, "max_position_embeddings": 163840,
    "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    "rope_theta": 10000.0, "rope_scaling": _YARN | {"factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_KIMI_K2 = _MLA_OF_V3 | {
    "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "max_position_embeddings": 131072,
    "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1,
    "rope_theta": 50000.0, "rope_scaling": _YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_DEEPSEEK_V32 = _DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 2048,
}  # fmt: skip
_GLM_5 = _MLA_OF_V3 | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144,
    "num_hidden_layers": 78, "num_attention_heads": 64, "intermediate_size": 12288, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "n_routed_experts": 256, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    "rope_theta": 10000.0, "num_nextn_predict_layers": 1, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "indexer_rope_interleave": True,
}  # fmt: skip
_TOY = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024,
    "kv_lora_rank": 128, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "moonlight": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "moe_layer_freq": 1,
        "vocab_size": 163840, "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "intermediate_size": 11264, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 50000.0,
        "num_nextn_predict_layers": 1,
    },
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "vocab_size": 154880,
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 20, "intermediate_size": 10240,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "kv_lora_rank": 512, "q_lora_rank": 768,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "topk_method": "noaux_tc",
        "rope_theta": 1e6, "num_nextn_predict_layers": 1,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rope_theta": 1e6,
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096,
        "num_hidden_layers": 7, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5, "intermediate_size": 10944,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rope_theta": 1e6, "num_nextn_predict_layers": 1,
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "vocab_size": 200064,
        "hidden_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "rotary_dim": 64, "use_qk_norm": True, "qk_norm_type": "per_layer", "intermediate_size": 1536,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 196608, "num_local_experts": 256, "num_experts_per_tok": 8,
        "scoring_func": "sigmoid", "use_routing_bias": True, "rope_theta": 5e6,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "num_hidden_layers": 16, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "attention_bias": True, "intermediate_size": 2880, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
        "rope_theta": 150000.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "vocab_size": 248320,
        "hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "mtp_num_hidden_layers": 1,
    },
    "kimi-linear": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163840,
        "hidden_size": 2304, "num_hidden_layers": 8, "num_attention_heads": 32, "intermediate_size": 9216,
        "rms_norm_eps": 1e-5, "model_max_length": 1048576, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "num_experts": 256,
        "num_experts_per_token": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1, "num_expert_group": 1,
        "topk_group": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        },
    },
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3.2": _DEEPSEEK_V32,
    "glm-5": _GLM_5,
    "kimi-k2": _KIMI_K2,
    "deepseek-v3-toy": _DEEPSEEK_V3 | _TOY,
    "kimi-k2-toy": _KIMI_K2 | _TOY,
    "tiny": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "moe_layer_freq": 1,
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": None,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 10000.0,
        "num_nextn_predict_layers": 1,
    },
}  # fmt: skip
