"""FP8 checkpoints of models with linear attention, by the values that they stand for."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from convert.convert import convert_checkpoint
from jaxspec.errors import ModelFormatError
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from tests.convert.edits import edit_tensors
from tests.convert.quantised_checkpoints import E4M3, quantise
from tests.convert.test_quantised import loaded
from tests.engine.test_recurrent_states import write_folder

# Published FP8 checkpoints leave these out: small maps, convolutions, the draft's projection, embedding and head.
LEFT_OUT = ("conv1d", "in_proj_a.", "in_proj_b.", "mtp.fc.", "gate.weight", "norm", "embed_tokens", "lm_head")


def of_mlps(name: str) -> bool:
    return of_linear_maps(name) and (".mlp." in name or ".block_sparse_moe." in name)


def of_linear_maps(name: str) -> bool:
    return name.endswith(".weight") and not any(part in name for part in LEFT_OUT)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3.5", "qwen3.5-moe", "kimi-linear"])
def test_fp8_checkpoints_are_what_they_stand_for(variant: str, tmp_path: Path, mesh: Mesh):
    """MLPs stay in FP8, to the bit the values of an unquantised copy; attention of both kinds is dequantised."""
    source = Path(write_folder(tmp_path, variant))
    loads = [load_params, *([load_nextn] if variant.startswith("qwen") else [])]
    stored, plain = quantise(source, tmp_path / "mlps", "deepseek", of_mlps)
    assert any(open_checkpoint(stored).schemes.values())
    for load in loads:
        want = load(open_checkpoint(plain), mesh)[1]
        jax.tree.map(np.testing.assert_array_equal, loaded(load, stored, mesh), want)
    stored, plain = quantise(source, tmp_path / "all", "deepseek", of_linear_maps)
    everything = convert_checkpoint(stored, tmp_path / "bf16", quantization="bf16")
    for load in loads:
        want = load(open_checkpoint(plain), mesh, "bfloat16")[1]
        jax.tree.map(np.testing.assert_array_equal, load(open_checkpoint(everything), mesh, "bfloat16")[1], want)
        if load is load_params:
            got = load(open_checkpoint(stored), mesh, "bfloat16")[1]
            for layer, parts in want["layers"].items():
                jax.tree.map(np.testing.assert_array_equal, got["layers"][layer]["attention"], parts["attention"])


def test_fp8_experts_in_one_tensor_are_refused(tmp_path: Path):
    """With a scale of each block, which would have its own number for each expert."""
    folder, name = Path(write_folder(tmp_path, "qwen3.5-moe")), "model.layers.0.mlp.experts.down_proj"
    stacked = {name: np.zeros((8, 64, 40), E4M3), f"{name}_scale_inv": np.ones((8, 1, 1), np.float32)}
    edit_tensors(folder, add=stacked, remove=[f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(8)])
    with pytest.raises(ModelFormatError, match=r"down_proj is F8_E4M3 \[8, 64, 40\]: only matrices are read in FP8"):
        open_checkpoint(folder)
