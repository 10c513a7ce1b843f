"""Kimi-K2.5: the language model in a multimodal checkpoint is, to the bit, the DeepSeek-V3 that it wraps."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from convert.convert import convert_checkpoint
from jaxspec.errors import ModelFormatError
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint, read_model_config
from tests.convert.edits import edit_tensors, tensors
from tests.convert.test_hostile_configs import HOSTILE, read
from tests.tiny_models import CONFIGS, tiny_checkpoint

KIMI = CONFIGS["kimi-k25"]
PREFIX = "language_model."


def write(folder: Path, **text: Any) -> None:
    (folder / "config.json").write_text(json.dumps(KIMI | {"text_config": KIMI["text_config"] | text}))


@pytest.fixture
def wrapped(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with a NextN layer as published, and the bare model in it. FP8, so that scales are renamed too."""
    source = tiny_checkpoint("v3-fp8", tmp_path / "bare")
    folder = tmp_path / "wrapped"
    folder.mkdir()
    hf = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(KIMI | {"text_config": hf, "vision_config": {"patch_size": 14}}))
    from safetensors.torch import load_file, save_file

    renamed = {PREFIX + name: value for name, value in load_file(source / "model.safetensors").items()}
    renamed["vision_tower.encoder.blocks.0.norm0.bias"] = renamed[f"{PREFIX}model.norm.weight"].clone()
    save_file(renamed, folder / "model.safetensors")
    return source, folder


@pytest.mark.torch
def test_weights_and_draft_are_those_of_the_bare_model(wrapped: tuple[Path, Path], mesh: Mesh, tmp_path: Path):
    bare, folder = wrapped
    converted = convert_checkpoint(folder, tmp_path / "out")
    assert "text_config" not in json.loads((converted / "config.json").read_text())
    assert read_model_config(converted).eos_token_ids == read_model_config(folder).eos_token_ids == (2,)
    for load in (load_params, load_nextn):
        want = load(open_checkpoint(bare), mesh)[1]
        for got in (folder, converted):
            jax.tree.map(np.testing.assert_array_equal, load(open_checkpoint(got), mesh)[1], want)


@pytest.mark.torch
def test_only_the_vision_part_is_harmless(tmp_path: Path):
    folder = tiny_checkpoint("kimi-k25", tmp_path / "hf")
    assert any(name.startswith("vision_tower.") for name in tensors(folder))
    assert open_checkpoint(folder).parts == ("embed", "000", "001", "002", "head")
    edit_tensors(folder, add={"model.norm.weight": np.ones(64, np.float32)})  # without the prefix
    with pytest.raises(ModelFormatError, match=r"holds tensor model\.norm\.weight, which"):
        open_checkpoint(folder)
    edit_tensors(folder, remove=["model.norm.weight", f"{PREFIX}model.norm.weight"])
    with pytest.raises(ModelFormatError, match=r"lacks tensor language_model\.model\.norm\.weight"):
        open_checkpoint(folder)


@pytest.mark.parametrize("at", ["text_config", "top"])
def test_zero_points_are_refused_with_a_way_out(at: str, tmp_path: Path):
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False}}}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    if at == "top":
        (tmp_path / "config.json").write_text(json.dumps(KIMI | {"quantization_config": packed}))
    else:
        write(tmp_path, quantization_config=packed)
    want = (
        r"'compressed-tensors' with zero points \(symmetric is false\) is not supported .*; use a copy .* in bfloat16"
    )
    with pytest.raises(ModelFormatError, match=want) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_hostile_text_parts(value: Any, tmp_path: Path):
    error = read(tmp_path, KIMI | {"text_config": value})
    assert error is not None
    assert "text_config" in error or "not valid JSON" in error
    assert "\n" not in error


def test_end_of_text_of_the_wrapper_or_of_its_text(tmp_path: Path):
    write(tmp_path)
    assert read_model_config(tmp_path).eos_token_ids == (3,)
    write(tmp_path, eos_token_id=None)
    assert read_model_config(tmp_path).eos_token_ids == ()
    outer = KIMI | {"eos_token_id": [5, 7], "text_config": KIMI["text_config"] | {"eos_token_id": None}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert read_model_config(tmp_path).eos_token_ids == (5, 7)
