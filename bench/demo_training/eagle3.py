"""The two EAGLE3 draft heads of the demo target: modules, configurations and hub folders.

Both have the published layout: `fc` over three captured layers of the target, one decoder layer `midlayer` whose
attention reads [embedding; hidden], `norm` and an own `lm_head`; the embedding is the target's and not stored. The
Llama head (`LlamaForCausalLMEagle3`) drafts in a reduced vocabulary, the MLA head (`Eagle3DeepseekV2ForCausalLM`) in
the full one.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3MLP,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from bench.demo_training.corpus import BEGIN, END, PAD
from bench.demo_training.model import CONFIG, Target, to_bfloat16, write_json

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MLA_KEYS = [
    "kv_lora_rank", "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "rope_scaling", "rope_theta", "v_head_dim",
]  # fmt: skip
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "hidden_act": "silu",
    "hidden_size": CONFIG["hidden_size"],
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": CONFIG["vocab_size"],
}
# Both heads capture the residual stream entering the target's layers 2, 4 and 6, and each says so in one of the two
# conventions that published configurations use: the ids of the layers that put it out, or of those that take it in.
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle3-llama": COMMON
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 3072,
        "eagle_config": {LAYER_IDS: [1, 3, 5], "use_aux_hidden_state": True},
        "head_dim": 64,
        "max_position_embeddings": CONFIG["max_position_embeddings"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_scaling": None,
        "rope_theta": 10000,
    },
    "eagle3-mla": COMMON
    | {key: CONFIG[key] for key in MLA_KEYS}
    | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "draft_vocab_size": CONFIG["vocab_size"],
        "eagle_config": {LAYER_IDS: [2, 4, 6], "use_aux_hidden_state": True},
        "model_type": "kimi_k2",
    },
}


def captured_layers(config: dict) -> list[int]:
    """The target layers whose input is captured."""
    ids = config["eagle_config"][LAYER_IDS]
    return [i + 1 for i in ids] if ids[0] == 1 else list(ids)


def library_config(config: dict) -> Any:
    # Transformers has no entry for kimi_k2, which is DeepSeek-V3 under another name.
    kind: Any = LlamaConfig if config["model_type"] == "llama" else DeepseekV3Config
    # A copy: the library adds its own keys to the rope settings that it is given.
    result = kind(**{key: value for key, value in copy.deepcopy(config).items() if key != "model_type"})
    result._attn_implementation = "draft_chain"
    return result


def widen(linear: nn.Linear) -> nn.Linear:
    return nn.Linear(2 * linear.in_features, linear.out_features, bias=False)


class MidLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        wide: tuple[str, ...]
        self.self_attn: Any
        self.input_layernorm: Any
        self.hidden_norm: Any
        self.post_attention_layernorm: Any
        if isinstance(config, LlamaConfig):
            self.self_attn, wide = LlamaAttention(config, 0), ("q_proj", "k_proj", "v_proj")
        else:
            self.self_attn, wide = DeepseekV3Attention(config, 0), ("q_a_proj", "kv_a_proj_with_mqa")
        for name in wide:
            setattr(self.self_attn, name, widen(getattr(self.self_attn, name)))
        self.mlp = DeepseekV3MLP(config)  # the same gated unit in both families, and so are the norms
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(
        self, embedding: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        both = torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)
        attended, _ = self.self_attn(both, position_embeddings=rope, attention_mask=None, chain=chain)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """Its state dict is the hub's: same names, same shapes."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        library = library_config(config)
        size, self.vocabulary = library.hidden_size, library.vocab_size
        self.captured = captured_layers(config)
        self.fc = nn.Linear(len(self.captured) * size, size, bias=False)
        self.midlayer = MidLayer(library)
        self.norm = DeepseekV3RMSNorm(size, library.rms_norm_eps)
        self.lm_head = nn.Linear(size, config["draft_vocab_size"], bias=False)
        rotary: Any = LlamaRotaryEmbedding if isinstance(library, LlamaConfig) else DeepseekV3RotaryEmbedding
        self.rotary: Any = rotary(library)
        self.reduced = config["draft_vocab_size"] < self.vocabulary
        self.d2t: Tensor
        self.t2d: Tensor
        if self.reduced:
            self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(self.vocabulary, dtype=torch.bool))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, library.initializer_range)

    @torch.no_grad()
    def start_from(self, target: Target, frequencies: Tensor) -> None:
        """Take the target's output head and norm, and the most frequent tokens, END among them in any case."""
        frequencies = frequencies.clone()
        frequencies[END] = frequencies.max() + 1
        ids = torch.topk(frequencies, self.lm_head.out_features).indices.sort().values
        if self.reduced:
            self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
            self.t2d[ids] = True
        self.lm_head.weight.copy_(target.lm_head.weight[ids.to(target.device)])
        self.norm.weight.copy_(target.model.norm.weight)

    def target_ids(self) -> Tensor:
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def rope(self, hidden: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """The pair of token i + 1 and hidden state i has position i."""
        positions = torch.arange(offset, offset + hidden.shape[1], device=hidden.device)[None]
        return self.rotary(hidden, position_ids=positions)

    def forward(
        self, embedding: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The next step's hidden state, and its normed form that `lm_head` reads."""
        hidden = self.midlayer(embedding, hidden, rope, chain)
        return hidden, self.norm(hidden)

    def begin(self, model: Target, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The target's final hidden states, and the state from which the first draft step starts."""
        output = model.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        captured = [output.hidden_states[layer] for layer in self.captured]  # index i is the input of layer i
        return output.last_hidden_state, self.fc(torch.cat(captured, -1))

    def advance(
        self, model: Target, fed: Tensor, state: Tensor, step: int, chain: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One draft step for the chains of all positions: the next state, and logits over the target's vocabulary."""
        state, normed = self(model.model.embed_tokens(fed), state, self.rope(state, step - 1), chain)
        logits = self.lm_head(normed)
        if self.reduced:
            full = logits.new_full((*logits.shape[:-1], self.vocabulary), float("-inf"))
            full[..., self.target_ids()] = logits
            logits = full
        return state, logits


def write_head(folder: Path, config: dict, head: Eagle3Head) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dict(sorted(config.items())))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_head(folder: Path) -> Eagle3Head:
    """The head as the folder stores it."""
    head = to_bfloat16(Eagle3Head(json.loads((folder / "config.json").read_text())))
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head.eval()
