"""Folders that can be neither loaded nor converted: one clear line, and no output."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from convert.convert import convert_checkpoint
from jaxspec.errors import ModelFormatError
from jaxspec.loading.checkpoint import open_checkpoint
from tests.convert.edits import edit_config, edit_tensors

pytestmark = pytest.mark.torch
Q_B = "model.layers.1.self_attn.q_b_proj.weight"


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def unsupported_architecture(folder: Path) -> None:
    edit_config(folder, architectures=["GPT2LMHeadModel"])


def missing_tensor(folder: Path) -> None:
    edit_tensors(folder, remove=[Q_B])


def extra_tensor(folder: Path) -> None:
    edit_tensors(folder, add={"model.layers.1.self_attn.q_b_proj.bias": np.zeros(128, np.float32)})


def misshaped_tensor(folder: Path) -> None:
    edit_tensors(folder, add={Q_B: np.zeros((128, 25), np.float32)})


def truncated_shard(folder: Path) -> None:
    file = folder / "model.safetensors"
    with file.open("r+b") as f:
        f.truncate(file.stat().st_size - 1)


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index_outside(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors")
    index = {"weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def other_quantisation(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "compressed-tensors"})


def other_fp8_blocks(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})


def unsupported_tensor_dtype(folder: Path) -> None:
    edit_tensors(folder, add={"lm_head.weight": np.zeros((256, 64), np.int8)})


CASES = [
    (no_config, r"has no config\.json"),
    (unsupported_architecture, "unsupported architecture GPT2LMHeadModel; the nearest supported one is "),
    (missing_tensor, re.escape(f"lacks tensor {Q_B}")),
    (extra_tensor, r"holds tensor model\.layers\.1\.self_attn\.q_b_proj\.bias"),
    (misshaped_tensor, re.escape(f"tensor {Q_B} has shape [128, 25]; config.json asks for [128, 24]")),
    (truncated_shard, "truncated"),
    (pickle_only, r"pytorch_model\.bin is never loaded"),
    (index_outside, r"'\.\./outside\.safetensors' points outside its folder"),
    (other_quantisation, "quantization 'compressed-tensors' .* is not supported"),
    (other_fp8_blocks, r"blocks \[64, 64\] is not supported"),
    (unsupported_tensor_dtype, r"tensor lm_head\.weight has dtype I8"),
]


@pytest.mark.parametrize(("spoil", "message"), CASES, ids=[case[0].__name__ for case in CASES])
def test_one_line_and_no_output(
    spoil: Callable[[Path], None], message: str, source: Callable[[str], Path], tmp_path: Path
):
    folder = shutil.copytree(source("v3"), tmp_path / "in" / "model")
    spoil(folder)
    with pytest.raises(ModelFormatError, match=message) as error:  # and before a weight is read
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
    with pytest.raises(ModelFormatError, match=message) as error:
        convert_checkpoint(folder, tmp_path / "results" / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "results").exists() or not list((tmp_path / "results").iterdir())


def test_output_in_the_way(source: Callable[[str], Path], tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("data")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "a web application"}')
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name, message in [
        ("file", "is not a folder"),
        ("link", "is not a folder"),
        ("full", "was not made by jaxspec convert"),
        ("other", "was not made by jaxspec convert"),
    ]:
        with pytest.raises(ModelFormatError, match=message):
            convert_checkpoint(source("llama"), tmp_path / name)
    with pytest.raises(ModelFormatError, match="was not made by jaxspec convert"):
        convert_checkpoint(source("llama"), source("llama"))
    assert (tmp_path / "full" / "precious").read_text() == "data"
    assert len(list(tmp_path.iterdir())) == 4


def test_source_that_is_converted_already(converted: Callable[[str], Path], tmp_path: Path):
    with pytest.raises(ModelFormatError, match="is a converted folder already"):
        convert_checkpoint(converted("llama"), tmp_path / "out")


def test_source_that_does_not_exist(tmp_path: Path):
    with pytest.raises(ModelFormatError, match="does not exist; a model is a folder"):
        convert_checkpoint(tmp_path / "gone", tmp_path / "out")
    assert not list(tmp_path.iterdir())
