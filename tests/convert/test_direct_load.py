"""A Hugging Face folder loads to the same bits, on the same shards, as the folder that it converts to."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from convert.convert import convert_checkpoint
from jaxspec.errors import ConfigError
from jaxspec.loading.checkpoint import load_eagle3, load_nextn, load_params, open_checkpoint
from jaxspec.loading.parts import DRAFT, MTP
from jaxspec.loading.resolve import EMBEDDED, resolve_model
from jaxspec.models.params import TENSOR_AXIS
from tests.convert.edits import edit_config, edit_tensors, tensors
from tests.eagle3_models import tiny_draft
from tests.matrices import full
from tests.tiny_models import variants

Get = Callable[[str], Path]
DRAFTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-whole": {"own_embedding": True, "prefix": "layers.0."},
    "llama-reduced": {"draft_vocab_size": 100},
    "llama-borrowing": {"own_head": False},
    "mla": {"head": "mla"},
    "mla-reduced": {"head": "mla", "draft_vocab_size": 100, "own_embedding": True},
    "mla-bfloat16": {"head": "mla", "torch_dtype": "bfloat16"},
}


@pytest.fixture
def devices(request: pytest.FixtureRequest) -> Mesh:
    """So many."""
    return Mesh(np.array(jax.devices()[: request.param]), (TENSOR_AXIS,))


# Rounding and splitting do not know of each other.
EACH = pytest.mark.parametrize(
    ("devices", "dtype"),
    [
        (1, "float32"),
        (2, "bfloat16"),
        *full((1, "bfloat16"), (2, "float32")),
    ],
    indirect=["devices"],
)


def load_all(folder: Path, mesh: Mesh, dtype: str | None) -> list[Any]:
    """Everything that a folder holds."""
    checkpoint = open_checkpoint(folder)
    if DRAFT in checkpoint.parts:
        return [load_eagle3(checkpoint, mesh, dtype or checkpoint.dtype, (0, 1, 2))[1]]
    params = [load_params(checkpoint, mesh, dtype)[1]]
    return [*params, load_nextn(checkpoint, mesh, dtype)[1]] if MTP in checkpoint.parts else params


def assert_same(direct: Path, converted: Path, mesh: Mesh, dtype: str | None) -> None:
    ours, theirs = (
        jax.tree_util.tree_leaves_with_path(load_all(folder, mesh, dtype)) for folder in (direct, converted)
    )
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        assert (a.dtype, a.sharding) == (b.dtype, b.sharding), path
        for shard, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert shard.index == other.index
            np.testing.assert_array_equal(bits(shard.data), bits(other.data), err_msg=str(path))


def bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


@pytest.mark.slow
@pytest.mark.torch
@EACH
@pytest.mark.parametrize("variant", variants())
def test_models(variant: str, dtype: str, source: Get, converted: Get, devices: Mesh):
    if variant == "v3-fp8" and devices.size > 1:  # its sizes are no multiples of blocks
        with pytest.raises(ConfigError, match="inside a block"):
            load_params(open_checkpoint(source(variant)), devices, dtype)
    else:
        assert_same(source(variant), converted(variant), devices, dtype)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts(name: str, dtype: str, tmp_path: Path, devices: Mesh):
    folder = tiny_draft(tmp_path / "hf", **DRAFTS[name])
    assert_same(folder, convert_checkpoint(folder, tmp_path / "out"), devices, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_models(name: str, tmp_path: Path, mesh: Mesh):
    folder = resolve_model(name)
    assert_same(folder, convert_checkpoint(folder, tmp_path / "out"), mesh, None)


@pytest.mark.torch
@pytest.mark.parametrize(("dtype", "stored"), [("float16", np.float16), ("bfloat16", np.float32)])
def test_tensors_of_another_dtype_than_the_models(dtype: str, stored: Any, source: Get, tmp_path: Path, mesh: Mesh):
    """float16 widens to float32; float32 tensors of a bfloat16 model are rounded before they are widened again."""
    folder = shutil.copytree(source("v3"), tmp_path / "in")
    edit_config(folder, torch_dtype=dtype)
    edit_tensors(folder, add={name: t.astype(stored) for name, t in tensors(folder).items()})
    assert_same(folder, convert_checkpoint(folder, tmp_path / "out"), mesh, "float32")


@pytest.mark.torch
def test_the_dtype_defaults_to_what_conversion_stores(source: Get, mesh: Mesh):
    for variant, dtype in [("llama", np.float32), ("v3-fp8", ml_dtypes.bfloat16)]:
        _, params = load_params(open_checkpoint(source(variant)), mesh)
        assert params["embed"]["weight"].dtype == dtype
