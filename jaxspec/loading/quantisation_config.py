"""Refuses what config.json says of a checkpoint's quantisation and cannot be read, before any tensor is looked at.

What can be read is then read off the tensors (`jaxspec.loading.stored`), layer by layer.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ModelFormatError, shown
from jaxspec.models.fields import section

_BLOCKS = [128, 128]
_SUPPORTED = (
    "'fp8' with blocks [128, 128]; 'compressed-tensors' in FP8 with a scale of each tensor, row or block, in INT4 with one of "
    "32 inputs, in NVFP4 and MXFP4; 'modelopt' in NVFP4 and FP8; 'mxfp4'"
)
# Of compressed-tensors: type and bits of weights -> their groups, which have one scale.
_GROUPS = {("int", 4): (32,), ("float", 4): (16, 32)}


def check_quantisation(hf: Mapping[str, Any]) -> None:
    """Raises:

    ModelFormatError: a format that is not supported.
    """
    quantisation = section(hf, "quantization_config")
    if not quantisation:
        return
    method = quantisation.get("quant_method")
    if method == "fp8":
        block = quantisation.get("weight_block_size")
        if block is not None and block != _BLOCKS:
            raise _unsupported(method, f"with blocks {shown(block)}")
    elif method == "compressed-tensors":
        _check_compressed_tensors(quantisation)
    elif method == "modelopt":
        if (algorithm := quantisation.get("quant_algo")) not in ("NVFP4", "FP8"):
            raise _unsupported(method, f"in {shown(algorithm)}")
    elif method != "mxfp4":
        raise _unsupported(method)


def _unsupported(method: object, how: str = "") -> ModelFormatError:
    return ModelFormatError(
        f"quantization {shown(method)}{how and ' '}{how} is not supported (supported: {_SUPPORTED}); use a copy of the model "
        "in one of them or in bfloat16"
    )


def _check_compressed_tensors(quantisation: Mapping[str, Any]) -> None:
    groups = section(quantisation, "config_groups")
    if not groups:
        raise _unsupported("compressed-tensors", "without config_groups")
    for name in groups:
        weights = section(section(groups, name), "weights")
        if not weights:
            continue
        kind = weights.get("type"), weights.get("num_bits")
        if kind != ("float", 8) and kind not in list(_GROUPS):
            raise _unsupported("compressed-tensors", f"with weights of {shown(kind[1])} bits ({shown(kind[0])})")
        if weights.get("symmetric") is False:
            raise _unsupported("compressed-tensors", "with zero points (symmetric is false)")
        if weights.get("actorder") in ("group", True):
            raise _unsupported("compressed-tensors", "with an order of activations (g_idx)")
        if kind != ("float", 8):
            if (size := weights.get("group_size")) not in _GROUPS[kind]:
                raise _unsupported("compressed-tensors", f"with weights of 4 bits in groups of {shown(size)}")
            continue
        strategy = weights.get("strategy")
        if strategy not in ("tensor", "channel", "block"):
            raise _unsupported("compressed-tensors", f"with scales of a {shown(strategy)}")
        if strategy == "block" and weights.get("block_structure") != _BLOCKS:
            raise _unsupported("compressed-tensors", f"with blocks {shown(weights.get('block_structure'))}")
