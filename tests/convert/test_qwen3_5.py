"""Qwen3.5 as it is published: the language model in a multimodal checkpoint is, to the bit, the one that is saved alone.

Qwen3-Next is that model, stored otherwise.
"""

import copy
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
from jaxspec.models.registry import read_config
from tests.convert.edits import edit_tensors, tensors
from tests.convert.test_hostile_configs import HOSTILE, read
from tests.engine.test_recurrent_states import write_folder
from tests.models.test_parity import MAX_ILL_CONDITIONED_ERROR, run_compare
from tests.tiny_models import CONFIGS, tiny_checkpoint

TEXT = CONFIGS["qwen3.5"]
WRAPPED = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
PREFIX = "model.language_model."


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of the language model, and one of a multimodal model as its class writes it."""
    import transformers
    from safetensors.torch import load_file, save_file

    bare, folder = tiny_checkpoint("qwen3.5", tmp_path / "bare"), tmp_path / "wrapped"
    text = {key: value for key, value in copy.deepcopy(TEXT).items() if key not in ("architectures", "model_type")}
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16,
        "out_hidden_size": text["hidden_size"],
    }  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(folder)
    theirs = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", PREFIX, 1) if name.startswith("model.") else name: value
               for name, value in load_file(bare / "model.safetensors").items()}  # fmt: skip
    own = {name for name in tensors if not name.startswith("mtp.")}
    assert own == {name for name in theirs if not name.startswith("model.visual.")}
    save_file(
        tensors | {name: value for name, value in theirs.items() if name not in own}, folder / "model.safetensors"
    )
    return bare, folder


@pytest.mark.torch
def test_weights_and_draft_are_those_of_the_bare_model(folders: tuple[Path, Path], mesh: Mesh, tmp_path: Path):
    bare, folder = folders
    converted = convert_checkpoint(folder, tmp_path / "out")
    assert "text_config" not in json.loads((converted / "config.json").read_text())
    for load in (load_params, load_nextn):
        want = load(open_checkpoint(bare), mesh)[1]
        for got in (folder, converted):
            jax.tree.map(np.testing.assert_array_equal, load(open_checkpoint(got), mesh)[1], want)


@pytest.mark.torch
def test_only_the_vision_part_is_harmless(folders: tuple[Path, Path]):
    edit_tensors(folders[1], add={"model.norm.weight": np.ones(64, np.float32)})  # without the prefix
    with pytest.raises(ModelFormatError, match=r"holds tensor model\.norm\.weight, which"):
        open_checkpoint(folders[1])


@pytest.mark.torch
def test_experts_may_be_stacked(mesh: Mesh, tmp_path: Path):
    """As published mixtures have them; transformers writes them one by one. The MTP layer's, too."""
    folder = tiny_checkpoint("qwen3.5-moe", tmp_path / "hf")
    wants = [load(open_checkpoint(folder), mesh)[1] for load in (load_params, load_nextn)]
    held = tensors(folder)
    one_by_one = [name for name in held if ".experts." in name]
    stacked = {}
    for prefix in {name.partition(".experts.")[0] for name in one_by_one}:
        of_all = {
            kind: np.stack([held[f"{prefix}.experts.{e}.{kind}_proj.weight"] for e in range(8)])
            for kind in ("gate", "up", "down")
        }
        stacked[f"{prefix}.experts.gate_up_proj"] = np.concatenate([of_all["gate"], of_all["up"]], axis=1)
        stacked[f"{prefix}.experts.down_proj"] = of_all["down"]
    assert len(stacked) == 2 * 4
    edit_tensors(folder, add=stacked, remove=one_by_one)
    for load, want in zip((load_params, load_nextn), wants, strict=True):
        jax.tree.map(np.testing.assert_array_equal, load(open_checkpoint(folder), mesh)[1], want)


def test_qwen3_next_holds_the_same_numbers_by_key_head(tmp_path: Path, mesh: Mesh):
    """Rows of q, k, v and z of one key head after the other, then those of beta and decay. It brings an MTP layer unsaid."""
    folder = Path(write_folder(tmp_path, "qwen3.5-moe"))
    wants = [load(open_checkpoint(folder), mesh)[1] for load in (load_params, load_nextn)]
    K, held, packed = TEXT["linear_num_key_heads"], tensors(folder), {}
    for prefix in {name.partition("in_proj_qkv.")[0] for name in held if "in_proj_qkv." in name}:
        parts = {kind: held.pop(f"{prefix}in_proj_{kind}.weight") for kind in ("qkv", "z", "b", "a")}
        keys = K * TEXT["linear_key_head_dim"]
        rows = [*np.split(parts["qkv"], [keys, 2 * keys]), parts["z"]]
        for name, of_heads in (("qkvz", rows), ("ba", [parts["b"], parts["a"]])):
            by_head = [x.reshape(K, -1, x.shape[-1]) for x in of_heads]
            packed[f"{prefix}in_proj_{name}.weight"] = np.concatenate(by_head, axis=1).reshape(-1, rows[0].shape[-1])
    edit_tensors(folder, add=packed, remove=[name for name in tensors(folder) if name not in held])
    hf = json.loads((folder / "config.json").read_text())
    del hf["mtp_num_hidden_layers"]
    hf |= {"architectures": ["Qwen3NextForCausalLM"], "intermediate_size": 96}
    (folder / "config.json").write_text(json.dumps(hf))
    for load, want in zip((load_params, load_nextn), wants, strict=True):
        jax.tree.map(np.testing.assert_array_equal, load(open_checkpoint(folder), mesh)[1], want)


@pytest.mark.long
@pytest.mark.torch
def test_the_published_layout_equals_pytorch(folders: tuple[Path, Path]):
    _, report = run_compare(folders[1], prompts=2, new_tokens=16)
    # The mean error is 1.2e-5; the largest depends on the CPU, 2.9e-4 on one.
    assert report.logits.maximum <= MAX_ILL_CONDITIONED_ERROR
    assert report.identical == 2


def test_ties_of_the_wrapper_come_before_those_of_its_text(tmp_path: Path):
    """As its class ties embedding and head."""
    for outer, inner, tied in ((True, False, True), (False, True, False), (None, True, True), (None, False, False)):
        hf = WRAPPED | {"tie_word_embeddings": outer, "text_config": TEXT | {"tie_word_embeddings": inner}}
        (tmp_path / "config.json").write_text(json.dumps(hf))
        assert read_model_config(tmp_path).tie_embeddings == tied


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_hostile_text_parts(value: Any, tmp_path: Path):
    error = read(tmp_path, WRAPPED | {"text_config": value})
    assert error is not None
    assert "text_config" in error or "not valid JSON" in error
    assert "\n" not in error


def test_full_attention_comes_after_each_interval_or_where_it_is_listed():
    def kinds(**keys: Any) -> list[bool]:
        return [layer.attention.rope is not None for layer in read_config(TEXT | keys).layers]

    assert kinds(num_hidden_layers=8, full_attention_interval=None) == [False, False, False, True] * 2
    assert kinds(layer_types=["full_attention", "linear_attention", "linear_attention"]) == [True, False, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads in config.json must be a multiple of linear_num_key_heads",
        ),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16', which is not supported"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types='sliding_attention', which is not supported"),
        ({"linear_key_head_dim": 2**20}, "linear_key_head_dim in config.json must be a whole number from 1 to 524288"),
        ({"attention_bias": True}, "attention_bias=True, which is not supported"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str):
    with pytest.raises(ModelFormatError, match=message):
        read_config(TEXT | changes)
