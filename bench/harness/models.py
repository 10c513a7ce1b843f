"""The models that are measured: published and tiny shapes with random weights, or those of a folder."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.loading.parts import MTP
from jaxspec.loading.resolve import resolve_model
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.mtp import NextN
from jaxspec.models.params import TENSOR_AXIS, random_params
from jaxspec.models.registry import read_config

SHAPES: dict[str, dict[str, Any]] = {
    # Moonlight-16B-A3B, from its config.json.
    "moonlight": {
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163840, "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "intermediate_size": 11264, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 50000.0,
        "num_nextn_predict_layers": 1,
    },
    "tiny": {
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": None,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 10000.0,
        "num_nextn_predict_layers": 1,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """A target with its parameters on the device, and a draft likewise; None where it has none."""

    model: CausalLM
    params: dict
    draft: tuple[Draft, dict] | None


def mesh_of_one() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))


def random_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json of one of `SHAPES`, with another number of layers if that is given."""
    hf = dict(SHAPES[name])
    return hf | {"num_hidden_layers": layers} if layers else hf


def as_recorded(name: str) -> str:
    """A model's name in records' file names: where a folder lies does not matter there."""
    return name if name in (*SHAPES, "demo") else "folder"


def draw(hf: dict[str, Any], mesh: Mesh, dtype: np.dtype, *, with_draft: bool = True) -> Weights:
    """Random parameters of a config.json, with a NextN layer."""
    model = CausalLM(read_config(hf), dtype)
    params = random_params(model, mesh)
    if not with_draft:
        return Weights(model, params, None)
    nextn = NextN(model.config, dtype)
    return Weights(model, params, (nextn, random_params(nextn, mesh, 1)))


def load(name: str, mesh: Mesh, dtype: np.dtype, *, with_draft: bool = True) -> Weights:
    """The weights of a model, with its NextN layer if it has one.

    Raises:
        ModelFormatError: there is no such model, or it cannot be read.
    """
    checkpoint = open_checkpoint(resolve_model(name))
    model, params = load_params(checkpoint, mesh, dtype)
    has_draft = with_draft and MTP in checkpoint.parts
    return Weights(model, params, load_nextn(checkpoint, mesh, dtype) if has_draft else None)
