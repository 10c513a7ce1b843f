"""Kimi-Linear as it is published, and as transformers saves it again."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxspec.errors import ModelFormatError
from jaxspec.loading.checkpoint import load_params, open_checkpoint
from jaxspec.models.cache import page_bytes, slot_bytes
from jaxspec.models.decoder import CausalLM
from jaxspec.models.kimi_delta import KimiDeltaSpec
from jaxspec.models.mla import MLASpec
from jaxspec.models.moe import MoESpec
from jaxspec.models.params import count_parameters
from jaxspec.models.registry import read_config
from tests.convert.edits import edit_tensors, tensors
from tests.engine.test_recurrent_states import write_folder
from tests.tiny_models import CONFIGS

TINY = CONFIGS["kimi-linear"]
FULL = [4, 8, 12, 16, 20, 24, 27]
# Of moonshotai/Kimi-Linear-48B-A3B-Instruct.
PUBLISHED = TINY | {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27, "head_dim": 72,
    "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8,
    "moe_intermediate_size": 1024, "model_max_length": 2**20,
    "linear_attn_config": {
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4, "full_attn_layers": FULL,
        "kda_layers": [i for i in range(1, 28) if i not in FULL],
    },
}  # fmt: skip


def lists(**keys: Any) -> dict[str, Any]:
    return {"linear_attn_config": TINY["linear_attn_config"] | keys}


def test_kda_layers_one_based():
    layers = read_config(PUBLISHED).layers
    assert [i + 1 for i, layer in enumerate(layers) if isinstance(layer.attention, MLASpec)] == FULL
    assert [isinstance(layer.mlp, MoESpec) for layer in layers] == [False] + [True] * 26
    kinds = [
        type(layer.attention) for layer in read_config(TINY | lists(kda_layers=[3, 2], full_attn_layers=[1])).layers
    ]
    assert kinds == [MLASpec, KimiDeltaSpec, KimiDeltaSpec]


def test_published_sizes():
    """48 B parameters, 20 states of 2 MiB a request and 7 latents of 576 a token."""
    model = CausalLM(read_config(PUBLISHED), np.dtype("bfloat16"))
    assert 48e9 < count_parameters(model) < 50e9
    specs, one = model.cache_specs(), {"tensor": 1}
    assert page_bytes(specs, 1, one) == 7 * 576 * 2
    before = 3 * 3 * 4096 * 2  # columns that the convolution still sees
    assert slot_bytes(specs, 0, one) == 20 * (2 * 2**20 + before + 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lists(kda_layers=[0, 1]), r"kda_layers\[0\] in linear_attn_config of config.json must be a whole number from 1 to 3"),
        (lists(kda_layers=[1]), "must name each of num_hidden_layers=3 layers once, counted from 1"),
        (lists(kda_layers=[1, 3]), "must name each of num_hidden_layers=3 layers once, counted from 1"),
        (lists(full_attn_layers=None), "linear_attn_config of config.json lacks full_attn_layers"),
        ({"linear_attn_config": None}, "linear_attn_config of config.json lacks num_heads"),
        ({"model_max_length": None}, "config.json lacks model_max_length"),
        ({"mla_use_nope": False}, "mla_use_nope=False, which is not supported"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax', which is not supported"),
        ({"num_expert_group": 2}, "num_expert_group=2, which is not supported"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1, which is not supported"),
        ({"num_experts": 2}, "num_experts_per_token=3 and only num_experts=2"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str):
    with pytest.raises(ModelFormatError, match=message):
        read_config(TINY | changes)


def test_a_dense_layer_may_be_named_as_a_mixture(tmp_path: Path, mesh: Mesh):
    """As transformers saves it; not both at once."""
    folder = Path(write_folder(tmp_path, "kimi-linear"))
    want = load_params(open_checkpoint(folder), mesh)[1]
    dense = {name: value for name, value in tensors(folder).items() if ".0.mlp." in name}
    assert len(dense) == 3
    renamed = {name.replace("mlp", "block_sparse_moe"): value for name, value in dense.items()}
    edit_tensors(folder, add=renamed)
    with pytest.raises(
        ModelFormatError, match=r"holds tensor .*block_sparse_moe.*which the architecture does not have"
    ):
        open_checkpoint(folder)
    edit_tensors(folder, remove=dense)
    jax.tree.map(np.testing.assert_array_equal, load_params(open_checkpoint(folder), mesh)[1], want)
