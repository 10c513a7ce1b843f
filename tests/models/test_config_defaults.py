"""What a key means that config.json leaves out: the same as to the class of transformers."""

import copy

import pytest

from jaxspec.errors import ModelFormatError
from jaxspec.models.registry import read_config
from tests.tiny_models import CONFIGS

# Keys whose absence means something else here, and why.
_TENSORS = dict.fromkeys(
    ("n_routed_experts", "n_shared_experts", "q_lora_rank"),
    "other tensors are then left over or missing, which is refused",
)
OTHERWISE = {
    "v2": _TENSORS,
    "v3": _TENSORS | {"num_nextn_predict_layers": "no draft"},
    "v32": _TENSORS,
    "glm4-lite": _TENSORS,
    "glm-dsa": _TENSORS,
    "glm4-moe": {
        "n_shared_experts": "none, as in DeepSeek's configurations; tensors of one would be left over, which is refused",
        "num_nextn_predict_layers": "no draft",
    },
    "gpt-oss": {
        "head_dim": "follows from the width", "rope_theta": "10000, as everywhere", "rope_scaling": "none, as everywhere",
    },
    "minimax-m2": {"rotary_dim": "all columns", "rope_theta": "10000, as everywhere"},
    "qwen3-moe": {"head_dim": "follows from the width, as in the class for a key that is null"},
    "qwen3.5": {"mtp_num_hidden_layers": "no draft"},
    "qwen3-next": {"head_dim": "of the published model"},
    "kimi-linear": {
        "linear_attn_config": "no layers: the class then places them otherwise than the model that is published",
        "num_experts": _TENSORS["n_routed_experts"], "num_shared_experts": _TENSORS["n_shared_experts"],
        "q_lora_rank": _TENSORS["q_lora_rank"],
    },
    "minicpm3": {
        "q_lora_rank": "queries without a latent", "v_head_dim": "follows from the width", "rope_scaling": "as everywhere",
    },
}  # fmt: skip


def with_defaults(hf):
    """A config.json as the class writes it that has read this one."""
    import transformers

    architecture = hf["architectures"][0]
    keys = copy.deepcopy({key: value for key, value in hf.items() if key != "model_type"})
    return getattr(transformers, architecture).config_class(**keys).to_dict() | {"architectures": [architecture]}


@pytest.mark.torch
@pytest.mark.parametrize("variant", OTHERWISE)
def test_an_absent_key_has_the_default_of_the_class(variant):
    hf = CONFIGS[variant]
    defaults = {key for key, value in with_defaults(hf).items() if value is not None}
    # What a tokenizer decides is no default of ours, and four heads are too few for the class's number of key heads.
    ours = {"architectures", "eos_token_id", "num_key_value_heads", *OTHERWISE[variant]}
    compared = 0
    for key in sorted({*hf, *defaults} - ours):
        without = {name: value for name, value in hf.items() if name != key}
        try:
            got = read_config(without)
        except ModelFormatError:  # there is no default
            continue
        assert got == read_config(with_defaults(without)), key
        compared += 1
    assert compared > 5
