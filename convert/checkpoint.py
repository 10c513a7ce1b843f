"""The weights of a converted folder: one Orbax checkpoint per part, written and read part by part.

    manifest.json, config.json, generation_config.json, tokenizer files
    weights/embed, weights/000, weights/001, ..., weights/head, weights/mtp

A converted EAGLE3 draft has the part weights/draft instead, and embed and head where it brings its own. A part holds
the parameters of one layer (or the embedding, or final norm and head, or the NextN layer) under the names
of `jaxspec.models`, so that a loader holds one part at a time beside what it has placed on the devices.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from convert.hf_folder import GENERATION_CONFIG, read_hf_config, read_json
from convert.keymaps import ParamPath
from convert.manifest import Manifest, read_manifest
from jaxspec.errors import ModelFormatError
from jaxspec.models.config import ModelConfig, eos_ids, read_config
from jaxspec.models.decoder import CausalLM
from jaxspec.models.eagle3 import is_eagle3
from jaxspec.models.mtp import NextN
from jaxspec.models.params import dotted, nest, with_shardings

WEIGHTS = "weights"
EMBED, HEAD, MTP, DRAFT = "embed", "head", "mtp", "draft"

# A loader reads whole chunks: small enough that a shard of a mesh reads little that it does not need, large enough
# for the disk.
_CHUNK_BYTES = 64 * 2**20


def part_of(path: ParamPath) -> tuple[str, ParamPath]:
    """The part that a parameter of `CausalLM` is stored in, and its path in there."""
    if path[0] == "layers":
        return f"{int(path[1]):03d}", path[2:]
    return (EMBED if path[0] == "embed" else HEAD), path


def parts_of(values: Mapping[ParamPath, Any]) -> dict[str, dict[ParamPath, Any]]:
    """Part -> path in the part -> value, parts in model order, for values of all parameters of a `CausalLM`."""
    found: dict[str, dict[ParamPath, Any]] = {}
    for path, value in values.items():
        part, inner = part_of(path)
        found.setdefault(part, {})[inner] = value
    layers = sorted(found.keys() - {EMBED, HEAD})
    return {part: found[part] for part in (EMBED, *layers, HEAD)}


def _checkpointer() -> Any:
    """Uncompressed, because bf16 weights hardly shrink and zstd halves the read rate. In OCDBT, a few large files.

    Zarr 2, because the zarr 3 driver cuts its write buffers so that the C library keeps most of them: 0.7 GiB more
    after every few parts of 400 MiB.
    """
    import orbax.checkpoint as ocp

    # Orbax reports every file operation at level INFO.
    logging.getLogger("absl").setLevel(logging.WARNING)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)
    return ocp.Checkpointer(handler)


def write_part(folder: Path, part: str, values: Mapping[ParamPath, np.ndarray]) -> None:
    """Writes one part under `folder`. Takes memory for two more copies of it."""
    import orbax.checkpoint as ocp

    tree = nest(values)
    options = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with _checkpointer() as checkpointer:
        checkpointer.save(folder.resolve() / WEIGHTS / part, args=ocp.args.PyTreeSave(tree, save_args=options))


def read_part(folder: Path, part: str, targets: Mapping[ParamPath, jax.ShapeDtypeStruct]) -> dict[ParamPath, jax.Array]:
    """Reads one part straight to the targets' shardings and dtypes.

    Raises:
        ModelFormatError: the part is damaged, or does not hold what config.json asks for.
    """
    import orbax.checkpoint as ocp

    def options(target: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
        return ocp.ArrayRestoreArgs(sharding=target.sharding, global_shape=target.shape, dtype=target.dtype)

    path = folder.resolve() / WEIGHTS / part
    try:
        with _checkpointer() as checkpointer:
            _check_shapes(part, checkpointer.metadata(path).item_metadata.tree, targets)
            tree = checkpointer.restore(
                path,
                args=ocp.args.PyTreeRestore(
                    item=nest(targets), restore_args=nest({p: options(t) for p, t in targets.items()})
                ),
            )
    except ModelFormatError as e:
        raise ModelFormatError(f"{folder}: {e}; convert the model again") from e
    except Exception as e:  # Orbax raises a bare Exception when it meets damaged data
        reason = str(e.__cause__ or e).strip().split("\n")[0][:200]
        raise ModelFormatError(f"{folder}: part {part} cannot be read ({reason}); convert the model again") from e
    return {p: _at(tree, p) for p in targets}


def _check_shapes(part: str, stored: Any, targets: Mapping[ParamPath, jax.ShapeDtypeStruct]) -> None:
    found = {tuple(key.key for key in path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(stored)}
    if odd := found.keys() ^ targets.keys():
        raise ModelFormatError(f"part {part} and config.json disagree on {dotted(min(odd, key=dotted))}")
    for path, target in targets.items():
        if found[path] != target.shape:
            raise ModelFormatError(
                f"part {part} holds {dotted(path)} of shape {list(found[path])}; config.json asks for "
                f"{list(target.shape)}"
            )


def _at(tree: Any, path: ParamPath) -> jax.Array:
    for key in path:
        tree = tree[key]
    return tree


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a generation: those of generation_config.json, then those only config.json has.

    Chat models name their end-of-turn token in the former alone (Kimi-K2's config.json has only the end of text).
    """
    ids = eos_ids(read_hf_config(folder).get("eos_token_id"))
    if (folder / GENERATION_CONFIG).exists():
        ids = eos_ids(read_json(folder, GENERATION_CONFIG).get("eos_token_id")) + ids
    return tuple(dict.fromkeys(ids))


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


__all__ = [
    "Manifest",
    "eos_token_ids",
    "load_nextn",
    "load_params",
    "read_manifest",
    "read_model_config",
]
