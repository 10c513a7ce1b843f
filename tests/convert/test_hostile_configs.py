"""Every key of every configuration, replaced by every kind of nonsense: it is read, or refused in one line, at once."""

import functools
import json
import math
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import SHOWN_CHARACTERS, ModelFormatError, shown
from jaxspec.loading.checkpoint import open_checkpoint, read_model_config
from jaxspec.loading.hf_folder import eos_token_ids, read_hf_config
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.eagle3 import Eagle3, Eagle3Config, eagle3_key_map, is_eagle3, read_eagle3_config
from jaxspec.models.hf_fields import text_part
from jaxspec.models.layers import rope_frequencies
from jaxspec.models.mtp import NextN
from jaxspec.models.registry import family_of, read_config
from tests import eagle3_models
from tests.tiny_models import CONFIGS

DEEP: Any = 1
for _ in range(200):
    DEEP = [DEEP]
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 1.5, -0.5, 2**31, 10**30, -(10**30), 10**400, 1e300, math.nan, math.inf, -math.inf,
    "", "x", "8" * 10_000, "a\nb", "\ud800", [], [1], [None], ["x"], [[1]], [-1], [10**30], [1.5], [True], list(range(5000)),
    DEEP, {}, {"x": 1}, {"factor": "x"},
)  # fmt: skip
MODELS = {name: config for name, config in CONFIGS.items() if name != "v3-fp8-dequantised"}
DRAFTS = {
    name: config | {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    | {"draft_vocab_size": 100, "target_hidden_size": 64}
    for name, config in eagle3_models.CONFIGS.items()
}  # fmt: skip
DRAFTS["speculators"] = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 100,
    "transformer_layer_config": eagle3_models.CONFIGS["llama"], "fc_norm": True, "norm_before_fc": False,
    "norm_output": True, "norm_before_residual": True, "use_aux_norm": False,
}  # fmt: skip
# Read where they are there, which they are not in all of the tiny configurations.
OPTIONAL: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rope_interleave": True, "dtype": "float32",
    "torch_dtype": "float32", "latent_norm_eps": 1e-6, "use_sliding_window": False, "mlp_bias": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64, "attention_factor": 1.0, "rope_theta": 10000.0},
    "layer_types": ["sliding_attention", "full_attention", "full_attention"], "swiglu_alpha": 1.7, "rotary_dim": 8,
    "partial_rotary_factor": 0.5, "shared_intermediate_size": 0, "index_topk": 2048,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 4], "num_aux_hidden_states": 3, "quantization_config": None,
}  # fmt: skip
# Kinds of layers have names of their own in each family that lists them.
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
INDEX_SHARE = {
    "indexer_types": None, "index_topk_pattern": "FSF", "index_topk_freq": 2, "index_skip_topk_offset": 2,
    "indexer_rope_interleave": True,
}  # fmt: skip
SECONDS = 2.0
BYTES = 200 * 2**20


def mutations(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the key that is wrong, the configuration), for each key, inner ones too."""
    for key, value in config.items():
        for hostile in HOSTILE:
            yield key, config | {key: hostile}
        if isinstance(value, dict):
            for inner, changed in mutations(value):
                yield inner, config | {key: changed}


@functools.cache
def build(config: ModelConfig) -> None:
    """What loading does before it reads weights: declarations, key maps, rotary frequencies."""
    CausalLM(config, np.dtype("float32"))
    family_of(config).key_map(config)
    if config.nextn_layers:
        NextN(config, np.dtype("float32"))
        family_of(config).nextn_key_map(config)
    rope = next(rope for layer in config.layers if (rope := layer.attention.rope))
    frequencies, factor = rope_frequencies(rope)
    assert np.isfinite(frequencies).all()
    assert math.isfinite(factor)


@functools.cache
def build_draft(config: Eagle3Config) -> None:
    capture = tuple(range(config.num_captured))
    Eagle3(config, np.dtype("float32"), capture=capture, own_embedding=True, own_head=True)
    eagle3_key_map(config, names=["midlayer."], own_embedding=True, own_head=True)


def read(folder: Path, hf: dict[str, Any]) -> str | None:
    """The error of a folder with this config.json, or None. Anything but an error for users fails the test."""
    (folder / "config.json").write_text(json.dumps(hf))
    try:
        found = read_hf_config(folder)
        if is_eagle3(found):
            build_draft(read_eagle3_config(found))
        else:
            build(read_model_config(folder))
    except ModelFormatError as e:
        return str(e)
    return None


def check(folder: Path, base: dict[str, Any]) -> int:
    """Reads all mutations of a configuration; returns how many were refused."""
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key, hf in mutations(base):
        began = time.process_time()
        error = read(folder, hf)
        assert time.process_time() - began < SECONDS, (key, str(hf[key])[:80] if key in hf else None)
        if error is not None:
            refused += 1
            assert "\n" not in error
            assert len(error) < 500 + len(str(folder))
            assert any(
                name in error for name in (key, "architecture", "scoring_func", "rope type", "rope_", "not valid JSON")
            ), error
            assert "config.json" in error or "architecture" in error, error
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES
    return refused


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["v3-yarn", "llama3-rope", "gpt-oss"])
def test_models(variant: str, tmp_path: Path):
    assert read(tmp_path, MODELS[variant]) is None
    assert check(tmp_path, MODELS[variant]) > 300


@pytest.mark.full
@pytest.mark.parametrize("variant", MODELS)
def test_models_with_every_optional_key(variant: str, tmp_path: Path):
    base = (
        MODELS[variant]
        | OPTIONAL
        | (HYBRID if variant in ("qwen3.5", "qwen3.5-moe", "qwen3-next", "kimi-linear") else {})
    )
    base |= INDEX_SHARE if variant == "glm-dsa" else {}
    assert read(tmp_path, base) is None
    assert check(tmp_path, base) > 500


@pytest.mark.slow
@pytest.mark.parametrize("head", DRAFTS)
def test_drafts(head: str, tmp_path: Path):
    assert read(tmp_path, DRAFTS[head]) is None
    assert check(tmp_path, DRAFTS[head]) > 300


# Scalars of which null and an absent key stand for different values: see `minicpm`.
NULL_IS_A_VALUE = {"scale_emb", "scale_depth", "dim_model_base"}


@pytest.mark.parametrize("name", [*MODELS, *DRAFTS])
def test_null_stands_for_an_absent_key(name: str):
    base, reader = (MODELS[name], read_config) if name in MODELS else (DRAFTS[name], read_eagle3_config)

    def outcome(hf: dict[str, Any]) -> object:
        try:
            return reader(text_part(hf))
        except ModelFormatError as e:
            return str(e)

    for key in (base | OPTIONAL).keys() - NULL_IS_A_VALUE - {"architectures", "speculators_model_type"}:
        absent = {other: value for other, value in base.items() if other != key}
        assert outcome(absent | {key: None}) == outcome(absent), key


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_quantisation_and_end_of_text_ids(value: Any, tmp_path: Path):
    """Keys that are read beside the families' own."""
    for quantisation in (value, {"quant_method": value}, {"quant_method": "fp8", "weight_block_size": value}):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"quantization_config": quantisation}))
        with pytest.raises(ModelFormatError, match=r"quantization|safetensors|not valid JSON") as caught:
            open_checkpoint(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    try:
        ids = eos_token_ids(tmp_path)
    except ModelFormatError as e:
        # Either outcome is right, but no other.
        assert "eos_token_id" in str(e) or "not valid JSON" in str(e)  # noqa: PT017
        assert "generation_config.json" in str(e)  # noqa: PT017
    else:
        assert all(type(i) is int and 0 <= i < 2**31 for i in ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads in config.json must be a multiple of num_key_value_heads"),
        ({"head_dim": 15}, "head_dim in config.json must be even"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size in config.json must be a multiple of num_attention_heads"),
        ({"hidden_size": "64"}, "hidden_size in config.json must be a whole number from 1 to 1048576, got '64'"),
        ({"vocab_size": 10**30}, "vocab_size in config.json must be a whole number from 1 to 16777216, got 1000"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps in config.json must be a number from 0 to 1, got nan"),
        ({"rope_theta": 0}, "rope_theta in config.json must be a number from 1.001"),
        ({"torch_dtype": "int4"}, "config.json has torch_dtype='int4', which is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings in config.json must be true or false, got 'yes'"),
        ({**CONFIGS["gpt-oss"], "layer_types": ["full_attention"]}, "has 1 layer_types and num_hidden_layers=3"),
        ({**CONFIGS["gpt-oss"], "sliding_window": 0}, "sliding_window in config.json must be a whole number from 1 to"),
        ({**CONFIGS["minimax-m2"], "use_qk_norm": False}, "has use_qk_norm=False, which is not supported"),
        (
            {**CONFIGS["minimax-m2"], "rotary_dim": 5},
            "rotary_dim in config.json must be even",
        ),
        ({**CONFIGS["qwen3-moe"], "num_experts": 2}, "num_experts_per_tok=3 and only num_experts=2"),
        ({**CONFIGS["glm4-moe"], "n_routed_experts": None}, "config.json lacks n_routed_experts"),
        ({"eos_token_id": [1] * 1025}, "eos_token_id in config.json must be a list of at most 1024 whole numbers"),
    ],
)
def test_messages(changes: dict[str, Any], message: str, tmp_path: Path):
    error = read(tmp_path, CONFIGS["llama"] | changes)
    assert error is not None
    assert message in error
    assert error.startswith(str(tmp_path))


def test_values_are_shown_short_and_on_one_line():
    for value in [*HOSTILE, [["x" * 30] * 6] * 6, {f"{i}\n" * 20: [list(range(100))] * 9 for i in range(9)}]:
        text = shown(value)
        assert len(text) <= SHOWN_CHARACTERS, text
        assert "\n" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_routed_experts in config.json must be a multiple of n_group, got 8 and 3"),
        ({"n_group": 8}, "a group holds at least 2 experts"),
        ({"topk_group": 5}, "topk_group=5 and only n_group=4"),
        ({"topk_group": 1}, "num_experts_per_tok=3, but topk_group=1 of n_group=4 groups hold only 2 experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 and only n_routed_experts=8"),
        ({"num_hidden_layers": 1024, "n_routed_experts": 4096}, "at most 65536 experts in all layers"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim in config.json must be even"),
        ({"mlp_layer_types": ["dense"] * 2}, "has 2 mlp_layer_types and num_hidden_layers=3"),
    ],
)
def test_sizes_that_do_not_fit_each_other(changes: dict[str, Any], message: str, tmp_path: Path):
    error = read(tmp_path, CONFIGS["v3"] | changes)
    assert error is not None
    assert message in error


def test_layers_that_a_draft_reads(tmp_path: Path):
    error = read(tmp_path, DRAFTS["llama"] | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, -1, 3]}})
    assert error is not None
    assert "eagle_aux_hidden_state_layer_ids[1] in config.json must be a whole number from 0 to 1024, got -1" in error


def test_the_largest_published_models_are_far_inside_the_limits():
    """DeepSeek-V3 and Kimi-K2, by their sizes."""
    kimi = CONFIGS["v3"] | {
        "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_attention_heads": 64, "max_position_embeddings": 262144, "rope_theta": 50000.0,
    }  # fmt: skip
    assert read_config(kimi).num_layers == 61
