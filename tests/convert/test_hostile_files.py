"""Hostile manifests, weight headers, indices and tokenizers: each is read, or refused in one line, at once."""

import base64
import errno
import json
import math
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxspec.demo
from convert.convert import convert_checkpoint
from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError, ModelFormatError
from jaxspec.loading.checkpoint import load_eagle3, load_nextn, open_checkpoint
from jaxspec.loading.draft import plan_draft
from jaxspec.loading.hf_folder import read_json, weight_files
from jaxspec.loading.manifest import has_manifest, read_manifest
from jaxspec.loading.safetensors_reader import SafetensorsReader
from jaxspec.loading.tiktoken import MAX_TOKEN_BYTES, build_tokenizer, read_ranks
from jaxspec.loading.tokenizer_files import load_tokenizer, read_vocabulary
from jaxspec.models.registry import read_config
from tests.eagle3_models import tiny_draft
from tests.tiny_models import CONFIGS

DEMO = Path(jaxspec.demo.__path__[0]) / "target"
HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, math.nan, math.inf, "", "x", "a\nb", "8" * 5000, "\ud800", [], [1], [None], ["x"], {},
    {"x": 1}, 2**31, "../../etc",
)  # fmt: skip
MANIFEST: dict[str, Any] = {
    "source": "tiny", "revision": None, "shards": {"model.safetensors": "00"}, "parts": ["embed", "000", "head"],
    "parameters": 10, "nextn_parameters": 0, "dtype": "float32", "layout_version": 2, "jaxspec_version": "0",
    "schemes": {"000": {"mlp.down": "fp8_block"}},
}  # fmt: skip
SECONDS = 2.0


def mutations(value: Any, depth: int = 0) -> Iterator[Any]:
    """A JSON value with each of its first inner values replaced by each hostile one."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in list(keys)[:12]:
        for new in (*HOSTILE, *(mutations(value[key], depth + 1) if _has_inner(value[key], depth) else ())):
            changed = value.copy()
            changed[key] = new
            yield changed


def _has_inner(value: Any, depth: int) -> bool:
    return depth < 3 and isinstance(value, (dict, list)) and len(value) > 0


def outcome(read: Callable[[], object]) -> str | None:
    """The error of reading, or None. Anything but an error for users fails the test."""
    began = time.process_time()
    error = None
    try:
        read()
    except ModelFormatError as e:
        error = str(e)
    assert time.process_time() - began < SECONDS
    assert error is None or ("\n" not in error and len(error) < 1000)
    return error


def test_manifests(tmp_path: Path):
    for part in MANIFEST["parts"]:
        (tmp_path / "weights" / part).mkdir(parents=True)
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(MANIFEST))
    assert outcome(lambda: read_manifest(tmp_path)) is None
    refused = 0
    for changed in mutations(MANIFEST):
        file.write_text(json.dumps(changed))
        has_manifest(tmp_path)
        error = outcome(lambda: read_manifest(tmp_path))
        refused += error is not None
        assert error is None or str(tmp_path) in error
    assert refused > 150
    for key in MANIFEST:
        file.write_text(json.dumps({k: v for k, v in MANIFEST.items() if k != key}))
        assert "convert the model again" in str(outcome(lambda: read_manifest(tmp_path)))
    for raw in ("", "[" * 100_000, "[]", "\xff"):
        file.write_text(raw, encoding="latin-1")
        assert not has_manifest(tmp_path)
        assert "damaged" in str(outcome(lambda: read_manifest(tmp_path)))


def test_a_part_cannot_point_elsewhere(tmp_path: Path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST | {"parts": ["../.."]}))
    with pytest.raises(
        ModelFormatError, match=r"parts in manifest\.json must be a list of embed, 000, .* got '../\.\.'"
    ):
        read_manifest(tmp_path)


def test_a_manifest_with_a_nextn_layer_that_config_json_has_not(tmp_path: Path, mesh):
    parts = ["embed", "000", "head", "mtp"]
    for part in parts:
        (tmp_path / "weights" / part).mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["v3"] | {"num_hidden_layers": 1}))
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST | {"parts": parts}))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ModelFormatError, match="has no NextN"):
        load_nextn(checkpoint, mesh)
    with pytest.raises(ConfigError, match="has no NextN"):
        plan_draft(EngineConfig(num_speculative_tokens=1), checkpoint, read_config(checkpoint.hf), "float32")


def test_a_converted_part_without_its_data(tmp_path: Path, mesh):
    """Its metadata may claim any size; without data, zarr would make it up in memory."""
    draft = convert_checkpoint(tiny_draft(tmp_path / "hf"), tmp_path / "draft")
    data = max((draft / "weights" / "draft").rglob("d/*"), key=lambda file: file.stat().st_size)
    with data.open("r+b") as f:
        f.truncate(100)
    with pytest.raises(ModelFormatError, match=r"part draft (has \d+ bytes, but its arrays have|cannot be read)"):
        load_eagle3(open_checkpoint(draft), mesh, "float32", (0, 1, 2))
    shutil.rmtree(draft / "weights" / "draft")
    (draft / "weights" / "draft").mkdir()
    with pytest.raises(ModelFormatError, match="part draft cannot be read"):
        load_eagle3(open_checkpoint(draft), mesh, "float32", (0, 1, 2))


def write_header(file: Path, header: Any, data: bytes = b"") -> None:
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_weight_headers(tmp_path: Path):
    header = {"a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}
    file = tmp_path / "model.safetensors"
    write_header(file, header, bytes(8))
    assert outcome(lambda: SafetensorsReader(tmp_path)) is None
    refused = 0
    for changed in mutations(header):
        write_header(file, changed, bytes(8))
        refused += outcome(lambda: SafetensorsReader(tmp_path)) is not None
    assert refused > 80
    huge = {"a": {"dtype": "X", "shape": [10**4000] * 3000, "data_offsets": [0, 8]}}
    write_header(file, huge, bytes(8))  # a product of such numbers takes minutes
    assert "its entry for tensor a is malformed" in str(outcome(lambda: SafetensorsReader(tmp_path)))
    write_header(file, {"a\nb": header["a"]}, bytes(8))
    assert "is not the name of a tensor" in str(outcome(lambda: SafetensorsReader(tmp_path)))


def test_indices(tmp_path: Path):
    write_header(tmp_path / "a.safetensors", {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
    index = {"metadata": {"total_size": 8}, "weight_map": {"a": "a.safetensors"}}
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    assert outcome(lambda: SafetensorsReader(tmp_path)) is None
    for changed in (
        *mutations(index),
        *({"weight_map": {"a": f"{name}.safetensors"}} for name in ("x" * 300, "\n", "é" * 200)),
    ):
        file.write_text(json.dumps(changed))
        outcome(lambda: weight_files(tmp_path))
        outcome(lambda: SafetensorsReader(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers(name: str, tmp_path: Path):
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / each, tmp_path / each)
    base = json.loads((DEMO / name).read_text())
    if name == "tokenizer.json":
        for key in ("vocab", "merges"):  # a small one loads a hundred times as fast
            base["model"][key] = type(base["model"][key])(
                list(base["model"][key].items())[:300] if key == "vocab" else []
            )
    for changed in mutations(base):
        (tmp_path / name).write_text(json.dumps(changed))
        outcome(lambda: load_tokenizer(tmp_path))
        outcome(lambda: read_vocabulary(tmp_path))


def test_a_tokenizer_that_would_abort_the_process(tmp_path: Path):
    """Of the Rust parser: no exception can be caught there."""
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
        tokenizer["model"][key] = "x"
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert f"{key} in tokenizer.json must be empty" in str(outcome(lambda: load_tokenizer(tmp_path)))


def test_half_a_character_is_not_text(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path, "config.json") == {"a": "\U0001f600"}
    (tmp_path / "config.json").write_text('{"a": "\\ud83d"}')
    with pytest.raises(ModelFormatError, match=r"config\.json is not valid JSON"):
        read_json(tmp_path, "config.json")


def ranks(tokens: list[bytes]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))


def test_rank_files(tmp_path: Path):
    file = tmp_path / "tiktoken.model"
    every_byte = [bytes([b]) for b in range(256)]
    file.write_text(ranks([*every_byte, b"x" * MAX_TOKEN_BYTES]))
    assert len(read_ranks(file)) == 257
    file.write_text(ranks([*every_byte, b"x" * 200_000]))  # every split of it would be looked at
    assert "line 257 has a token of 200000 bytes" in str(outcome(lambda: read_ranks(file)))
    with file.open("r+b") as f:
        f.truncate(40 * 2**20)
    assert "is larger than 32 MiB" in str(outcome(lambda: read_ranks(file)))
    file.write_text(ranks(every_byte))
    special = {"content": "<x>", "special": True, "lstrip": False}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"256": special}}
    assert outcome(lambda: build_tokenizer(file, config)) is None
    for changed in (
        *mutations(config),
        *({"added_tokens_decoder": {key: special}} for key in ("x", "-1", "9" * 5000, "²")),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(changed))
        outcome(lambda: build_tokenizer(file, read_json(tmp_path, "tokenizer_config.json")))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(_path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ModelFormatError, match=r"config\.json cannot be read: Permission denied"):
        read_json(tmp_path, "config.json")
