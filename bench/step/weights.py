"""The weights of `bench step`: drawn, or those of a model."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.loading.parts import MTP
from jaxspec.loading.resolve import resolve_model
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mtp import NextN
from jaxspec.models.params import random_params
from jaxspec.models.registry import read_config


@dataclass(frozen=True)
class Weights:
    """A target with its parameters on the device, and its NextN layer likewise; None where it has none."""

    model: CausalLM
    params: dict
    draft: tuple[NextN, dict] | None


def draw(hf: dict[str, Any], mesh: Mesh, dtype: np.dtype) -> Weights:
    """Random parameters, with a NextN layer."""
    model = CausalLM(read_config(hf), dtype)
    nextn = NextN(model.config, dtype)
    return Weights(model, random_params(model, mesh), (nextn, random_params(nextn, mesh, 1)))


def load(name: str, mesh: Mesh, dtype: np.dtype) -> Weights:
    """Those of a model, with its NextN layer where it has one.

    Raises:
        ModelFormatError: there is no such model, or it cannot be read.
    """
    checkpoint = open_checkpoint(resolve_model(name))
    model, params = load_params(checkpoint, mesh, dtype)
    return Weights(model, params, load_nextn(checkpoint, mesh, dtype) if MTP in checkpoint.parts else None)
