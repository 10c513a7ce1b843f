"""Dequantising DeepSeek's block-scaled FP8 weights.

`X.weight` float8_e4m3fn [out, in] comes with `X.weight_scale_inv` float32 [ceil(out/128), ceil(in/128)]. In spite of
its name the scale is multiplied: W = float32(w8) * scale[block] (DeepSeek-V3's README_WEIGHTS.md).
"""

import ml_dtypes
import numpy as np

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"

# float32 of every e4m3 code: a lookup is several times faster than converting element by element.
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight [out, in]; the last block of either axis may be partial."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantise(weight: np.ndarray, scale: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
    """float8_e4m3fn [out, in] and float32 scales [ceil(out/128), ceil(in/128)] -> bfloat16 [out, in].

    Goes by rows of blocks, so that no float32 copy of the whole weight exists.

    Args:
        into: C-contiguous, of the weight's size in any shape: it is filled and returned if it is bfloat16.
    """
    codes = weight.view(np.uint8)
    result = into
    if result is None or result.dtype != ml_dtypes.bfloat16:
        result = np.empty(weight.shape, ml_dtypes.bfloat16)
    out = result.reshape(weight.shape)
    for block, row_scale in enumerate(scale):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        out[rows] = _E4M3[codes[rows]] * np.repeat(row_scale, BLOCK)[: weight.shape[1]]
    return result
