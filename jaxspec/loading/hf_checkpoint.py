"""A Hugging Face folder as a checkpoint: each parameter is made from its tensors as the family's key map says.

Opening it reads configurations and the shards' headers only, and raises every error that they show. Loading reads
tensors in parallel, most of them straight into their place in a parameter: see `jaxspec.loading.ahead`.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.errors import ModelFormatError, shown
from jaxspec.loading.ahead import THREADS, Unread, Work, empty, placed_in_order
from jaxspec.loading.hf_folder import read_hf_config
from jaxspec.loading.key_check import check
from jaxspec.loading.parts import DRAFT, MTP, PartTargets, draft_part_of, parts_of
from jaxspec.loading.safetensors_reader import SafetensorsReader
from jaxspec.models.decoder import CausalLM
from jaxspec.models.eagle3 import EAGLE3_HARMLESS, Eagle3, check_d2t, eagle3_key_map, is_eagle3, read_eagle3_config
from jaxspec.models.fields import section
from jaxspec.models.keymap import KeyMap, ParamPath, Pieces, fill
from jaxspec.models.mtp import NextN
from jaxspec.models.params import declarations
from jaxspec.models.registry import family_of, read_config


@dataclass(frozen=True, eq=False)
class ParamSource:
    """How one parameter is made. `dtype` is what converted folders store it in."""

    pieces: Pieces
    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


Parts = dict[str, dict[ParamPath, ParamSource]]


class HFCheckpoint:
    """A Hugging Face folder of a model or of an EAGLE3 draft. A `Checkpoint`.

    Attributes:
        hf: its config.json.
        reader: its tensors.
        dtype: of the parameters before a loader casts them: bfloat16 for bfloat16 models, else float32. Converted
            folders store this dtype, so both load to the same bits.
        sources: part -> path in the part -> how the parameter is made, in model order.

    Raises:
        ModelFormatError: the folder holds no model or draft that is supported, or its tensors are not those that its
            config.json asks for.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.hf = read_hf_config(folder)
        is_draft = is_eagle3(self.hf)
        config = read_eagle3_config(self.hf).model if is_draft else read_config(self.hf)
        _check_quantisation(self.hf)
        self.reader = SafetensorsReader(folder)
        # bfloat16 would round float16's values; float32 holds them.
        self.dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
        if is_draft:
            self.sources, ignore = _draft_sources(self.hf, self.reader, self.dtype), EAGLE3_HARMLESS
        else:
            self.sources, ignore = _model_sources(self.hf, self.reader, self.dtype), family_of(config).harmless(config)
        maps = [{path: s.pieces for path, s in part.items()} for part in self.sources.values()]
        check(maps, self.reader.tensors, ignore)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.sources)

    def read_parts(self, targets: Mapping[str, PartTargets]) -> Iterator[tuple[str, dict[ParamPath, jax.Array]]]:
        """The parameters of parts, in order, under the targets' shardings and dtypes.

        Host memory holds about as much as the largest part beside what has been placed.
        """
        unread = [
            Unread(source.nbytes, functools.partial(self._begin, source), target)
            for part, inner in targets.items()
            for path, target in inner.items()
            for source in (self.sources[part][path],)
        ]
        most = max(sum(self.sources[part][path].nbytes for path in inner) for part, inner in targets.items())
        placed = placed_in_order(unread, most)
        for part, inner in targets.items():
            yield part, {path: next(placed) for path in inner}

    def assemble(self, part: str, path: ParamPath) -> np.ndarray:
        """One parameter in the dtype that a converted folder stores."""
        value, work = self._begin(self.sources[part][path])
        with ThreadPoolExecutor(THREADS) as pool:
            for filled in [pool.submit(each) for each in work]:
                filled.result()
        return value

    def _begin(self, source: ParamSource) -> tuple[np.ndarray, Sequence[Work]]:
        value = empty(source.shape, source.dtype)
        return value, [functools.partial(fill, piece, value, self.reader.read) for piece in source.pieces]

    def num_parameters(self, part: str) -> int:
        return sum(math.prod(source.shape) for source in self.sources[part].values())

    def converted_bytes(self, part: str) -> int:
        """The size of a part's parameters in a converted folder."""
        return sum(source.nbytes for source in self.sources[part].values())

    def source_bytes(self, part: str) -> int:
        """The size of the tensors that a part is made from."""
        names = {piece.name for source in self.sources[part].values() for piece in source.pieces}
        return sum(self.reader.tensors[name].nbytes for name in names)


def _check_quantisation(hf: dict[str, Any]) -> None:
    quantisation = section(hf, "quantization_config")
    method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size", [128, 128])
    if not quantisation or (method, block) == ("fp8", [128, 128]):
        return
    if method == "mxfp4":
        raise ModelFormatError(
            "quantization 'mxfp4' is not supported yet: it comes with quantised weights. Use a bfloat16 copy, which "
            "transformers makes: from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True)).save_pretrained"
        )
    if (packed := quantisation.get("format")) is not None:  # of compressed-tensors; INT4 is "pack-quantized"
        raise ModelFormatError(
            f"quantization {shown(method)} in the format {shown(packed)} is not supported; use a bfloat16 copy of the "
            "model, or one in FP8 ('fp8' with blocks [128, 128])"
        )
    raise ModelFormatError(
        f"quantization {shown(method)} with blocks {shown(block)} is not supported "
        "(supported: 'fp8' with blocks [128, 128])"
    )


def _sources(model: CausalLM | NextN | Eagle3, pieces: KeyMap) -> dict[ParamPath, ParamSource]:
    out = {}
    for path, variable in declarations(model).items():
        value = variable.get_value()
        out[path] = ParamSource(pieces[path], value.shape, value.dtype)
    return out


def _model_sources(hf: dict[str, Any], reader: SafetensorsReader, dtype: str) -> Parts:
    config = read_config(hf)
    parts = parts_of(_sources(CausalLM(config, np.dtype(dtype)), family_of(config).key_map(config)))
    # A model that was saved with transformers keeps the NextN layer in its config and loses the layer's weights.
    if config.nextn_layers:
        keys = family_of(config).nextn_key_map(config)
        if any(piece.name in reader.tensors for pieces in keys.values() for piece in pieces):
            parts[MTP] = _sources(NextN(config, np.dtype(dtype)), keys)
    return parts


def _draft_sources(hf: dict[str, Any], reader: SafetensorsReader, dtype: str) -> Parts:
    """The parts of an EAGLE3 draft.

    Raises:
        ModelFormatError: a reduced vocabulary without its map or with a wrong one.
    """
    config = read_eagle3_config(hf)
    own_head = "lm_head.weight" in reader.tensors
    if config.reduced:
        if missing := [name for name in ("d2t", "lm_head.weight") if name not in reader.tensors]:
            raise ModelFormatError(
                f"the draft proposes {config.draft_vocab_size} of {config.model.vocab_size} tokens, but its checkpoint "
                f"lacks {missing[0]}"
            )
        if reader.tensors["d2t"].shape == (config.draft_vocab_size,):  # else the check of shapes names both
            check_d2t(reader.read("d2t"), config.model.vocab_size)
    elif "d2t" in reader.tensors and reader.read("d2t").any():
        raise ModelFormatError("the draft proposes the whole vocabulary, but its d2t maps tokens to others")
    own = {"own_embedding": "embed_tokens.weight" in reader.tensors, "own_head": own_head}
    model = Eagle3(config, np.dtype(dtype), capture=tuple(range(config.num_captured)), **own)
    parts: Parts = {DRAFT: {}}
    for path, source in _sources(model, eagle3_key_map(config, names=reader.tensors, **own)).items():
        parts.setdefault(draft_part_of(path), {})[path] = source
    return parts
