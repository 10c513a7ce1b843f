"""From any model name to a folder; the hub is a stand-in, since tests have no network."""

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from convert.convert import convert_checkpoint
from jaxspec.errors import ModelFormatError
from jaxspec.loading.checkpoint import load_params, open_checkpoint, read_model_config
from jaxspec.loading.manifest import read_manifest
from jaxspec.loading.parts import MTP
from jaxspec.loading.resolve import resolve_model
from tests.convert.edits import edit_config

Get = Callable[[str], Path]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.torch
def test_folders_are_themselves(source: Get, converted: Get):
    for folder in (source("llama"), converted("llama")):
        assert resolve_model(folder) == resolve_model(str(folder)) == folder


@pytest.mark.torch
def test_nothing_is_written(source: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh):
    for variable in ("HOME", "JAXSPEC_CACHE", "TMPDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    folder = resolve_model(source("llama"))
    before = sorted(folder.rglob("*"))
    load_params(open_checkpoint(folder), mesh)
    assert sorted(folder.rglob("*")) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
def test_manifest_of_something_else(source: Get, tmp_path: Path, mesh):
    folder = shutil.copytree(source("llama"), tmp_path / "model")
    (folder / "manifest.json").write_text('{"name": "a web application"}')
    load_params(open_checkpoint(resolve_model(folder)), mesh)


@pytest.mark.torch
def test_changed_folders_load_as_they_are(source: Get, tmp_path: Path):
    folder = shutil.copytree(source("llama"), tmp_path / "model")
    assert read_model_config(resolve_model(folder)).eos_token_ids == (2,)
    edit_config(folder, eos_token_id=7)
    assert read_model_config(resolve_model(folder)).eos_token_ids == (2, 7)


@pytest.mark.parametrize("model", ["gone", "./gone", "/gone/model", "gone/", "a/b/c", "~/gone", "x\0y"])
def test_names_that_mean_nothing(model: str):
    with pytest.raises(ModelFormatError, match="does not exist; a model is a folder"):
        resolve_model(model)


def test_folder_without_config(tmp_path: Path):
    with pytest.raises(ModelFormatError, match=r"has no config\.json, so it is not a Hugging Face model folder"):
        open_checkpoint(tmp_path)


def test_unsupported_architecture(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(
        ModelFormatError, match=r"GPT2LMHeadModel; the nearest supported one is .*`jaxspec models` lists"
    ):
        open_checkpoint(tmp_path)


def test_demo(mesh):
    checkpoint = open_checkpoint(resolve_model("demo"))
    assert MTP in checkpoint.parts
    model, _ = load_params(checkpoint, mesh)
    assert model.config.architecture == "DeepseekV3ForCausalLM"


def test_revision_of_a_local_folder(tmp_path: Path):
    for model in (tmp_path, "demo"):
        with pytest.raises(ModelFormatError, match="a revision can only be chosen for a hub id"):
            resolve_model(model, revision="main")


class Hub:
    """Stands in for `snapshot_download`: fills a cache of the library's layout from a folder."""

    def __init__(self, folder: Path, root: Path):
        self.folder, self.root = folder, root
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.calls.append(options)
        repository = self.root / f"models--{repo_id.replace('/', '--')}"
        snapshot = repository / "snapshots" / COMMIT
        for path in self.folder.rglob("*"):
            name = str(path.relative_to(self.folder))
            wanted = any(fnmatch(name, p) for p in options["allow_patterns"])
            if path.is_dir() or not wanted or any(fnmatch(name, p) for p in options["ignore_patterns"]):
                continue
            blob = repository / "blobs" / f"blob-of-{path.name}"
            for parent in (blob.parent, snapshot):
                parent.mkdir(parents=True, exist_ok=True)
            if not blob.exists():
                shutil.copyfile(path, blob)
                (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
        return str(snapshot)


@pytest.mark.torch
def test_hub_id(source: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh):
    remote = shutil.copytree(source("v3-mtp"), tmp_path / "remote")
    (remote / "modeling_evil.py").write_text("raise SystemExit")
    (remote / "pytorch_model.bin").write_bytes(b"pickle")
    (remote / "original").mkdir()
    (remote / "original" / "consolidated.safetensors").write_bytes(b"")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(remote, tmp_path / "hub"))

    out = convert_checkpoint("org/tiny", tmp_path / "out", revision="v1.0")
    manifest = read_manifest(out)
    assert (manifest.source, manifest.revision) == ("org/tiny", COMMIT)
    assert huggingface_hub.snapshot_download.calls[0]["revision"] == "v1.0"
    load_params(open_checkpoint(out), mesh)
    fetched = {p.name for p in (tmp_path / "hub").rglob("*") if p.parent.name == COMMIT}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}

    snapshot = resolve_model("org/tiny", revision="v1.0")
    assert snapshot == tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    load_params(open_checkpoint(snapshot), mesh)


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("Cannot find the snapshot.\nMore advice.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelFormatError, match=r"org/tiny is not a folder, .* hub failed: Cannot find the snapshot\.$"):
        resolve_model("org/tiny")


@pytest.mark.torch
def test_remote_code_is_not_copied(source: Get, tmp_path: Path):
    folder = shutil.copytree(source("llama"), tmp_path / "model")
    edit_config(folder, auto_map={"AutoConfig": "configuration_evil.EvilConfig"})
    (folder / "configuration_evil.py").write_text("raise SystemExit")
    out = convert_checkpoint(folder, tmp_path / "out")
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert not list(out.rglob("*.py"))
