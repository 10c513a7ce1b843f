"""How checkpoints store quantised weights: which tensors one consists of, and their codes and scales.

A weight is known by the name under which an unquantised checkpoint would have it. What it is stored in is read off its own
tensors, whatever config.json says of the model, so layers that a publisher left out, and drafts, need no rule.

Sources: DeepSeek-V3's README_WEIGHTS.md; compressed-tensors (quantization/quant_scheme.py, compressors/); ModelOpt
(torch/export/unified_export_hf.py, torch/quantization/qtensor/); gpt-oss's model card.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxspec.errors import ModelFormatError
from jaxspec.loading.safetensors_reader import FP8, TensorInfo
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL, INT4_G32, MXFP4, NVFP4, Scheme

_NUMBERS = ("F32", "BF16", "F16", "F8_E8M0")
# Beside a weight, by what its name has instead of "weight". Activations are not quantised, so their scales are unread.
_UNREAD = ("input_scale", "input_scale_inv", "input_global_scale", "weight_shape")
_REFUSED = {
    "weight_zero_point": "zero points", "weight_g_idx": "an order of activations (g_idx)",
    "qweight": "GPTQ or AWQ", "qzeros": "GPTQ or AWQ", "g_idx": "an order of activations (g_idx)",
    "pre_quant_scale": "scales of activations by column (AWQ)",
}  # fmt: skip

# Scales of a quantised KV cache, measured by a publisher. The cache here has the type of activations, or codes with scales of
# their own; a key is what it is whatever it would have been divided by before it was rounded and multiplied by after.
_OF_CACHE = re.compile(r"(.*\.)?([kv]_scale|[kv]_proj\.output_scale)")

# Gives the tensor of a name, in its stored dtype; see `SafetensorsReader.read`.
ReadTensor = Callable[[str, np.ndarray | None], np.ndarray]
Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight in a checkpoint.

    Attributes:
        codes, scale, factor: the names of its tensors.
        shape: of the weight as key maps have it: [out, in], or [experts, in, out] if `turned`.
        unread: names of tensors that belong to it and are not needed.
        turned: unquantised checkpoints store it the other way round.
        reciprocal: what is stored is 1 / factor.
    """

    scheme: Scheme
    codes: str
    scale: str
    shape: tuple[int, ...]
    unread: tuple[str, ...] = ()
    factor: str | None = None
    turned: bool = False
    reciprocal: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """All that it consists of."""
        return (self.codes, self.scale, *([self.factor] if self.factor else []), *self.unread)

    def read_codes(self, read: ReadTensor, into: np.ndarray | None = None) -> np.ndarray:
        """As the scheme has the codes of a weight [*stack, out, in]."""
        if self.scheme.values == "e4m3":
            return read(self.codes, into)
        pairs = read(self.codes, None).view(np.uint8)
        if self.scheme.values == "int4":  # stored plus 8: the same bits as two's complement, but for the first
            pairs = pairs ^ np.uint8(0x88)
        return pairs.reshape(self.scheme.codes_shape(self._matrices))

    def read_scale(self, read: ReadTensor) -> np.ndarray:
        """A scale of each block, in the scheme's dtype: [*stack, blocks of out, blocks of in]."""
        stored, shape = read(self.scale, None), self.scheme.blocks(self._matrices)
        scale = stored if stored.dtype == self.scheme.scale else stored.astype(self.scheme.scale)
        return np.broadcast_to(scale.reshape(shape) if scale.size > 1 else scale.reshape(1, 1), shape)

    def read_factor(self, read: ReadTensor) -> np.ndarray:
        """A number, float32."""
        assert self.factor is not None
        factor = read(self.factor, None).astype(np.float32).reshape(())
        return np.float32(1) / factor if self.reciprocal else factor

    @property
    def _matrices(self) -> tuple[int, ...]:
        """The shape as [*stack, out, in]."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.turned else self.shape


def of_cache(name: str) -> bool:
    """Whether a tensor is a scale of a quantised KV cache, which nothing here reads: compressed-tensors' and ModelOpt's."""
    return _OF_CACHE.fullmatch(name) is not None


def find_quantised(tensors: Tensors) -> dict[str, StoredWeight]:
    """The quantised weights among a checkpoint's tensors, by the name of the weight.

    Raises:
        ModelFormatError: a weight without its scales, or with scales of another shape or dtype; a format that is not read.
    """
    for name in tensors:
        last = name.rpartition(".")[2]
        if last in _REFUSED:
            raise ModelFormatError(f"tensor {name} belongs to weights with {_REFUSED[last]}, which are not supported")
    found = dict(_packed(tensors))
    scales = {weight.scale for weight in found.values()}
    for name, info in tensors.items():
        if info.dtype == FP8 and name not in found and name not in scales:
            found[name] = _fp8(name, info, tensors)
    return found


def _packed(tensors: Tensors) -> Iterator[tuple[str, StoredWeight]]:
    """Weights of four bits, several to a byte or word."""
    for name, info in tensors.items():
        stem, _, last = name.rpartition(".")
        stem = f"{stem}." if stem else ""
        if last == "weight_packed" and info.dtype == "I32":
            yield f"{stem}weight", _four_bits(INT4_G32, tensors, name, f"{stem}weight_scale", 8, ("BF16", "F16", "F32"))
        elif last == "weight_packed" and f"{stem}weight_global_scale" in tensors:
            weight = _four_bits(NVFP4, tensors, name, f"{stem}weight_scale", 2, (FP8,), f"{stem}weight_global_scale")
            yield f"{stem}weight", weight
        elif last == "weight_packed":
            yield f"{stem}weight", _four_bits(MXFP4, tensors, name, f"{stem}weight_scale", 2, ("U8", "F8_E8M0"))
        elif last == "weight" and f"{stem}weight_scale_2" in tensors:
            yield name, _four_bits(NVFP4, tensors, name, f"{stem}weight_scale", 2, (FP8,), f"{stem}weight_scale_2")
        elif last == "weight" and info.dtype == "U8" and f"{stem}weight_scale" in tensors:
            yield name, _four_bits(MXFP4, tensors, name, f"{stem}weight_scale", 2, ("U8",))
        elif last.endswith("_blocks") and info.dtype == "U8" and len(info.shape) == 4:
            name_of = name.removesuffix("_blocks")
            yield name_of, _four_bits(MXFP4, tensors, name, f"{name_of}_scales", 2, ("U8",), turned=True)


def _four_bits(
    scheme: Scheme,
    tensors: Tensors,
    codes: str,
    scale: str,
    in_one: int,
    scale_dtypes: Collection[str],
    factor: str | None = None,
    *,
    turned: bool = False,
) -> StoredWeight:
    """`in_one`: codes in one element of the packed tensor."""
    packed = tensors[codes]
    if missing := [name for name in (scale, factor) if name is not None and name not in tensors]:
        raise ModelFormatError(f"tensor {codes} holds codes of {scheme} and {missing[0]} is missing")
    # gpt-oss has an axis for the blocks, [experts, out, blocks, bytes].
    *stack, out, elements = (*packed.shape[:-2], packed.shape[-2] * packed.shape[-1]) if turned else packed.shape
    matrices = (*stack, out, elements * in_one)
    dtype = {8: "I32", 2: "U8"}[in_one]
    if packed.dtype != dtype or len(matrices) != (3 if turned else 2) or matrices[-1] % (scheme.columns or 1):
        raise ModelFormatError(
            f"tensor {codes} is {packed.dtype} {list(packed.shape)}; codes of {scheme} are {dtype}, {in_one} in one, "
            f"and groups of {scheme.columns} of them have one scale"
        )
    info = tensors[scale]
    if info.dtype not in scale_dtypes or info.shape != scheme.blocks(matrices):
        raise ModelFormatError(
            f"tensor {scale} is {info.dtype} {list(info.shape)}; scales of {list(matrices)} in {scheme} are "
            f"{' or '.join(scale_dtypes)} {list(scheme.blocks(matrices))}"
        )
    if factor is not None and (tensors[factor].dtype != "F32" or tensors[factor].shape not in ((), (1,))):
        raise ModelFormatError(f"tensor {factor} is no F32 number")
    stem = codes.rpartition(".")[0]
    unread = () if turned else tuple(name for other in _UNREAD if (name := f"{stem}.{other}") in tensors)
    shape = (*stack, matrices[-1], out) if turned else matrices
    reciprocal = factor is not None and factor.endswith("weight_global_scale")
    return StoredWeight(scheme, codes, scale, shape, unread, factor, turned=turned, reciprocal=reciprocal)


def _fp8(name: str, info: TensorInfo, tensors: Tensors) -> StoredWeight:
    if len(info.shape) != 2:
        raise ModelFormatError(
            f"tensor {name} is {FP8} {list(info.shape)}: only matrices are read in FP8, each expert in tensors of its own; "
            "use a copy of the model that has them so, or one in bfloat16"
        )
    stem = name.removesuffix("weight")
    names = [f"{name}_scale_inv", f"{name}_scale", *([f"{stem}scale"] if stem != name else [])]
    scale_name = next((scale for scale in names if scale in tensors), None)
    if scale_name is None:
        raise ModelFormatError(f"tensor {name} is {FP8} and its scales {names[0]} are missing")
    scale = tensors[scale_name]
    per_block, per_row = (scheme.scale_shape(info.shape) for scheme in (FP8_BLOCK, FP8_CHANNEL))
    of_modelopt = (per_block[0], 1, per_block[1], 1)
    if scale.dtype in _NUMBERS and scale.shape in (per_block, of_modelopt):
        scheme = FP8_BLOCK
    elif scale.dtype in _NUMBERS and scale.shape in (per_row, (*per_row, 1), (1,), ()):
        scheme = FP8_CHANNEL
    else:
        raise ModelFormatError(
            f"tensor {scale_name} is {scale.dtype} {list(scale.shape)}; scales of {list(info.shape)} are "
            f"{', '.join(_NUMBERS)} {list(per_block)} for blocks of 128 x 128, one for each row, or one"
        )
    unread = tuple(other for last in _UNREAD if (other := stem + last) in tensors and stem != name)
    return StoredWeight(scheme, name, scale_name, info.shape, unread)
