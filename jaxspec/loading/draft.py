"""Drafts: an EAGLE3 checkpoint into a converted folder and out of it, and the choice of a draft for a target.

Everything that can be refused is refused by `plan_draft`, from configurations, before any big weights are read.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from convert.keymaps import KeyMap, ParamPath, eagle3_key_map
from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError, ModelFormatError
from jaxspec.loading.checkpoint import load_nextn
from jaxspec.loading.converted import read_part
from jaxspec.loading.hf_folder import read_hf_config
from jaxspec.loading.manifest import read_manifest
from jaxspec.loading.parts import DRAFT, EMBED, HEAD, MTP
from jaxspec.loading.safetensors_reader import SafetensorsReader
from jaxspec.loading.tokenizer_files import TOKENIZER
from jaxspec.models.config import ModelConfig
from jaxspec.models.draft import Draft
from jaxspec.models.eagle3 import (
    Eagle3,
    Eagle3Config,
    capture_layers,
    check_d2t,
    check_fit,
    is_eagle3,
    read_eagle3_config,
)
from jaxspec.models.mtp import NextN
from jaxspec.models.params import nest, with_shardings


@dataclass(frozen=True)
class DraftPlan:
    """A draft that fits its target.

    Attributes:
        name: for people.
        model: its declarations, for sizes.
        load: reads its weights onto a mesh.
    """

    name: str
    model: Draft
    load: Callable[[Mesh], tuple[Draft, dict[str | int, Any]]]


def plan_draft(
    config: EngineConfig, target_folder: Path, target: ModelConfig, dtype: str, resolve: Callable[[str], Path]
) -> DraftPlan | None:
    """The draft that the options ask for; None without speculation.

    Args:
        resolve: the converted folder of a model name.

    Raises:
        ConfigError, ModelFormatError: there is no such draft, or it cannot draft for this target.
    """
    if not config.num_speculative_tokens:
        return None
    if config.speculative_model is None:
        if config.speculative_capture_layers is not None:
            raise ConfigError("speculative_capture_layers is for EAGLE3 drafts: name one with speculative_model")
        if MTP not in read_manifest(target_folder).parts:
            raise ConfigError(
                f"num_speculative_tokens {config.num_speculative_tokens} needs a draft, and the model has no NextN (MTP) "
                "layer; name an EAGLE3 draft with speculative_model, or use 0"
            )
        return DraftPlan("MTP", NextN(target, dtype), lambda mesh: load_nextn(target_folder, mesh, dtype))

    folder = resolve(config.speculative_model)
    hf = read_hf_config(folder)
    if not is_eagle3(hf):
        raise ConfigError(
            f"speculative_model {config.speculative_model} is {', '.join(hf.get('architectures') or ['nothing known'])}, "
            "not an EAGLE3 draft"
        )
    draft = read_eagle3_config(hf)
    check_fit(draft, target)
    _check_tokenizers(folder, target_folder)
    layer_ids = config.speculative_capture_layers
    capture = capture_layers(draft.layer_ids if layer_ids is None else layer_ids, target.num_layers)
    if len(capture) != draft.num_captured:
        raise ConfigError(
            f"speculative_capture_layers names {len(capture)} layers and the draft reads {draft.num_captured}"
        )
    model = _declare(folder, draft, capture, dtype)
    return DraftPlan(
        f"EAGLE3 ({config.speculative_model})", model, lambda mesh: load_eagle3(folder, mesh, dtype, capture)
    )


def load_eagle3(folder: Path, mesh: Mesh, dtype: str, capture: tuple[int, ...]) -> tuple[Eagle3, dict[str | int, Any]]:
    """An EAGLE3 draft of a converted folder and its parameters on `mesh`, as `load_params` returns a target.

    Raises:
        ModelFormatError: not a converted draft, or a damaged one.
    """
    config = read_eagle3_config(read_hf_config(folder))
    model = _declare(folder, config, capture, dtype)
    targets = with_shardings(model, mesh)
    flat: dict[ParamPath, Any] = {}
    for part in read_manifest(folder).parts:
        flat |= read_part(folder, part, {path: target for path, target in targets.items() if part_of(path) == part})
    if config.reduced:
        check_d2t(np.asarray(flat["d2t",]), config.model.vocab_size)
    return model, nest(flat)


def _declare(folder: Path, config: Eagle3Config, capture: tuple[int, ...], dtype: str) -> Eagle3:
    parts = read_manifest(folder).parts
    return Eagle3(config, np.dtype(dtype), capture=capture, own_embedding=EMBED in parts, own_head=HEAD in parts)


def is_draft(folder: Path) -> bool:
    """Whether a folder holds an EAGLE3 draft and not a model."""
    return is_eagle3(read_hf_config(folder))


def part_of(path: ParamPath) -> str:
    """The part that a parameter of `Eagle3` is stored in."""
    return {"embed": EMBED, "head": HEAD}.get(str(path[0]), DRAFT)


def eagle3_source(hf: dict[str, Any], reader: SafetensorsReader, dtype: str) -> tuple[Eagle3, KeyMap]:
    """The module that a checkpoint fills, and from which tensors.

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
        if reader.tensors["d2t"].shape == (config.draft_vocab_size,):  # else the map of tensors names both shapes
            check_d2t(reader.read("d2t"), config.model.vocab_size)
    elif "d2t" in reader.tensors and reader.read("d2t").any():
        raise ModelFormatError("the draft proposes the whole vocabulary, but its d2t maps tokens to others")
    own = {"own_embedding": "embed_tokens.weight" in reader.tensors, "own_head": own_head}
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in reader.tensors) else "layers.0."
    model = Eagle3(config, np.dtype(dtype), capture=tuple(range(config.num_captured)), **own)
    return model, eagle3_key_map(config, prefix=prefix, **own)


def _check_tokenizers(draft: Path, target: Path) -> None:
    """Drafts rarely bring a tokenizer; one that does must give the same ids to the same texts."""
    files = [folder / TOKENIZER for folder in (draft, target)]
    if all(file.is_file() for file in files):
        ours, theirs = (json.loads(file.read_bytes())["model"].get("vocab") for file in files)
        if ours != theirs:
            raise ConfigError("the draft does not fit the model: their tokenizers have different vocabularies")
