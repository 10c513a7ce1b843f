"""From any model name to a converted folder; the hub is a stand-in, since tests have no network."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from convert.convert import convert_checkpoint, resolve_model
from jaxspec.errors import ModelFormatError
from jaxspec.loading.checkpoint import load_params
from jaxspec.loading.manifest import read_manifest
from tests.convert.edits import edit_config

Get = Callable[[str], Path]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if not p.name.startswith("."))


@pytest.mark.torch
def test_converted_folder_is_itself(converted: Get, cache: Path):
    assert resolve_model(converted("llama")) == converted("llama")
    assert not cache.exists()


@pytest.mark.torch
def test_hugging_face_folder_is_converted_once(source: Get, cache: Path, mesh):
    first = resolve_model(str(source("llama")))
    assert first.parent == cache
    made = (first / "manifest.json").stat().st_mtime_ns
    assert resolve_model(source("llama")) == first
    assert (first / "manifest.json").stat().st_mtime_ns == made
    load_params(first, mesh)


@pytest.mark.torch
def test_manifest_of_something_else(source: Get, cache: Path, tmp_path: Path):
    folder = shutil.copytree(source("llama"), tmp_path / "model")
    (folder / "manifest.json").write_text('{"name": "a web application"}')
    assert resolve_model(folder).parent == cache


@pytest.mark.torch
def test_cache_is_private(source: Get, cache: Path):
    resolve_model(source("llama"))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.torch
def test_cache_dir_argument_and_home(source: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert resolve_model(source("llama"), cache_dir=tmp_path / "mine").parent == tmp_path / "mine"
    monkeypatch.delenv("JAXSPEC_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_model(source("llama")).parent == tmp_path / "home" / ".cache" / "jaxspec"


@pytest.mark.torch
def test_changed_folders_are_converted_again(source: Get, cache: Path, tmp_path: Path):
    folder = shutil.copytree(source("llama"), tmp_path / "model")
    names = {resolve_model(folder).name}
    edit_config(folder, eos_token_id=7)
    names.add(resolve_model(folder).name)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    names.add(resolve_model(folder).name)
    (folder / "generation_config.json").write_text("{}")
    names.add(resolve_model(folder).name)
    shutil.copytree(folder, tmp_path / "copy")
    names.add(resolve_model(tmp_path / "copy").name)
    assert len(names) == 5
    assert set(entries(cache)) == names


@pytest.mark.slow
@pytest.mark.torch
def test_two_processes_convert_once(source: Get, cache: Path):
    script = "import sys; from convert.convert import resolve_model; print(resolve_model(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(source("v3"))]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {run.communicate()[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert printed == {str(cache / name) for name in entries(cache)}
    assert len(printed) == 1
    read_manifest(Path(printed.pop()))


@pytest.mark.torch
def test_failed_conversion_is_not_cached(source: Get, cache: Path, tmp_path: Path):
    folder = shutil.copytree(source("llama"), tmp_path / "model")
    edit_config(folder, intermediate_size=97)
    for _ in range(2):
        with pytest.raises(ModelFormatError, match=r"config\.json asks for"):
            resolve_model(folder)
    assert entries(cache) == []


@pytest.mark.parametrize("model", ["gone", "./gone", "/gone/model", "gone/", "a/b/c", "~/gone", "", "x\0y"])
def test_names_that_mean_nothing(model: str, cache: Path):
    with pytest.raises(
        ModelFormatError, match=r"does not exist; a model is a folder|is not a Hugging Face model folder"
    ):
        resolve_model(model)
    assert not cache.exists()


def test_folder_without_config(tmp_path: Path, cache: Path):
    with pytest.raises(ModelFormatError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    assert not cache.exists()


def test_unsupported_architecture_is_refused_before_anything_is_made(tmp_path: Path, cache: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ModelFormatError, match="supported: DeepseekV2ForCausalLM, DeepseekV3ForCausalLM"):
        resolve_model(tmp_path)
    assert not cache.exists()


def test_demo(tmp_path: Path, mesh):
    folder = resolve_model("demo", cache_dir=tmp_path)
    assert read_manifest(folder).nextn_parameters > 0
    model, _ = load_params(folder, mesh)
    assert model.config.architecture == "DeepseekV3ForCausalLM"


def test_revision_of_a_local_folder(tmp_path: Path):
    with pytest.raises(ModelFormatError, match="a revision can only be chosen for a hub id"):
        resolve_model(tmp_path, revision="main")


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
def test_hub_id(source: Get, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh):
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
    load_params(out, mesh)
    fetched = {p.name for p in (tmp_path / "hub").rglob("*") if p.parent.name == COMMIT}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}

    cached = resolve_model("org/tiny", revision="v1.0")
    assert cached.name.startswith("org--tiny-")
    assert resolve_model("org/tiny") == cached
    assert entries(cache) == [cached.name]


def test_hub_that_cannot_be_reached(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("Cannot find the snapshot.\nMore advice.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelFormatError, match=r"org/tiny is not a folder, .* hub failed: Cannot find the snapshot\.$"):
        resolve_model("org/tiny")
    assert not cache.exists()


@pytest.mark.torch
def test_remote_code_is_left_behind(source: Get, tmp_path: Path):
    folder = shutil.copytree(source("llama"), tmp_path / "model")
    edit_config(folder, auto_map={"AutoConfig": "configuration_evil.EvilConfig"})
    (folder / "configuration_evil.py").write_text("raise SystemExit")
    out = convert_checkpoint(folder, tmp_path / "out")
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert not list(out.rglob("*.py"))
