"""What the readers of the families make of keys that most published configurations leave alone."""

import re

import pytest

from jaxspec.errors import ModelFormatError
from jaxspec.models.layers import DenseSpec
from jaxspec.models.moe import MoESpec
from jaxspec.models.registry import family_of, read_config
from tests.tiny_models import CONFIGS


def read(variant, absent=(), **keys):
    return read_config({key: value for key, value in CONFIGS[variant].items() if key not in absent} | keys)


def test_qwen3_moe_has_experts_in_every_nth_layer_that_is_not_listed():
    """As its decoder layer in transformers chooses: not in `mlp_only_layers`, and (index + 1) % step == 0."""
    config = read("qwen3-moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [type(layer.mlp) for layer in config.layers] == [
        DenseSpec,
        MoESpec,
        DenseSpec,
        DenseSpec,
        DenseSpec,
        MoESpec,
    ]


def test_qwen3_moe_counts_experts_under_either_name():
    count = CONFIGS["qwen3-moe"]["num_experts"]
    assert read("qwen3-moe", ["num_experts"], num_local_experts=count) == read("qwen3-moe")
    with pytest.raises(ModelFormatError, match="num_experts"):
        read("qwen3-moe", ["num_experts"])


def test_gpt_oss_slides_in_every_second_layer_from_the_first():
    config = read("gpt-oss", ["layer_types", "sliding_window"], num_hidden_layers=4)
    assert [layer.attention.window for layer in config.layers] == [128, None, 128, None]
    assert all(layer.attention.sinks for layer in config.layers)
    listed = ["full_attention", "full_attention", "sliding_attention"]
    config = read("gpt-oss", layer_types=listed, num_hidden_layers=3, sliding_window=32)
    assert [layer.attention.window for layer in config.layers] == [None, None, 32]


def test_minimax_m2_attends_fully_in_every_layer_and_reads_no_mtp():
    layers = CONFIGS["minimax-m2"]["num_hidden_layers"]
    config = read("minimax-m2", attn_type_list=[1] * layers)
    assert config == read("minimax-m2")
    with pytest.raises(ModelFormatError, match="attn_type_list"):
        read("minimax-m2", attn_type_list=[1] * (layers - 1) + [0])
    ignored = family_of(config).harmless(config)
    assert re.fullmatch(ignored, f"model.layers.{layers}.eh_proj.weight")
    assert not re.fullmatch(ignored, f"model.layers.{layers - 1}.eh_proj.weight")


@pytest.mark.parametrize("count", [0, 1, 2])
def test_glm4_moe_has_as_many_nextn_layers_as_it_says(count):
    config = read("glm4-moe", num_nextn_predict_layers=count)
    assert len(config.nextn_layers) == count
    assert all(isinstance(layer.mlp, MoESpec) for layer in config.nextn_layers)


def test_minicpm3_scalars_that_are_null_have_no_effect():
    config = read("minicpm3", scale_emb=None, scale_depth=None, dim_model_base=None)
    assert (config.embed_scale, config.logit_scale) == (1.0, 1.0)
    assert {layer.attention.output_scale for layer in config.layers} == {1.0}
    assert {layer.mlp.scale for layer in config.layers} == {1.0}


def test_minicpm3_values_are_as_wide_as_a_head_of_the_model():
    hidden, heads = CONFIGS["minicpm3"]["hidden_size"], CONFIGS["minicpm3"]["num_attention_heads"]
    config = read("minicpm3", ["v_head_dim"])
    assert {layer.attention.v_dim for layer in config.layers} == {hidden // heads}
    assert read("minicpm3", v_head_dim=None) == config
    with pytest.raises(ModelFormatError, match="num_attention_heads"):
        read("minicpm3", ["v_head_dim"], hidden_size=hidden + 2)


def test_experts_of_all_layers_together_are_bounded():
    assert read("qwen3-moe", num_hidden_layers=16, num_experts=4096).num_layers == 16
    with pytest.raises(ModelFormatError, match="experts in all layers"):
        read("qwen3-moe", num_hidden_layers=17, num_experts=4096)
