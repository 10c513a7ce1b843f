"""The embedded demo model: its configuration, its NextN (MTP) layer and its hub folder.

The target is Hugging Face's DeepseekV3ForCausalLM. The NextN layer is built here from the same library's decoder layer.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3MoE,
    DeepseekV3RMSNorm,
)

from bench.demo_training.corpus import BEGIN, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS, VOCAB_SIZE

# Transformers' DeepseekV3ForCausalLM. Its submodules have no types that a checker could use.
Target = Any
Module = TypeVar("Module", bound=nn.Module)

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 7,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": VOCAB_SIZE,
}
NEXTN_PREFIX = f"model.layers.{CONFIG['num_hidden_layers']}."
DRAFT_STEPS = 3
SHARD_BYTES = 12 * 2**20


def chain_attention(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float,
    chain: list[tuple[Tensor, Tensor]] | None = None,
    **_options: object,
) -> tuple[Tensor, None]:
    """Attention of one draft step, for the chains that start at every position of a sequence at once.

    `chain` holds the keys and values of the steps so far. The first step is plain causal attention. In step j, chain i
    is at position i + j - 1 and sees what a draft layer sees while it drafts: the first step's entries of the
    positions up to i (made from target hidden states), and its own entries of the steps 2..j.
    """
    if key.shape[1] < query.shape[1]:  # grouped queries: each key head serves several query heads
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    if not chain:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    else:
        (first_key, first_value), own = chain[0], [*chain[1:], (key, value)]
        length = query.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ first_key.mT).masked_fill(future, float("-inf"))
        own_scores = [(query * own_key).sum(-1, keepdim=True) for own_key, _ in own]
        weights = torch.softmax(torch.cat([scores, *own_scores], -1).float() * scaling, -1).to(query.dtype)
        out = weights[..., :length] @ first_value
        for j, (_, own_value) in enumerate(own):
            out = out + weights[..., length + j : length + j + 1] * own_value
    if chain is not None:
        chain.append((key, value))
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("draft_chain", chain_attention)


class NextN(nn.Module):
    """DeepSeek-V3's multi-token prediction layer; embedding and output head are the target's."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config._attn_implementation = "draft_chain"
        size = config.hidden_size
        self.enorm = DeepseekV3RMSNorm(size, config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block: Any = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.norm = DeepseekV3RMSNorm(size, config.rms_norm_eps)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, config.initializer_range)
            self.block.mlp.gate.e_score_correction_bias.zero_()

    def forward(
        self, embedding: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        merged = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], -1))
        return self.norm(self.block(merged, position_embeddings=rope, chain=chain))

    def begin(self, model: Target, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The target's final hidden states, and the state from which the first draft step starts: the same."""
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden, hidden

    def advance(
        self, model: Target, fed: Tensor, state: Tensor, step: int, chain: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One draft step for the chains of all positions: the next state, and logits over the target's vocabulary."""
        hidden = self(model.model.embed_tokens(fed), state, rope_at(model, state, step - 1), chain)
        return hidden, model.lm_head(hidden)


def rope_at(model: Target, hidden: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(offset, offset + hidden.shape[1], device=hidden.device)[None]
    return model.model.rotary_emb(hidden, position_ids=positions)


def to_bfloat16(module: Module) -> Module:
    """Cast the parameters only: the rotary frequencies and the router biases are buffers and stay float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    return module


def mixture_layers(*modules: nn.Module) -> list[Any]:
    """All `DeepseekV3MoE` in the modules."""
    return [m for module in modules for m in module.modules() if isinstance(m, DeepseekV3MoE)]


def hub_tensors(model: Target, nextn: NextN) -> dict[str, Tensor]:
    """All weights under the names and shapes of the hub's DeepSeek-V3, experts one by one."""
    state = dict(model.state_dict())
    for name, tensor in nextn.state_dict().items():
        hub_name = name.removeprefix("block.") if name.startswith("block.") else name
        state[NEXTN_PREFIX + ("shared_head." + hub_name if name == "norm.weight" else hub_name)] = tensor
    tensors = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(part.chunk(2) for part in tensor):
                tensors[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                tensors[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
        else:
            tensors[name] = tensor
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    total = sum(tensor.nbytes for tensor in tensors.values())
    limit = 1.02 * total / math.ceil(total / SHARD_BYTES)  # a little slack, so that equal shards stay that many
    for name, tensor in tensors.items():
        if sizes[-1] + tensor.nbytes > limit:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_config_and_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dict(sorted(CONFIG.items())))
    generation = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD, "do_sample": True,
                  "temperature": 0.8, "top_p": 0.95}  # fmt: skip
    write_json(folder / "generation_config.json", generation)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer_config = {
        "bos_token": SPECIAL_TOKENS[BEGIN],
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def load_nextn(folder: Path, config: DeepseekV3Config) -> NextN:
    """The NextN layer as the folder stores it."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    stored = {}
    for name, file in weight_map.items():
        if name.startswith(NEXTN_PREFIX):
            with safetensors.safe_open(folder / file, "pt") as shard:
                stored[name.removeprefix(NEXTN_PREFIX)] = shard.get_tensor(name)
    nextn = to_bfloat16(NextN(config))
    state = {}
    for name in nextn.state_dict():
        hub_name = "shared_head.norm.weight" if name == "norm.weight" else name.removeprefix("block.")
        experts = range(config.n_routed_experts)
        if name.endswith("gate_up_proj"):
            stem = hub_name.removesuffix("gate_up_proj")
            pairs = [[stored[f"{stem}{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in experts]
            state[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif name.endswith("experts.down_proj"):
            stem = hub_name.removesuffix("down_proj")
            state[name] = torch.stack([stored[f"{stem}{e}.down_proj.weight"] for e in experts])
        else:
            state[name] = stored[hub_name]
    nextn.load_state_dict(state)
    return nextn.eval()
