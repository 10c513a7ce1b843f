"""How checkpoints store quantised weights: which tensors one consists of, and their codes and scales.

A weight is known by the name under which an unquantised checkpoint would have it. What it is stored in is read off its own
tensors, whatever config.json says of the model, so layers that a publisher left out, and drafts, need no rule.

Sources: DeepSeek-V3's README_WEIGHTS.md; compressed-tensors (quantization/quant_scheme.py and compressors/).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxspec.errors import ModelFormatError
from jaxspec.loading.safetensors_reader import FP8, TensorInfo
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL, Scheme

# Names of the scales of `X.weight`, the first two after its whole name.
_SCALES = ("weight_scale_inv", "weight_scale", "scale")
# A scale is a number, in any of these; E8M0 holds powers of two.
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
# What static activation schemes add: weights do not need it.
_UNREAD = ("input_scale", "input_scale_inv", "input_global_scale")
_WEIGHT = "weight"

# Gives the tensor of a name, in its stored dtype; see `SafetensorsReader.read`.
ReadTensor = Callable[[str, np.ndarray | None], np.ndarray]


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight in a checkpoint.

    Attributes:
        codes, scale: the names of its tensors.
        shape: of the weight.
        unread: names of tensors that belong to it and are not needed.
    """

    scheme: Scheme
    codes: str
    scale: str
    shape: tuple[int, ...]
    unread: tuple[str, ...] = ()

    def read_codes(self, read: ReadTensor, into: np.ndarray | None = None) -> np.ndarray:
        """[out, in], in the scheme's dtype."""
        return read(self.codes, into)

    def read_scale(self, read: ReadTensor) -> np.ndarray:
        """A scale of each block, in the scheme's dtype: [blocks of out, blocks of in]."""
        scale = read(self.scale, None).astype(self.scheme.scale)
        shape = blocks(self.scheme, self.shape)
        return np.broadcast_to(scale.reshape(shape) if scale.size > 1 else scale.reshape(1, 1), shape)


def blocks(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks of a weight [out, in] along both axes."""
    out, inputs = shape
    return -(-out // scheme.rows), -(-inputs // (scheme.columns or inputs))


def find_quantised(tensors: Mapping[str, TensorInfo]) -> dict[str, StoredWeight]:
    """The quantised weights among a checkpoint's tensors, by the name of the weight.

    Raises:
        ModelFormatError: a weight without its scales, or with scales of another shape or dtype.
    """
    return {name: _fp8(name, info, tensors) for name, info in tensors.items() if info.dtype == FP8}


def _fp8(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> StoredWeight:
    stem = name.removesuffix(_WEIGHT)
    names = [f"{name}{_SCALES[0].removeprefix(_WEIGHT)}", *(stem + scale for scale in _SCALES)]
    scale_name = next((scale for scale in names if scale in tensors), None)
    if scale_name is None:
        raise ModelFormatError(f"tensor {name} is {FP8} and its scales {names[0]} are missing")
    scale = tensors[scale_name]
    per_block, per_row = (
        scheme.scale_shape(info.shape) if len(info.shape) == 2 else None for scheme in (FP8_BLOCK, FP8_CHANNEL)
    )
    # A weight within one block has one scale: as a block's it needs one number, as rows' one for each.
    if scale.dtype in _SCALE_DTYPES and scale.shape == per_block:
        scheme = FP8_BLOCK
    elif scale.dtype in _SCALE_DTYPES and per_row and scale.shape in (per_row, (*per_row, 1), (1,), ()):
        scheme = FP8_CHANNEL
    else:
        raise ModelFormatError(
            f"tensor {scale_name} is {scale.dtype} {list(scale.shape)}; scales of {list(info.shape)} are "
            f"{', '.join(_SCALE_DTYPES)} {list(per_block or ())} for blocks of 128 x 128, one for each row, or one"
        )
    unread = tuple(stem + other for other in _UNREAD if stem + other in tensors)
    return StoredWeight(scheme, name, scale_name, info.shape, unread)
