"""Checkpoints with quantised weights, written by hand from the formats' specifications, and what they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec.loading.safetensors_reader import SafetensorsReader
from tests.convert.edits import tensors

E4M3 = ml_dtypes.float8_e4m3fn
Tensors = dict[str, np.ndarray]
# The tensors that stand for a weight float32 [out, in], and the float32 that they stand for.
Write = Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]


def _fp8(weight: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes for a scale of each element, and what they stand for."""
    codes = np.clip(weight / scale, -448, 448).astype(E4M3)
    return codes, codes.astype(np.float32) * scale


def _of_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales of blocks of 128 x 128, powers of two, and the same for each element."""
    out, inputs = weight.shape
    padded = np.zeros((-(-out // 128) * 128, -(-inputs // 128) * 128), np.float32)
    padded[:out, :inputs] = weight
    largest = np.abs(padded.reshape(-1, 128, padded.shape[1] // 128, 128)).max(axis=(1, 3))
    scale = 2.0 ** np.ceil(np.log2(np.maximum(largest, 1e-4) / 448))
    return scale.astype(np.float32), np.kron(scale, np.ones((128, 128)))[:out, :inputs].astype(np.float32)


def fp8_blocks(suffix: str = "weight_scale_inv", dtype: Any = np.float32) -> Write:
    def write(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        scale, each = _of_blocks(weight)
        codes, value = _fp8(weight, each)
        return {name: codes, name.removesuffix("weight") + suffix: scale.astype(dtype)}, value

    return write


def fp8_rows(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scale = (np.abs(weight).max(axis=1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
    codes, value = _fp8(weight, scale.astype(np.float32))
    return {name: codes, f"{name}_scale": scale}, value


def fp8_tensor(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scale = np.array([np.abs(weight).max() / 448], np.float32)
    codes, value = _fp8(weight, scale)
    return {name: codes, f"{name}_scale": scale, f"{name.removesuffix('weight')}input_scale": scale}, value


def ct_config(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True} | weights}},
    }  # fmt: skip


_DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_FLOAT8 = {"type": "float", "num_bits": 8}

# Name -> what config.json says, how a weight is written, and the scheme that it is loaded in.
FORMATS: dict[str, tuple[dict[str, Any], Write, str]] = {
    "deepseek": (_DEEPSEEK, fp8_blocks(), "fp8_block"),
    "deepseek-bf16-scales": (_DEEPSEEK, fp8_blocks(dtype=ml_dtypes.bfloat16), "fp8_block"),
    "deepseek-e8m0": (_DEEPSEEK, fp8_blocks("scale", ml_dtypes.float8_e8m0fnu), "fp8_block"),
    "ct-fp8-block": (
        ct_config(**_FLOAT8, strategy="block", block_structure=[128, 128]), fp8_blocks("weight_scale"), "fp8_block"
    ),
    "ct-fp8-channel": (ct_config(**_FLOAT8, strategy="channel"), fp8_rows, "fp8_channel"),
    "ct-fp8-tensor": (ct_config(**_FLOAT8, strategy="tensor"), fp8_tensor, "fp8_channel"),
}  # fmt: skip


def raw_tensors(folder: Path) -> Tensors:
    """As they are stored, in dtypes that the safetensors library has no NumPy name for too."""
    reader = SafetensorsReader(folder)
    return {name: reader.read(name) for name in reader.tensors}


def quantise(source: Path, out: Path, kind: str, chosen: Callable[[str], bool]) -> tuple[Path, Path]:
    """Copies of a float32 checkpoint: `chosen` weights in a format, and as the float32 that they then stand for."""
    quantisation, write, _ = FORMATS[kind]
    hf = json.loads((source / "config.json").read_text())
    stored: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors(source).items():
        if chosen(name):
            parts, plain[name] = write(name, tensor)
            stored |= parts
        else:
            stored[name] = plain[name] = tensor
    for folder, values, config in (
        (out / "stored", stored, {"quantization_config": quantisation}),
        (out / "plain", plain, {}),
    ):
        folder.mkdir(parents=True)
        save_file({name: np.ascontiguousarray(value) for name, value in values.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(hf | config))
    return out / "stored", out / "plain"
