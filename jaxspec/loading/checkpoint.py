"""Loads models, NextN layers and drafts from a Hugging Face folder or a converted one, with equal bits."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ModelFormatError
from jaxspec.loading.converted import ConvertedCheckpoint
from jaxspec.loading.hf_checkpoint import HFCheckpoint
from jaxspec.loading.hf_folder import eos_token_ids, naming, read_hf_config
from jaxspec.loading.manifest import MANIFEST
from jaxspec.loading.parts import DRAFT, EMBED, HEAD, MTP, WEIGHTS, PartTargets, draft_part_of, parts_of, path_of
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.eagle3 import Eagle3, check_d2t, is_eagle3, read_eagle3_config
from jaxspec.models.gqa import Spread, spread_heads
from jaxspec.models.keymap import ParamPath
from jaxspec.models.mtp import NextN
from jaxspec.models.params import (
    TENSOR_AXIS,
    ModuleT,
    Schemes,
    declarations,
    dotted,
    nest,
    quantised,
    with_shardings,
)
from jaxspec.models.registry import read_config
from jaxspec.models.sparse_mla import for_contexts
from jaxspec.progress import LOADING, Progress

Params = dict[str | int, Any]
_Values = dict[ParamPath, jax.Array]


class Checkpoint(Protocol):
    """A folder whose configuration has been read and whose weights have not.

    Attributes:
        hf: its config.json.
        dtype: of its parameters, but for those that a model declares float32.
        schemes: part -> path in the part -> how this parameter is quantised.
    """

    folder: Path
    hf: dict[str, Any]
    dtype: str
    schemes: Mapping[str, Schemes]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that it has, in model order; see `jaxspec.loading.parts`."""
        ...

    def read_parts(self, targets: Mapping[str, PartTargets]) -> Iterator[tuple[str, dict[ParamPath, jax.Array]]]:
        """The parameters of parts, in order, under the targets' shardings and dtypes; of each part all or none.

        Later parts are read while a caller holds an earlier one, within host memory for one or two parts.
        """
        ...


def is_converted(folder: Path) -> bool:
    """Whether a folder has the layout of a converted one, complete or not."""
    return (folder / MANIFEST).exists() and (folder / WEIGHTS).is_dir()


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads a folder's configuration and its manifest or headers, and checks that it can be loaded.

    Raises:
        ModelFormatError: it cannot be loaded.
    """
    folder = Path(folder)
    with naming(folder):
        return ConvertedCheckpoint(folder) if is_converted(folder) else HFCheckpoint(folder)


def read_model_config(folder: Path, *, context: int | None = None) -> ModelConfig:
    """The model configuration of a folder, with the end-of-text ids of both its configuration files.

    Args:
        context: where contexts end: at so many tokens a model may do without its indexers (see `for_contexts`).

    Raises:
        ModelFormatError: the folder holds no model, or one that is not supported.
    """
    hf = read_hf_config(folder)
    with naming(folder):
        if is_eagle3(hf):
            raise ModelFormatError(
                f"{folder} is an EAGLE3 draft, not a model: name it as speculative_model beside its model"
            )
        return dataclasses.replace(for_contexts(read_config(hf), context), eos_token_ids=eos_token_ids(folder))


def declare_target(checkpoint: Checkpoint, dtype: Any, *, context: int | None = None) -> CausalLM:
    """The target model of a checkpoint, without parameters. `context`: see `read_model_config`."""
    model = CausalLM(read_model_config(checkpoint.folder, context=context), np.dtype(dtype))
    inner = {part: schemes for part, schemes in checkpoint.schemes.items() if part != MTP}
    found = {path_of(part, path): scheme for part, schemes in inner.items() for path, scheme in schemes.items()}
    return _quantised(model, found, checkpoint)


def declare_nextn(checkpoint: Checkpoint, dtype: Any, *, context: int | None = None) -> NextN:
    """The NextN (MTP) layer of a checkpoint, without parameters. `context`: see `read_model_config`."""
    model = NextN(read_model_config(checkpoint.folder, context=context), np.dtype(dtype))
    return _quantised(model, checkpoint.schemes.get(MTP, {}), checkpoint)


def _quantised(model: ModuleT, schemes: Schemes, checkpoint: Checkpoint) -> ModuleT:
    declared = declarations(model)
    for path in schemes:
        if path not in declared or not declared[path].get_metadata()["quantisable"]:
            raise ModelFormatError(f"{checkpoint.folder}: {dotted(path)} is no weight that can be quantised")
    return quantised(model, schemes)


def _on_mesh(model: nnx.Module, mesh: Mesh) -> tuple[PartTargets, Callable[[_Values], _Values]]:
    """What to read of a checkpoint for a model on a mesh, and what makes the model's parameters of parts of it.

    These are the same, unless key heads are fewer than devices: `model` is then changed to have as many.
    """
    stored = {path: variable.get_value() for path, variable in declarations(model).items()}
    changed = spread_heads(model, mesh.shape[TENSOR_AXIS])
    targets = with_shardings(model, mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    read = {path: jax.ShapeDtypeStruct(stored[path].shape, stored[path].dtype, sharding=whole) for path in changed}

    @functools.cache
    def jitted(spread: Spread, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
        """One executable for all layers."""
        return jax.jit(spread, out_shardings=sharding)

    def finish(values: _Values) -> _Values:
        return {
            path: jitted(changed[path], targets[path].sharding)(value) if path in changed else value
            for path, value in values.items()
        }

    return targets | read, finish


def declare_params(
    checkpoint: Checkpoint, mesh: Mesh, dtype: Any, *, context: int | None = None
) -> tuple[CausalLM, Params]:
    """What `load_params` will return, with shapes and shardings for parameters."""
    model = declare_target(checkpoint, dtype, context=context)
    spread_heads(model, mesh.shape[TENSOR_AXIS])
    return model, nest(with_shardings(model, mesh))


def load_params(
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: Any = None,
    *,
    context: int | None = None,
    progress: Progress | None = None,
) -> tuple[CausalLM, Params]:
    """The target model of a checkpoint, and its parameters on `mesh` as a nested dict.

    Args:
        dtype: of the parameters; those that the model declares float32, and the codes and scales of quantised weights,
            keep theirs. None: the checkpoint's.
        context: see `read_model_config`.
        progress: called after each part.

    Raises:
        ModelFormatError: the checkpoint is damaged, or not that of a model.
        ConfigError: the mesh does not divide the model.
    """
    model = declare_target(checkpoint, dtype or checkpoint.dtype, context=context)
    targets, finish = _on_mesh(model, mesh)
    flat: dict[ParamPath, jax.Array] = {}
    parts = parts_of({path: path for path in targets})
    wanted = {part: {p: targets[path] for p, path in inner.items()} for part, inner in parts.items()}
    for done, (part, values) in enumerate(checkpoint.read_parts(wanted), 1):
        flat |= finish({parts[part][p]: value for p, value in values.items()})
        if progress:
            progress(done, len(parts), f"{LOADING}: {part}, {done} of {len(parts)} parts")
    return model, nest(flat)


def load_nextn(
    checkpoint: Checkpoint, mesh: Mesh, dtype: Any = None, *, context: int | None = None
) -> tuple[NextN, Params]:
    """The NextN (MTP) layer of a checkpoint, as `load_params` returns the target.

    Raises:
        ModelFormatError: the checkpoint has none.
    """
    config = read_model_config(checkpoint.folder)
    if MTP not in checkpoint.parts or not config.nextn_layers:
        raise ModelFormatError(f"{checkpoint.folder} has no NextN (MTP) layer")
    model = declare_nextn(checkpoint, dtype or checkpoint.dtype, context=context)
    targets, finish = _on_mesh(model, mesh)
    ((_, values),) = checkpoint.read_parts({MTP: targets})
    return model, nest(finish(values))


def declare_eagle3(checkpoint: Checkpoint, capture: tuple[int, ...], dtype: Any) -> Eagle3:
    """The module of an EAGLE3 checkpoint, without parameters, which reads the target's streams `capture`."""
    parts = checkpoint.parts
    with naming(checkpoint.folder):
        config = read_eagle3_config(checkpoint.hf)
    model = Eagle3(config, np.dtype(dtype), capture=capture, own_embedding=EMBED in parts, own_head=HEAD in parts)
    return _quantised(model, checkpoint.schemes.get(DRAFT, {}), checkpoint)


def load_eagle3(checkpoint: Checkpoint, mesh: Mesh, dtype: str, capture: tuple[int, ...]) -> tuple[Eagle3, Params]:
    """An EAGLE3 draft, as `load_params` returns a target.

    Raises:
        ModelFormatError: a damaged checkpoint.
    """
    model = declare_eagle3(checkpoint, capture, dtype)
    targets, finish = _on_mesh(model, mesh)
    parts = {
        part: {p: target for p, target in targets.items() if draft_part_of(p) == part} for part in checkpoint.parts
    }
    flat = {p: value for _, values in checkpoint.read_parts(parts) for p, value in finish(values).items()}
    if model.config.reduced:
        check_d2t(np.asarray(flat["d2t",]), model.config.model.vocab_size)
    return model, nest(flat)
