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
from typing import Any, Literal

import jax
import numpy as np

from jaxspec.errors import ModelFormatError
from jaxspec.loading.ahead import THREADS, Unread, Work, empty, placed_in_order
from jaxspec.loading.hf_folder import read_hf_config
from jaxspec.loading.kept import codes_piece, factor_piece, kept_scheme, scale_piece
from jaxspec.loading.key_check import check
from jaxspec.loading.parts import DRAFT, MTP, PartTargets, draft_part_of, parts_of
from jaxspec.loading.quantisation_config import check_quantisation
from jaxspec.loading.quantise import Quantization, relative_error, scheme_for
from jaxspec.loading.weight_reader import WeightReader
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.eagle3 import EAGLE3_HARMLESS, Eagle3, check_d2t, eagle3_key_map, is_eagle3, read_eagle3_config
from jaxspec.models.keymap import KeyMap, ParamPath, Pieces, Read, as_named, fill
from jaxspec.models.mtp import NextN
from jaxspec.models.params import Schemes, declarations, dotted
from jaxspec.models.registry import family_of, read_config
from pallas_kernels.quant.schemes import Scheme


@dataclass(frozen=True, eq=False)
class ParamSource:
    """How one parameter is made.

    Attributes:
        pieces: that it or, if it is an array of a quantised weight, that weight is made of.
        dtype: what converted folders store it in.
        scheme: of the quantised weight, and which of its arrays this is.
    """

    pieces: Pieces
    shape: tuple[int, ...]
    dtype: Any
    scheme: Scheme | None = None
    array: Literal["codes", "scale", "factor"] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def parameters(self) -> int:
        """How many of the model's it holds: scales and factors are none."""
        if self.scheme is None:
            return math.prod(self.shape)
        return math.prod(self.shape) * self.scheme.packed if self.array == "codes" else 0


Parts = dict[str, dict[ParamPath, ParamSource]]


class HFCheckpoint:
    """A Hugging Face folder of a model or of an EAGLE3 draft. A `Checkpoint`.

    Args:
        quantization: "auto": weights that are stored quantised, and that the model takes so, stay as they are; "bf16": all
            are dequantised; "fp8": weights that the model takes quantised, and that the checkpoint has in none, are put
            into FP8 blocks; "int4": the same in groups of 32, routed experts only.

    Attributes:
        hf: its config.json.
        schemes: see `Checkpoint`.
        reader: its tensors.
        dtype: of the parameters before a loader casts them: bfloat16 for bfloat16 models, else float32. Converted
            folders store this dtype, so both load to the same bits.
        sources: part -> path in the part -> how the parameter is made, in model order.

    Raises:
        ModelFormatError: the folder holds no model or draft that is supported, or its tensors are not those that its
            config.json asks for.
    """

    def __init__(self, folder: Path, quantization: Quantization = "auto"):
        self.folder = folder
        self.hf = read_hf_config(folder)
        is_draft = is_eagle3(self.hf)
        config = read_eagle3_config(self.hf).model if is_draft else read_config(self.hf)
        check_quantisation(self.hf)
        self.reader = WeightReader(folder)
        self._quantization = quantization
        # bfloat16 would round float16's values; float32 holds them.
        self.dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
        if is_draft:
            self.sources, ignore = self._draft_sources(), EAGLE3_HARMLESS
        else:
            self.sources, ignore = self._model_sources(config), family_of(config).harmless(config)
        maps = [{path: s.pieces for path, s in part.items()} for part in self.sources.values()]
        check(maps, self.reader.tensors, ignore)
        self.schemes: Mapping[str, Schemes] = {
            part: {path[:-1]: s.scheme for path, s in sources.items() if s.scheme and s.array == "codes"}
            for part, sources in self.sources.items()
        }

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.sources)

    def read_parts(self, targets: Mapping[str, PartTargets]) -> Iterator[tuple[str, dict[ParamPath, jax.Array]]]:
        """The parameters of parts, in order, under the targets' shardings and dtypes.

        Host memory holds about as much as the largest part beside what has been placed.
        """
        unread = [
            Unread(source.shape, source.dtype, functools.partial(self._begin, source), target)
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
        source = self.sources[part][path]
        value = empty(source.shape, source.dtype)
        work = self._begin(source, value)
        with ThreadPoolExecutor(THREADS) as pool:
            for filled in [pool.submit(each) for each in work]:
                filled.result()
        return value

    def _begin(self, source: ParamSource, value: np.ndarray) -> Sequence[Work]:
        out, pieces = value, source.pieces
        read: Read = self.reader.read
        if source.array == "codes":
            assert source.scheme is not None
            pieces, read = tuple(codes_piece(piece, source.scheme) for piece in pieces), self.reader.read_codes
        elif source.array == "factor":
            pieces, read = tuple(map(factor_piece, pieces)), self.reader.read_factor
        elif source.scheme is not None:
            out, read = source.scheme.as_blocks(value), self.reader.read_scale
            pieces = tuple(scale_piece(piece, source.scheme) for piece in pieces)
        return [functools.partial(fill, piece, out, read) for piece in pieces]

    def rounding(self, part: str) -> dict[str, float]:
        """What quantising changed in each weight of a part that was read, by its place in a layer: see `relative_error`."""
        found = {}
        for path, source in self.sources[part].items():
            made = [self.reader.rounding[p.name] for p in source.pieces if p.name in self.reader.rounding]
            if made and source.array == "codes":
                found[dotted(path[:-1]).removeprefix("layer.")] = relative_error(made)  # drafts have one, of that name
        return found

    def num_parameters(self, part: str) -> int:
        return sum(source.parameters for source in self.sources[part].values())

    def converted_bytes(self, part: str) -> int:
        """The size of a part's parameters in a converted folder."""
        return sum(s.nbytes for s in self.sources[part].values())

    def source_bytes(self, part: str) -> int:
        """The size of the tensors that a part is made from."""
        names = {piece.name for source in self.sources[part].values() for piece in source.pieces}
        return sum(self.reader.tensors[name].nbytes for name in names)

    def _sources(self, model: CausalLM | NextN | Eagle3, pieces: KeyMap) -> dict[ParamPath, ParamSource]:
        out: dict[ParamPath, ParamSource] = {}
        for path, variable in declarations(model).items():
            value, scheme = variable.get_value(), None
            metadata = variable.get_metadata()
            if self._quantization != "bf16" and metadata["quantisable"]:
                new = scheme_for(self._quantization, metadata["axes"])
                if new and not self._any_quantised(pieces[path]):
                    self.reader.quantise([piece.name for piece in pieces[path]], new)
                scheme = kept_scheme(pieces[path], value.shape, self.reader.quantised)
            if scheme is None:
                out[path] = ParamSource(pieces[path], value.shape, value.dtype)
            else:
                for name, target in scheme.arrays(value.shape).items():
                    out[*path, name] = ParamSource(pieces[path], target.shape, target.dtype, scheme, name)
        return out

    def _any_quantised(self, pieces: Pieces) -> bool:
        return any(piece.name in self.reader.quantised for piece in pieces)

    def _model_sources(self, config: ModelConfig) -> Parts:
        model = CausalLM(config, np.dtype(self.dtype))
        names = self.reader.tensors
        parts = parts_of(self._sources(model, as_named(family_of(config).key_map(config), names)))
        # A model that was saved with transformers keeps the NextN layer in its config and loses the layer's weights.
        if config.nextn_layers:
            second = f"model.layers.{config.num_layers + 1}."
            if any(second in name for name in names):
                raise ModelFormatError(
                    f"the checkpoint has the weights of several NextN (MTP) layers ({second}* is the second one's); models "
                    "with one are supported"
                )
            keys = as_named(family_of(config).nextn_key_map(config), names)
            if any(piece.name in names for pieces in keys.values() for piece in pieces):
                parts[MTP] = self._sources(NextN(config, np.dtype(self.dtype)), keys)
        return parts

    def _draft_sources(self) -> Parts:
        """The parts of an EAGLE3 draft.

        Raises:
            ModelFormatError: a reduced vocabulary without its map or with a wrong one.
        """
        config, reader = read_eagle3_config(self.hf), self.reader
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
        model = Eagle3(config, np.dtype(self.dtype), capture=tuple(range(config.num_captured)), **own)
        parts: Parts = {DRAFT: {}}
        for path, source in self._sources(model, eagle3_key_map(config, names=reader.tensors, **own)).items():
            parts.setdefault(draft_part_of(path), {})[path] = source
        return parts
