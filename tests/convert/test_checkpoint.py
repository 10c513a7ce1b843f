"""Converted folders that are not, are damaged, or come from another version; and loading over a mesh."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxspec.errors import ModelFormatError
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.loading.manifest import LAYOUT_VERSION, read_manifest
from jaxspec.models.params import TENSOR_AXIS
from tests.convert.edits import edit_config
from tests.matrices import members

pytestmark = pytest.mark.torch
Get = Callable[[str], Path]


@pytest.fixture
def folder(converted: Get, tmp_path: Path) -> Path:
    return shutil.copytree(converted("llama"), tmp_path / "model")


def test_not_a_converted_folder(source: Get, tmp_path: Path):
    for other in (source("llama"), tmp_path, tmp_path / "gone"):
        with pytest.raises(ModelFormatError, match="is not a converted folder"):
            read_manifest(other)


def test_other_layout_version(folder: Path):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"layout_version": LAYOUT_VERSION + 1, "jaxspec_version": "9.9"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ModelFormatError, match=r"layout version 3 \(written by jaxspec 9\.9\).*convert the model again"
    ):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layout_version": 2, "jaxspec_version": "0"}'])
def test_damaged_manifest(folder: Path, text: str):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ModelFormatError, match="is damaged"):
        read_manifest(folder)


def test_missing_part(folder: Path):
    shutil.rmtree(folder / "weights" / "001")
    with pytest.raises(ModelFormatError, match="lacks its part weights/001"):
        read_manifest(folder)


LOAD = """
import sys
import jax, numpy as np
from jax.sharding import Mesh
from jaxspec.loading.checkpoint import load_params, open_checkpoint
from jaxspec.errors import ModelFormatError

try:
    load_params(open_checkpoint(sys.argv[1]), Mesh(np.array(jax.devices()[:1]), ("tensor",)))
except ModelFormatError as e:
    print(e)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "name", members(["*", "_METADATA", "manifest.ocdbt", "d/*"], default=["manifest.ocdbt", "d/*"])
)
def test_damaged_part(name: str, folder: Path):
    """In a process of its own: where Orbax fails half-way, it drops coroutines that Python complains about later."""
    for file in (folder / "weights" / "001").rglob(name):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done = subprocess.run([sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, check=True)
    assert "part 001 cannot be read" in done.stdout
    assert done.stdout.count("\n") == 1


def test_config_that_does_not_fit_the_weights(converted: Get, folder: Path, mesh: Mesh, tmp_path: Path):
    edit_config(folder, intermediate_size=64)
    with pytest.raises(
        ModelFormatError, match=r"mlp\.(down|gate_up) of shape \[.*96.*\]; config\.json asks for \[.*64"
    ):
        load_params(open_checkpoint(folder), mesh)
    other = shutil.copytree(converted("v3"), tmp_path / "v3")
    edit_config(other, q_lora_rank=None)
    with pytest.raises(ModelFormatError, match=r"part 000 and config\.json disagree on attention\.kv_a"):
        load_params(open_checkpoint(other), mesh)


def test_two_devices_hold_their_halves(converted: Get):
    checkpoint, devices = open_checkpoint(converted("v3-mtp")), jax.devices()[:2]

    def same(whole: jax.Array, split: jax.Array) -> bool:
        for shard in split.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(whole)[shard.index])
        return split.sharding.is_fully_replicated

    for load in (load_params, load_nextn):
        one, two = (load(checkpoint, Mesh(np.array(devices[:n]), (TENSOR_AXIS,)))[1] for n in (1, 2))
        replicated = jax.tree.map(same, one, two)
        block = replicated["layers"][1] if "layers" in replicated else replicated["layer"]
        assert not any(block["attention"][k] for k in ("q_b", "w_uk", "w_uv", "o"))
        assert block["attention"]["qkv_a"]
        assert block["mlp"]["router"]
        assert not block["mlp"]["gate_up"]
        assert not block["mlp"]["shared"]["down"]
