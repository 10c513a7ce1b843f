"""EAGLE3 drafts that are converted, and those that are refused: with one clear line, before any model is read."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspec.loading.engine
from convert.convert import convert_checkpoint
from convert.writer import write_manifest
from jaxspec.config import MAX_SPECULATIVE_TOKENS
from jaxspec.errors import ConfigError, JaxspecError, ModelFormatError
from jaxspec.llm import LLM
from jaxspec.loading.checkpoint import load_eagle3, open_checkpoint
from jaxspec.loading.manifest import Manifest, read_manifest
from jaxspec.loading.parts import WEIGHTS
from jaxspec.models.eagle3 import capture_layers, is_eagle3
from tests.convert.edits import edit_config, edit_tensors, tensors
from tests.eagle3_models import VOCAB, H, tiny_draft
from tests.engine.scripted import one_device
from tests.tiny_models import CONFIGS

KEY = "eagle_aux_hidden_state_layer_ids"


# --- conversion ---


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ("draft", "head")),
        ({"own_head": False}, ("draft",)),
        ({"own_embedding": True, "own_head": False}, ("draft", "embed")),
        ({"own_embedding": True, "draft_vocab_size": 100}, ("draft", "embed", "head")),
    ],
)
def test_parts_are_those_of_the_checkpoint(prefix, options, parts, tmp_path):
    folder = tiny_draft(tmp_path / "hf", prefix=prefix, **options)
    converted = convert_checkpoint(folder, tmp_path / "out")
    manifest = read_manifest(converted)
    assert sorted(manifest.parts) == sorted(parts)
    stored = {name: t for name, t in tensors(folder).items() if name not in ("d2t", "t2d")}
    offsets = options.get("draft_vocab_size", 0)
    assert manifest.parameters == sum(t.size for t in stored.values()) + offsets
    model, params = load_eagle3(open_checkpoint(converted), one_device(), "float32", (0, 1, 2))
    assert (model.own_embedding, model.own_head) == ("embed" in parts, "head" in parts)
    np.testing.assert_array_equal(params["fc"], stored["fc.weight"])
    assert ("d2t" in params) == bool(offsets)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Eagle3MiniMaxM2ForCausalLM"]},
        {"architectures": ["Eagle3Qwen3ForCausalLM"]},
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 100},
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": VOCAB},
    ],
)
@pytest.mark.parametrize("ids", [[], None])
def test_other_names_are_the_same_llama_head(config, ids, tmp_path):
    """An empty list of layers means the default ones, as no list does."""
    options = {"draft_vocab_size": config["draft_vocab_size"]} if config.get("draft_vocab_size", VOCAB) < VOCAB else {}
    folders = [tiny_draft(tmp_path / "usual", **options), tiny_draft(tmp_path / "named", **config, **{KEY: ids})]
    usual, named = (load_eagle3(open_checkpoint(f), one_device(), "float32", (0, 1, 2)) for f in folders)
    assert named[0].config.layer_ids is None
    assert named[0].config.layer == usual[0].config.layer
    jax.tree.map(np.testing.assert_array_equal, named[1], usual[1])


def test_a_llama_model_is_no_draft():
    assert not is_eagle3({"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "draft_vocab_size": None})


def no_d2t(folder: Path) -> None:
    edit_tensors(folder, remove=["d2t"])


def no_head(folder: Path) -> None:
    edit_tensors(folder, remove=["lm_head.weight"])


def d2t_outside(folder: Path) -> None:
    edit_tensors(folder, add={"d2t": np.full(100, VOCAB - 99)})


def d2t_negative(folder: Path) -> None:
    edit_tensors(folder, add={"d2t": np.full(100, -1)})


def d2t_twice(folder: Path) -> None:
    edit_tensors(folder, add={"d2t": np.where(np.arange(100) == 7, -1, 0)})


def d2t_misshaped(folder: Path) -> None:
    edit_tensors(folder, add={"d2t": np.zeros(99, np.int64)})


def fc_norm_tensor(folder: Path) -> None:
    edit_tensors(folder, add={"fc_norm.0.weight": np.ones(H, np.float32)})


def no_fc_norm(folder: Path) -> None:
    edit_config(folder, fc_norm=True)


def speculators_of_other_layers(folder: Path) -> None:
    layer = {"model_type": "qwen3_next", "hidden_size": H, "vocab_size": VOCAB}
    edit_config(folder, speculators_model_type="eagle3", transformer_layer_config=layer)


def second_layer(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=2)


def more_drafts_than_tokens(folder: Path) -> None:
    edit_config(folder, draft_vocab_size=VOCAB + 1)


def other_target_width(folder: Path) -> None:
    edit_config(folder, target_hidden_size=2 * H)


SPOILT = [
    (no_d2t, "proposes 100 of 256 tokens, but its checkpoint lacks d2t"),
    (no_head, r"proposes 100 of 256 tokens, but its checkpoint lacks lm_head\.weight"),
    (d2t_outside, "d2t maps a draft token to id 256, outside the vocabulary of 256 ids"),
    (d2t_negative, "d2t maps a draft token to id -1, outside the vocabulary of 256 ids"),
    (d2t_twice, "d2t maps two draft tokens to the same id"),
    (d2t_misshaped, r"tensor d2t has shape \[99\]; config.json asks for \[100\]"),
    (fc_norm_tensor, r"holds tensor fc_norm\.0\.weight"),
    (no_fc_norm, r"lacks tensor fc_norm\.0\.weight"),
    (speculators_of_other_layers, "transformer_layer_config.model_type='qwen3_next'; .* are supported with llama"),
    (second_layer, "num_hidden_layers=2; EAGLE3 drafts have 1"),
    (more_drafts_than_tokens, "draft_vocab_size=257, more than its vocab_size 256"),
    (other_target_width, "target_hidden_size=128 and hidden_size=64"),
]
# Options of other heads: every one changes a formula, at the top of the configuration or inside eagle_config.
FLAGS = {
    "logit_scale": 0.5, "use_aux_hidden_state": False, "num_aux_hidden_states": 4,
}  # fmt: skip


def assert_refused(folder: Path, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(folder)
    with pytest.raises(ModelFormatError, match=message) as error:
        convert_checkpoint(folder, tmp_path / "results" / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "results").exists() or not list((tmp_path / "results").iterdir())


@pytest.mark.parametrize(("spoil", "message"), SPOILT, ids=[case[0].__name__ for case in SPOILT])
def test_a_checkpoint_that_cannot_be_a_draft(spoil: Callable[[Path], None], message: str, tmp_path: Path):
    folder = tiny_draft(tmp_path / "hf", draft_vocab_size=100)
    spoil(folder)
    assert_refused(folder, message, tmp_path)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("inner", [False, True])
def test_options_that_change_the_formulas(flag: str, inner: bool, tmp_path: Path):
    option = {flag: FLAGS[flag]}
    folder = tiny_draft(tmp_path / "hf", **({"eagle_config": option} if inner else option))
    assert_refused(folder, re.escape(f"{flag}={FLAGS[flag]!r}"), tmp_path)


# --- choosing a draft: what is refused before the target's weights are read ---


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A converted folder of which only the weights are missing, and a loader that must not be reached."""
    monkeypatch.setattr(
        jaxspec.loading.engine, "load_params", lambda *_, **_o: pytest.fail("the target's weights were read")
    )
    folder = tmp_path / "target"
    parts = ("embed", "000", "head")
    for part in parts:
        (folder / WEIGHTS / part).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS["v3"] | {"num_hidden_layers": 6}))
    write_manifest(folder, Manifest("tiny", None, {}, parts, 0, 0, "float32", {}))
    return folder


def refused(target: Path, message: str, error: type[JaxspecError] = ConfigError, **options) -> None:
    with pytest.raises(error, match=message) as raised:
        LLM(str(target), dtype="float32", **({"max_num_batched_tokens": 64} | options))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 32}, "its hidden size is 32, the model's is 64"),
        ({"vocab_size": 300}, "its vocabulary is 300, the model's is 256"),
        ({KEY: [2, 3, 7]}, r"cannot capture layers \[2, 3, 7\] of a target of 6 layers"),
        ({KEY: [1, 3, 6]}, r"cannot capture layers \[1, 3, 6\] of a target of 6 layers"),  # the stream entering layer 7
        ({KEY: [2, 2, 3]}, r"cannot capture layers \[2, 2, 3\]: a layer occurs twice"),
        ({}, r"cannot capture layers \[2, 3, 3\] \(the default\): a layer occurs twice"),
    ],
)
def test_a_draft_of_another_model(config: dict, message: str, target: Path, tmp_path: Path):
    draft = tiny_draft(tmp_path / "draft", **config)
    refused(target, message, speculative_model=str(draft))


def test_a_draft_with_another_tokenizer(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "jaxspec.loading.tokenizer_files.load_tokenizer", lambda _: None
    )  # these hold a vocabulary and no more
    draft = convert_checkpoint(tiny_draft(tmp_path / "hf", **{KEY: [2, 3, 4]}), tmp_path / "draft")
    for folder, vocabulary in ((target, {"a": 0, "b": 1}), (draft, {"a": 1, "b": 0})):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    refused(target, "their tokenizers have different vocabularies", speculative_model=str(draft))


def test_the_wrong_models_in_the_wrong_places(target: Path, tmp_path: Path):
    draft = tiny_draft(tmp_path / "draft", **{KEY: [2, 3, 4]})
    refused(target, "is DeepseekV3ForCausalLM, not an EAGLE3 draft", speculative_model=str(target))
    refused(draft, "is an EAGLE3 draft, not a model", ModelFormatError)
    refused(target, "does not exist; a model is a folder", ModelFormatError, speculative_model=str(tmp_path / "gone"))
    refused(target, "needs a draft, and the model has no NextN", num_speculative_tokens=2)
    refused(
        target, "names 2 layers and the draft reads 3", speculative_model=str(draft), speculative_capture_layers=(2, 3)
    )
    refused(
        target, r"speculative_capture_layers .* is for EAGLE3 drafts", num_speculative_tokens=2,
        speculative_capture_layers=(2, 3, 4),
    )  # fmt: skip


@pytest.mark.parametrize("k", [-1, MAX_SPECULATIVE_TOKENS + 1])
def test_how_many_tokens(k: int, target: Path):
    refused(
        target,
        f"must be between 0 and 7, got {k}",
        num_speculative_tokens=k,
    )


def test_zero_tokens_and_a_draft_contradict(target: Path, tmp_path: Path):
    draft = tiny_draft(tmp_path / "draft")
    refused(target, r"num_speculative_tokens \(.*\) is 0, but", num_speculative_tokens=0, speculative_model=str(draft))


@pytest.mark.parametrize("layers", range(1, 9))
def test_captured_layers(layers: int):
    """A configuration's ids win over the default; 1 in front means "output of layer", all else "input of layer"."""
    default = (2, layers // 2, layers - 3)
    if len(set(default)) == 3 and min(default) >= 0 and max(default) <= layers:
        assert capture_layers(None, layers) == tuple(sorted(default))
    else:
        with pytest.raises(ConfigError, match="the default"):
            capture_layers(None, layers)
    assert capture_layers([0, layers], layers) == (0, layers)
    if layers > 1:
        assert capture_layers([layers, 0], layers) == (0, layers)
        assert capture_layers(sorted({1, layers - 1}), layers) == tuple(sorted({2, layers}))
        with pytest.raises(ConfigError, match="cannot capture"):
            capture_layers([1, layers], layers)


def test_the_fixture_is_a_converted_folder(target: Path):
    """Else the refusals above could come from the folder and not from what they name."""
    with pytest.raises(pytest.fail.Exception, match="the target's weights were read"):
        LLM(str(target), dtype="float32", max_num_batched_tokens=64)
