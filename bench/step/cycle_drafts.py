"""The drafts that `bench cycle` measures: of published sizes, with random weights."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.eagle3 import Eagle3, capture_layers, read_eagle3_config
from jaxspec.models.mtp import NextN
from jaxspec.models.params import random_params
from jaxspec.models.registry import read_config

DRAFTS = ("mtp", "eagle3-llama", "eagle3-mla")
# Published Llama drafts propose this many of the target's tokens, with heads of this size.
REDUCED_VOCAB, HEAD_DIM = 32000, 128


# What a head has like its target.
_SHARED = (
    "hidden_size", "vocab_size", "intermediate_size", "rms_norm_eps", "rope_theta", "max_position_embeddings",
)  # fmt: skip


def drafts_for(hf: dict[str, Any]) -> list[str]:
    """Those of DRAFTS that a target of this config.json may have: its own layer, and heads like its dense layers, with its
    attention too if that is MLA. A target without dense layers, or that rotates nothing, has none whose sizes are known."""
    heads = all(key in hf for key in _SHARED)
    able = {
        "mtp": bool(read_config(hf).nextn_layers), "eagle3-llama": heads, "eagle3-mla": heads and "kv_lora_rank" in hf,
    }  # fmt: skip
    return [kind for kind in DRAFTS if able[kind]]


def declare_draft(kind: str, hf: dict[str, Any], target: CausalLM, dtype: np.dtype) -> Draft:
    """A draft of the sizes that published drafts have for such a target: one decoder layer as wide as the target.

    The EAGLE3 drafts have a dense MLP like the target's dense layers, their own output head and the target's embedding;
    the MLA draft has the target's attention, the Llama draft as many key heads with four query heads each as fit into the
    width.
    """
    if kind == "mtp":
        return NextN(target.config, dtype)
    hidden, vocab, layers = hf["hidden_size"], hf["vocab_size"], target.config.num_layers
    common = {key: hf[key] for key in _SHARED} | {"num_hidden_layers": 1}
    if kind == "eagle3-llama":
        head_dim = min(HEAD_DIM, hidden // 4)
        keys = hidden // (4 * head_dim)
        config = common | {
            "architectures": ["LlamaForCausalLMEagle3"], "head_dim": head_dim, "num_attention_heads": 4 * keys,
            "num_key_value_heads": keys, "draft_vocab_size": min(REDUCED_VOCAB, vocab // 2),
        }  # fmt: skip
    else:
        mla = (
            "num_attention_heads",
            "kv_lora_rank",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        config = common | {key: hf[key] for key in mla} | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    # The default layers of a very shallow model would be the same ones twice.
    capture = capture_layers(None if layers > 6 else (0, 1, 2), layers)
    return Eagle3(read_eagle3_config(config), dtype, capture=capture, own_embedding=False, own_head=True)


def draw_draft(draft: Draft, mesh: Mesh, seed: int) -> dict:
    """Random parameters; a reduced vocabulary is spread over the target's."""
    params = random_params(draft, mesh, seed)  # type: ignore[arg-type]  # drafts are nnx modules
    if "d2t" in params:
        size, vocab = params["d2t"].shape[0], draft.config.model.vocab_size  # type: ignore[attr-defined]
        ids = np.sort(np.random.default_rng(seed).choice(vocab, size, replace=False))
        params["d2t"] = jax.device_put((ids - np.arange(size)).astype(np.int32), params["d2t"].sharding)
    return params
