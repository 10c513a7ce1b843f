"""Files outside a model's folder and pickled files are never opened."""

import json
import os
from pathlib import Path

import pytest

from jaxspec.errors import ModelFormatError
from jaxspec.loading.hf_folder import INDEX, cache_repository, inside, read_hf_config, read_json, weight_files

SECRET = "secret.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one shard, beside a file that must not be reached."""
    (tmp_path / SECRET).write_bytes(b"secret")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(b"weights")
    return folder


def write_index(folder: Path, file_name: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": file_name}}))


@pytest.mark.parametrize(
    "name",
    [
        f"../{SECRET}", f"./../{SECRET}", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors",
        "x\0.safetensors", "//x.safetensors", "../model/model-1.safetensors",
    ],
)  # fmt: skip
def test_index_that_points_outside(folder: Path, name: str):
    write_index(folder, name)
    with pytest.raises(ModelFormatError, match="points outside its folder"):
        weight_files(folder)


def test_absolute_path_to_a_file_that_exists(folder: Path):
    write_index(folder, str(folder.parent / SECRET))
    with pytest.raises(ModelFormatError, match="points outside its folder"):
        weight_files(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.safetensors.bin", "", ".."])
def test_index_that_names_another_format(folder: Path, name: str):
    write_index(folder, name)
    with pytest.raises(ModelFormatError, match=r"only \.safetensors files are loaded"):
        weight_files(folder)


@pytest.mark.parametrize("index", ["{}", "[]", "{", '{"weight_map": {}}', '{"weight_map": {"x": 1}}', "\udcff"])
def test_malformed_index(folder: Path, index: str):
    (folder / INDEX).write_bytes(index.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelFormatError, match=INDEX):
        weight_files(folder)


def test_index_that_names_a_missing_file(folder: Path):
    write_index(folder, "gone.safetensors")
    with pytest.raises(ModelFormatError, match=r"has no gone\.safetensors"):
        weight_files(folder)


@pytest.mark.parametrize("target", ["../" + SECRET, "absolute"])
def test_link_that_leaves_the_folder(folder: Path, target: str):
    (folder / "x.safetensors").symlink_to(folder.parent / SECRET if target == "absolute" else target)
    write_index(folder, "x.safetensors")
    with pytest.raises(ModelFormatError, match="link that points outside"):
        weight_files(folder)


def test_folder_that_is_a_link_itself(folder: Path):
    """Models often live on another disk; it is the folder's contents that may not lead out of it."""
    link = folder.parent / "link"
    link.symlink_to(folder)
    files, _ = weight_files(link)
    assert [f.name for f in files] == ["model-1.safetensors"]


def test_cache_snapshots_link_to_their_own_blobs_only(folder: Path):
    hub = folder.parent / "hub"
    for name in ("models--org--a", "models--org--b"):
        (hub / name / "blobs").mkdir(parents=True)
        (hub / name / "blobs" / "0123").write_bytes(b"weights")
    snapshot = hub / "models--org--a" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "good.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "bad.safetensors").symlink_to("../../../models--org--b/blobs/0123")
    assert cache_repository(snapshot) == hub / "models--org--a"
    assert inside(snapshot, "good.safetensors").read_bytes() == b"weights"
    with pytest.raises(ModelFormatError, match="link that points outside"):
        inside(snapshot, "bad.safetensors")


def test_other_folders_are_no_cache(folder: Path):
    assert cache_repository(folder) is None
    fake = folder.parent / "mine" / "snapshots" / "c0ffee"
    fake.mkdir(parents=True)
    (fake / "x.safetensors").symlink_to(f"../../../{SECRET}")
    assert cache_repository(fake) is None
    with pytest.raises(ModelFormatError, match="link that points outside"):
        inside(fake, "x.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "model.pkl"])
def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"")
    os.chmod(tmp_path / name, 0)
    with pytest.raises(ModelFormatError, match=f"{name} is never loaded"):
        weight_files(tmp_path)


def test_no_weights(tmp_path: Path):
    with pytest.raises(ModelFormatError, match=r"has no \.safetensors weights$"):
        weight_files(tmp_path)


def test_one_file_model_ignores_other_layouts_of_the_same_weights(folder: Path):
    for name in ("model.safetensors", "consolidated.safetensors"):
        (folder / name).write_bytes(b"")
    assert [f.name for f in weight_files(folder)[0]] == ["model.safetensors"]


def test_config(tmp_path: Path):
    with pytest.raises(ModelFormatError, match=r"has no config\.json"):
        read_hf_config(tmp_path)
    with pytest.raises(ModelFormatError, match="is not a folder"):
        read_hf_config(tmp_path / "gone")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelFormatError, match=r"config\.json is not valid JSON"):
        read_json(tmp_path, "config.json")
    (tmp_path / "config.json").write_text('"text"')
    with pytest.raises(ModelFormatError, match=r"config\.json is not a JSON object"):
        read_hf_config(tmp_path)
