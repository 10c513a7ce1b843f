"""The models that are measured: published and tiny shapes with random weights, or those of a folder."""

from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from bench.harness.shapes import SHAPES
from jaxspec.errors import ConfigError
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.loading.parts import MTP
from jaxspec.loading.quantise import Quantization, scheme_for
from jaxspec.loading.resolve import resolve_model
from jaxspec.models.cache import KVCacheDtype, cache_stored_as
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.mtp import NextN
from jaxspec.models.params import TENSOR_AXIS, ModuleT, declarations, quantised, random_params, schemes_of
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
    """The config.json of one of `SHAPES`, with another number of layers if that is given.

    With fewer than it has, only the first layer is dense, so that a few layers of DeepSeek-V3 are not all dense.
    """
    hf = dict(SHAPES[name])
    if layers and layers < hf["num_hidden_layers"]:
        hf |= {"first_k_dense_replace": 1} if hf.get("first_k_dense_replace", 0) > 1 else {}
    hf |= {"num_hidden_layers": layers} if layers else {}
    if linear := hf.get("linear_attn_config"):
        # Lists of layers, counted from 1.
        cut = {
            key: [i for i in linear[key] if i <= hf["num_hidden_layers"]] for key in ("kda_layers", "full_attn_layers")
        }
        hf["linear_attn_config"] = linear | cut
    return hf


def check_layers(name: str, layers: int | None) -> None:
    """Raises:

    ConfigError: another number of layers is asked of a model that has weights.
    """
    if layers and name not in SHAPES:
        raise ConfigError(
            f"--layers {layers} is for random models, and {name} has the layers that it has: "
            "jaxspec bench step_vllm make --layers writes a folder with fewer"
        )


def quantization_of(weights: Weights) -> dict[str, list[str]]:
    """The schemes that the weights of a target and of its draft are in: none where all are unquantised."""
    modules = {"target": weights.model, **({"draft": weights.draft[0]} if weights.draft else {})}
    return {name: sorted({str(s) for s in schemes_of(cast(nnx.Module, m)).values()}) for name, m in modules.items()}


def as_recorded(name: str) -> str:
    """A model's name in records' file names: where a folder lies does not matter there."""
    return name if name in (*SHAPES, "demo") else "folder"


def declare(
    hf: dict[str, Any],
    dtype: np.dtype,
    *,
    quantization: Quantization = "bf16",
    kv_cache_dtype: KVCacheDtype = "auto",
    with_draft: bool = True,
) -> tuple[CausalLM, NextN | None]:
    """The model of a config.json and its NextN layer if it has one, without parameters.

    Args:
        quantization: what `jaxspec convert` would put an unquantised checkpoint into; "auto" leaves it.
    """

    def as_asked(module: ModuleT) -> ModuleT:
        found = {}
        for path, variable in declarations(module).items():
            metadata = variable.get_metadata()
            scheme = scheme_for(quantization, metadata["axes"])
            if metadata["quantisable"] and scheme:
                found[path] = scheme
        return cache_stored_as(quantised(module, found), kv_cache_dtype)

    config = read_config(hf)
    has_draft = with_draft and config.nextn_layers
    return as_asked(CausalLM(config, dtype)), as_asked(NextN(config, dtype)) if has_draft else None


def draw(
    hf: dict[str, Any],
    mesh: Mesh,
    dtype: np.dtype,
    *,
    quantization: Quantization = "bf16",
    kv_cache_dtype: KVCacheDtype = "auto",
    with_draft: bool = True,
) -> Weights:
    """Random parameters of what `declare` gives, each device's part drawn on that device."""
    model, nextn = declare(hf, dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype, with_draft=with_draft)
    return Weights(model, random_params(model, mesh), (nextn, random_params(nextn, mesh, 1)) if nextn else None)


def load(name: str, mesh: Mesh, dtype: np.dtype, *, with_draft: bool = True) -> Weights:
    """The weights of a model, with its NextN layer if it has one.

    Raises:
        ModelFormatError: there is no such model, or it cannot be read.
    """
    checkpoint = open_checkpoint(resolve_model(name))
    model, params = load_params(checkpoint, mesh, dtype)
    has_draft = with_draft and MTP in checkpoint.parts
    return Weights(model, params, load_nextn(checkpoint, mesh, dtype) if has_draft else None)
