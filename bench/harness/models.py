"""The models that are measured: published and tiny shapes with random weights, or those of a folder."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bench.harness.shapes import SHAPES
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.loading.parts import MTP
from jaxspec.loading.resolve import resolve_model
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.mtp import NextN
from jaxspec.models.params import TENSOR_AXIS, random_params
from jaxspec.models.registry import read_config


@dataclass(frozen=True)
class Weights:
    """A target with its parameters on the device, and a draft likewise; None where it has none."""

    model: CausalLM
    params: dict
    draft: tuple[Draft, dict] | None


def mesh_of_one() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))


def random_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json of one of `SHAPES`, with another number of layers if that is given."""
    hf = dict(SHAPES[name])
    return hf | {"num_hidden_layers": layers} if layers else hf


def as_recorded(name: str) -> str:
    """A model's name in records' file names: where a folder lies does not matter there."""
    return name if name in (*SHAPES, "demo") else "folder"


def draw(hf: dict[str, Any], mesh: Mesh, dtype: np.dtype, *, with_draft: bool = True) -> Weights:
    """Random parameters of a config.json, with a NextN layer if it has one."""
    model = CausalLM(read_config(hf), dtype)
    params = random_params(model, mesh)
    if not (with_draft and model.config.nextn_layers):
        return Weights(model, params, None)
    nextn = NextN(model.config, dtype)
    return Weights(model, params, (nextn, random_params(nextn, mesh, 1)))


def load(name: str, mesh: Mesh, dtype: np.dtype, *, with_draft: bool = True) -> Weights:
    """The weights of a model, with its NextN layer if it has one.

    Raises:
        ModelFormatError: there is no such model, or it cannot be read.
    """
    checkpoint = open_checkpoint(resolve_model(name))
    model, params = load_params(checkpoint, mesh, dtype)
    has_draft = with_draft and MTP in checkpoint.parts
    return Weights(model, params, load_nextn(checkpoint, mesh, dtype) if has_draft else None)
