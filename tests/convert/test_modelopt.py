"""Folders that NVIDIA's ModelOpt exports mean here what they mean to it."""

import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ModelFormatError
from jaxspec.loading.weight_reader import WeightReader

pytest.importorskip("torch", reason="the library is for PyTorch, which the tests have on Python 3.11 only")
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.slow
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
WEIGHT = "model.layers.0.mlp.gate_proj.weight"
# The library's name of a configuration -> our scheme, and its blocks by axis.
CASES = {
    "FP8_DEFAULT_CFG": ("fp8_channel", None),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": ("fp8_channel", None),
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": ("fp8_block", {0: 128, 1: 128}),
    "NVFP4_DEFAULT_CFG": ("nvfp4", {-1: 16}),
    "MXFP4_DEFAULT_CFG": ("mxfp4", {-1: 32}),
}


def export(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a tiny model that the library has quantised and written to `folder`."""
    torch.manual_seed(0)
    config = LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=1, vocab_size=64, **SIZES)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(0, 64, (2, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of our transformers, which it has not been tested with
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        quantised = mtq.quantize(model, getattr(mtq, name), lambda model: model(ids))
        export_hf_checkpoint(quantised, dtype=torch.bfloat16, export_dir=folder)
    return load_file(folder / "model.safetensors")


def dequantised(scheme: str, blocks: dict[int, int] | None, parts: dict[str, torch.Tensor]) -> np.ndarray:
    """By the library, float32."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, NVFP4QTensor

    codes, scale = parts["weight"], parts["weight_scale"]
    shape = torch.Size((codes.shape[0], codes.shape[1] * (1 if scheme.startswith("fp8") else 2)))
    kinds = {"nvfp4": NVFP4QTensor, "mxfp4": MXFP4QTensor}
    tensor = kinds.get(scheme, FP8QTensor)(shape, torch.float32, codes)
    if scheme == "fp8_block":
        scale = scale.reshape(scale.shape[0], scale.shape[2])
    if scheme == "fp8_channel":
        scale = scale.reshape(-1, 1)
    arguments = {"scale": scale, "block_sizes": blocks, "double_scale": parts.get("weight_scale_2")}
    return tensor.dequantize(torch.float32, **arguments).numpy()


@pytest.mark.parametrize("name", CASES)
def test_the_librarys_folders(name: str, tmp_path: Path):
    """Each quantised weight to the bit in bfloat16; what the library left out stays as it is."""
    scheme, blocks = CASES[name]
    tensors = export(name, tmp_path)
    reader = WeightReader(tmp_path)
    assert {str(weight.scheme) for weight in reader.quantised.values()} == {scheme}
    assert len(reader.quantised) == 7
    assert "lm_head.weight" not in reader.quantised
    stem = WEIGHT.removesuffix("weight")
    parts = {key.removeprefix(stem): tensor for key, tensor in tensors.items() if key.startswith(stem)}
    want = dequantised(scheme, blocks, parts)
    assert want.shape == (SIZES["intermediate_size"], SIZES["hidden_size"])
    assert np.isfinite(want).all()
    assert want.std() > 0.01
    np.testing.assert_array_equal(reader.read(WEIGHT), want.astype(jnp.bfloat16))


def test_scaled_activations_are_refused(tmp_path: Path):
    """Without them the weights would mean something else."""
    tensors = export("NVFP4_DEFAULT_CFG", tmp_path)
    tensors[f"{WEIGHT.removesuffix('weight')}pre_quant_scale"] = torch.ones(SIZES["hidden_size"])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match=r"pre_quant_scale belongs to weights with scales of activations"):
        WeightReader(tmp_path)
