"""The weights of `bench step`: drawn, of a converted folder, or straight from the shards of a Hugging Face folder.

The last way converts in memory, many parameters at once, and writes nothing: a benchmark reads a checkpoint once, and
one of 34 GB should not be there twice.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from convert.convert import resolve_model
from convert.keymaps import KeyMap, Pieces, assemble, harmless, key_map, nextn_key_map, nextn_prefix
from jaxspec.loading.checkpoint import load_nextn, load_params, read_model_config
from jaxspec.loading.key_check import check
from jaxspec.loading.manifest import has_manifest, read_manifest
from jaxspec.loading.parts import MTP
from jaxspec.loading.safetensors_reader import DTYPES, SafetensorsReader
from jaxspec.models.config import read_config
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mtp import NextN
from jaxspec.models.params import nest, random_params, with_shardings

# Each holds the parameter that it puts together in host memory.
THREADS = 16


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
    """A Hugging Face folder with safetensors is read directly; anything else that names a model is converted first.

    Raises:
        ModelFormatError: there is no such model, or it cannot be read.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() and not has_manifest(folder):
        return read_folder(folder, mesh, dtype)
    folder = resolve_model(name)
    model, params = load_params(folder, mesh, dtype)
    draft = load_nextn(folder, mesh, dtype) if MTP in read_manifest(folder).parts else None
    return Weights(model, params, draft)


def read_folder(folder: Path, mesh: Mesh, dtype: np.dtype) -> Weights:
    """What conversion and loading give, parameter by parameter in threads.

    Raises:
        ModelFormatError: the checkpoint does not hold what its config.json asks for.
    """
    config = read_model_config(folder)
    reader = SafetensorsReader(folder)
    has_nextn = config.num_nextn_layers and any(name.startswith(nextn_prefix(config)) for name in reader.tensors)
    model, maps = CausalLM(config, dtype), [key_map(config)]
    nextn = NextN(config, dtype) if has_nextn else None
    if nextn is not None:
        maps.append(nextn_key_map(config))
    check(maps, reader.tensors, harmless(config))
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        params = _read(model, maps[0], reader, mesh, pool)
        draft = None if nextn is None else (nextn, _read(nextn, maps[1], reader, mesh, pool))
    return Weights(model, params, draft)


def _read(module: Any, pieces: KeyMap, reader: SafetensorsReader, mesh: Mesh, pool: ThreadPoolExecutor) -> dict:
    def place(item: tuple[Any, jax.ShapeDtypeStruct]) -> jax.Array:
        path, target = item
        value = _assemble(pieces[path], target.shape, np.dtype(target.dtype), reader)
        return jax.device_put(value, target.sharding).block_until_ready()  # or all of them would wait in host memory

    targets = with_shardings(module, mesh)
    return nest(dict(zip(targets, pool.map(place, targets.items()), strict=True)))


def _assemble(pieces: Pieces, shape: tuple[int, ...], dtype: np.dtype, reader: SafetensorsReader) -> np.ndarray:
    """One parameter. Where nothing is cast its bits are moved: NumPy holds Python's lock while it copies bfloat16."""
    bits = {2: np.uint16, 4: np.uint32}.get(dtype.itemsize)
    if bits is None or any(DTYPES.get(reader.tensors[piece.name].dtype) != dtype for piece in pieces):
        return assemble(pieces, shape, dtype, reader.read)

    def read(name: str) -> np.ndarray:
        return reader.read(name).view(bits)

    return assemble(pieces, shape, bits, read).view(dtype)
