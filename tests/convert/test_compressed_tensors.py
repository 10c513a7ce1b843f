"""Weights that the compressed-tensors library quantised and packed mean here what they mean to it."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.loading.weight_reader import WeightReader

pytest.importorskip("torch", reason="the library is for PyTorch, which the tests have on Python 3.11 only")
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

OUT, INPUTS = 256, 384
FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float"}
# Scheme of ours -> how the library names it, and the block of the weight that has one scale.
CASES = {
    "fp8_block": (FP8 | {"strategy": "block", "block_structure": [128, 128]}, (128, 128)),
    "fp8_channel": (FP8 | {"strategy": "channel"}, (1, INPUTS)),
    "fp8_channel, one scale": (FP8 | {"strategy": "tensor"}, (OUT, INPUTS)),
    "int4_g32": ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, (1, 32)),
    "nvfp4": (FP4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}, (1, 16)),
    "mxfp4": (FP4 | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}, (1, 32)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_librarys_tensors(name: str, tmp_path: Path):
    """To the bit in bfloat16, from what its own decompression gives in float32."""
    named, (height, width) = CASES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(symmetric=True, **named))
    weight = torch.from_numpy(np.random.default_rng(0).standard_t(4, (OUT, INPUTS)).astype(np.float32))
    blocks = weight.reshape(OUT // height, height, INPUTS // width, width)
    state = {"weight": weight}
    if name == "nvfp4":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    state["weight_scale"], _ = calculate_qparams(
        blocks.amin((1, 3)), blocks.amax((1, 3)), scheme.weights, state.get("weight_global_scale")
    )
    if name == "fp8_channel, one scale":
        state["weight_scale"] = state["weight_scale"].reshape(1)
    if name == "int4_g32":  # as checkpoints have it
        state["weight_scale"] = state["weight_scale"].bfloat16()
    library = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, scheme).value)
    packed = library.compress(state, scheme)
    assert ("weight" in packed) == name.startswith("fp8")
    save_file({f"a.{part}": tensor.contiguous() for part, tensor in packed.items()}, tmp_path / "model.safetensors")

    floats = {
        part: t.float() if part == "weight_scale" and t.dtype == torch.bfloat16 else t for part, t in packed.items()
    }
    want = library.decompress(floats, scheme)["weight"].float().numpy()
    reader = WeightReader(tmp_path)
    assert str(reader.quantised["a.weight"].scheme) == name.partition(",")[0]
    np.testing.assert_array_equal(reader.read("a.weight"), want.astype(jnp.bfloat16))
    error = np.linalg.norm(want - weight.numpy()) / np.linalg.norm(weight.numpy())
    assert error < (0.05 if name.startswith("fp8") else 0.2)
