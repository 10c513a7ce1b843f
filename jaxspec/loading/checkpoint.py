"""The weights of a converted folder: one Orbax checkpoint per part, written and read part by part.

    manifest.json, config.json, generation_config.json, tokenizer files
    weights/embed, weights/000, weights/001, ..., weights/head, weights/mtp

A converted EAGLE3 draft has the part weights/draft instead, and embed and head where it brings its own. A part holds
the parameters of one layer (or the embedding, or final norm and head, or the NextN layer) under the names
of `jaxspec.models`, so that a loader holds one part at a time beside what it has placed on the devices.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from convert.keymaps import ParamPath
from jaxspec.errors import ModelFormatError
from jaxspec.loading.converted import read_part
from jaxspec.loading.hf_folder import eos_token_ids, read_hf_config
from jaxspec.loading.manifest import read_manifest
from jaxspec.loading.parts import MTP, parts_of
from jaxspec.models.config import ModelConfig, read_config
from jaxspec.models.decoder import CausalLM
from jaxspec.models.eagle3 import is_eagle3
from jaxspec.models.mtp import NextN
from jaxspec.models.params import nest, with_shardings


def read_model_config(folder: Path) -> ModelConfig:
    """The model configuration of a converted (or Hugging Face) folder, with the merged end-of-sequence ids."""
    hf = read_hf_config(folder)
    if is_eagle3(hf):
        raise ModelFormatError(
            f"{folder} is an EAGLE3 draft, not a model: name it as speculative_model beside its model"
        )
    return dataclasses.replace(read_config(hf), eos_token_ids=eos_token_ids(folder))


def load_params(folder: Path, mesh: Mesh, dtype: Any = None) -> tuple[CausalLM, dict[str | int, Any]]:
    """The target model of a converted folder, and its parameters on `mesh` as a nested dict.

    Args:
        dtype: of the parameters; parameters that the model declares float32 stay float32. None: as stored.

    Raises:
        ModelFormatError: not a converted folder, or a damaged one.
        ConfigError: the mesh does not divide the model.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    model = CausalLM(read_model_config(folder), np.dtype(dtype or manifest.dtype))
    targets = with_shardings(model, mesh)
    flat: dict[ParamPath, jax.Array] = {}
    for part, inner in parts_of({path: path for path in targets}).items():
        values = read_part(folder, part, {p: targets[path] for p, path in inner.items()})
        flat |= {inner[p]: value for p, value in values.items()}
    return model, nest(flat)


def load_nextn(folder: Path, mesh: Mesh, dtype: Any = None) -> tuple[NextN, dict[str | int, Any]]:
    """The NextN (MTP) layer of a converted folder, as `load_params` returns the target.

    Raises:
        ModelFormatError: the folder has none.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if MTP not in manifest.parts:
        raise ModelFormatError(f"{folder} has no NextN (MTP) layer")
    model = NextN(read_model_config(folder), np.dtype(dtype or manifest.dtype))
    return model, nest(read_part(folder, MTP, with_shardings(model, mesh)))
