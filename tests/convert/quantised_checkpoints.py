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


def _groups(weight: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The weight as [out, groups, size], and the largest of each group, [out, groups, 1]."""
    grouped = weight.reshape(len(weight), -1, size)
    return grouped, np.abs(grouped).max(axis=2, keepdims=True)


def int4_words(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """Symmetric, groups of 32: eight codes plus 8 in an int32, the first one in its lowest bits."""
    grouped, largest = _groups(weight, 32)
    scale = (largest / 7.5).astype(ml_dtypes.bfloat16)
    codes = np.clip(np.rint(grouped / scale.astype(np.float32)), -8, 7)
    eights = (codes + 8).astype(np.uint32).reshape(len(weight), -1, 8)
    words = sum(eights[:, :, j] << np.uint32(4 * j) for j in range(8))
    stem = name.removesuffix("weight")
    parts = {
        f"{stem}weight_packed": words.view(np.int32), f"{stem}weight_scale": scale[:, :, 0],
        f"{stem}weight_shape": np.array(weight.shape, np.int64),
    }  # fmt: skip
    return parts, (codes * scale.astype(np.float32)).astype(np.float32).reshape(weight.shape)


def _e2m1(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of two codes along the last axis, the first one low, and what the codes stand for."""
    codes = np.clip(numbers, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    nibbles = codes.view(np.uint8) & 15
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, codes.astype(np.float32)


def nvfp4(*, reciprocal: bool) -> Write:
    """ModelOpt's names or, with reciprocals of the global scale, those of compressed-tensors."""

    def write(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        grouped, largest = _groups(weight, 16)
        factor = np.float32(np.abs(weight).max() / (6 * 448))
        stored = np.float32(1) / factor if reciprocal else factor
        factor = np.float32(1) / stored if reciprocal else factor
        scale = (largest / 6 / factor).astype(E4M3)
        pairs, value = _e2m1(grouped / (scale.astype(np.float32) * factor))
        stem = name.removesuffix("weight")
        codes_name, scale_name = (
            ("weight_packed", "weight_global_scale") if reciprocal else ("weight", "weight_scale_2")
        )
        parts = {
            stem + codes_name: pairs.reshape(len(weight), -1), f"{stem}weight_scale": scale[:, :, 0],
            stem + scale_name: np.array([stored] if reciprocal else stored, np.float32),
            f"{stem}{'input_global_scale' if reciprocal else 'input_scale'}": np.ones(1, np.float32),
        }  # fmt: skip
        return parts, (value * scale.astype(np.float32) * factor).reshape(weight.shape)

    return write


def _mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes [out, in / 2], biased exponents [out, in / 32] and values; exponents as the OCP specification, 6.3."""
    grouped, largest = _groups(weight, 32)
    exponent = np.floor(np.log2(largest)) - 2
    pairs, value = _e2m1(grouped / 2.0**exponent)
    value = (value * 2.0**exponent).astype(np.float32).reshape(weight.shape)
    return pairs.reshape(len(weight), -1), (exponent[:, :, 0] + 127).astype(np.uint8), value


def mxfp4(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    pairs, exponents, value = _mxfp4(weight)
    stem = name.removesuffix("weight")
    return {f"{stem}weight_packed": pairs, f"{stem}weight_scale": exponents}, value


def mxfp4_stacked(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """gpt-oss's: all experts in one tensor, stored [out, in] where unquantised copies have [in, out]."""
    E, inputs, out = weight.shape
    pairs, exponents, value = _mxfp4(weight.swapaxes(1, 2).reshape(E * out, inputs))
    parts = {
        f"{name}_blocks": pairs.reshape(E, out, inputs // 32, 16), f"{name}_scales": exponents.reshape(E, out, inputs // 32),
    }  # fmt: skip
    return parts, value.reshape(E, out, inputs).swapaxes(1, 2)


def ct_config(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True} | weights}},
    }  # fmt: skip


_DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_FLOAT4 = {"type": "float", "num_bits": 4, "strategy": "group"}
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
    "ct-int4": (ct_config(type="int", num_bits=4, strategy="group", group_size=32), int4_words, "int4_g32"),
    "ct-nvfp4": (ct_config(**_FLOAT4, group_size=16), nvfp4(reciprocal=True), "nvfp4"),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(reciprocal=False), "nvfp4"),
    "ct-mxfp4": (ct_config(**_FLOAT4, group_size=32), mxfp4, "mxfp4"),
}  # fmt: skip

GPT_OSS = {"gpt-oss": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4_stacked, "mxfp4")}


def raw_tensors(folder: Path) -> Tensors:
    """As they are stored, in dtypes that the safetensors library has no NumPy name for too."""
    reader = SafetensorsReader(folder)
    return {name: reader.read(name) for name in reader.tensors}


def quantise(source: Path, out: Path, kind: str, chosen: Callable[[str], bool]) -> tuple[Path, Path]:
    """Copies of a float32 checkpoint: `chosen` weights in a format, and as the float32 that they then stand for."""
    quantisation, write, _ = (FORMATS | GPT_OSS)[kind]
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
