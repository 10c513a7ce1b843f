"""What generation_config.json and the options about it make of the sampling defaults, and how wrong values are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from convert.convert import convert_checkpoint
from jaxspec.errors import ConfigError, ModelFormatError
from jaxspec.loading.generation_config import check_override, sampling_defaults
from tests.tiny_models import tiny_checkpoint

FILE = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "repetition_penalty": 1.05, "do_sample": False,
    "max_new_tokens": 5, "eos_token_id": [1, 2], "transformers_version": "4.46.3",
}  # fmt: skip
READ = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05, "top_k": 20}


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", FILE)


def test_the_models_own_values(model):
    defaults = sampling_defaults(model)
    assert defaults.values == READ
    assert str(defaults) == (
        "temperature 0.6, top_p 0.95, repetition_penalty 1.05, top_k 20 (from generation_config.json)"
    )


@pytest.mark.parametrize("source", ["none", "vllm"])
def test_nothing_is_read_where_that_is_asked(model, source):
    assert sampling_defaults(model, source).values == {}
    assert str(sampling_defaults(model, source)) == "none"


def test_a_model_without_the_file_has_none(tmp_path):
    assert sampling_defaults(tmp_path).values == {}


def test_another_folder(model, tmp_path):
    other = write(tmp_path / "other", {"min_p": 0.1, "top_k": -1})
    defaults = sampling_defaults(model, str(other))
    assert defaults.values == {"min_p": 0.1, "top_k": -1}
    assert str(other) in defaults.origin
    for wrong in ("folder", str(tmp_path), ""):
        with pytest.raises(ConfigError, match=r"must be auto, none, vllm or a folder with a generation_config\.json"):
            sampling_defaults(model, wrong)


def test_an_override_goes_first(model):
    override = {"temperature": 0, "top_p": None, "min_p": 0.2}
    defaults = sampling_defaults(model, override=override)
    assert defaults.values == {"temperature": 0.0, "min_p": 0.2, "repetition_penalty": 1.05, "top_k": 20}
    assert defaults.origin == "generation_config.json and --override-generation-config"
    assert sampling_defaults(model, "none", override).values == {"temperature": 0.0, "min_p": 0.2}
    assert sampling_defaults(model, "none", {"top_p": None}).values == {}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", "0.6", "temperature in generation_config.json must be a number from 0 to 100, got '0.6'"),
        ("temperature", -0.1, "must be a number from 0 to 100, got -0.1"),
        ("temperature", float("nan"), "must be a number from 0 to 100, got nan"),
        ("temperature", float("inf"), "must be a number from 0 to 100, got inf"),
        ("temperature", True, "must be a number from 0 to 100, got True"),
        ("temperature", 10**400, "must be a number from 0 to 100"),
        ("top_p", 0, r"top_p must be in \(0, 1\], got 0.0"),
        ("top_p", 1.5, r"top_p must be in \(0, 1\], got 1.5"),
        ("top_k", 2.5, "top_k in generation_config.json must be a whole number from -1 to 2147483647, got 2.5"),
        ("top_k", 2**31, "must be a whole number from -1 to 2147483647"),
        ("top_k", [5], r"must be a whole number from -1 to 2147483647, got \[5\]"),
        ("min_p", 1.01, r"min_p must be in \[0, 1\], got 1.01"),
        ("repetition_penalty", 0, r"repetition_penalty must be in \(0, 10\], got 0.0"),
        ("repetition_penalty", {"a": 1}, "must be a number from 0 to 100"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_used(tmp_path, key, value, message):
    folder = write(tmp_path / "model", {key: value})
    with pytest.raises(ModelFormatError, match=message) as error:
        sampling_defaults(folder)
    assert str(folder) in str(error.value)
    assert "--generation-config none leaves it out" in str(error.value)
    assert "\n" not in str(error.value)
    assert sampling_defaults(folder, "none").values == {}
    with pytest.raises(ConfigError, match=message.replace("generation_config.json", ".*--override-generation-config.")):
        check_override({key: value})
    with pytest.raises(ConfigError, match=message):
        sampling_defaults(tmp_path, str(folder))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ([], "must be an object such as"),
        ({"temprature": 1}, "unknown key 'temprature' .*did you mean temperature?"),
        ({"max_new_tokens": 9}, "unknown key 'max_new_tokens' .*known are temperature, top_p"),
        ({"x" * 500: 1}, "unknown key 'xxx"),
    ],
)
def test_overrides_that_cannot_be_used(override, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_override(override)
    assert len(str(error.value)) < 300


def test_a_file_that_is_no_object_is_an_error(model):
    (model / "generation_config.json").write_text("[]")
    with pytest.raises(ModelFormatError, match="is not a JSON object"):
        sampling_defaults(model)


@pytest.mark.torch
def test_a_converted_folder_keeps_them(tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "source")
    out = convert_checkpoint(write(source, FILE), tmp_path / "out")
    assert sampling_defaults(out) == sampling_defaults(source)
    assert sampling_defaults(out).values == READ
