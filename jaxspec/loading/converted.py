"""A converted folder as a checkpoint: one Orbax checkpoint for each part.

    manifest.json, config.json, generation_config.json, tokenizer files
    weights/embed, weights/000, weights/001, ..., weights/head, weights/mtp

A converted EAGLE3 draft has the part weights/draft instead, and embed and head where it brings its own.
"""

import collections
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxspec.errors import ModelFormatError
from jaxspec.loading.hf_folder import read_hf_config
from jaxspec.loading.manifest import read_manifest
from jaxspec.loading.parts import WEIGHTS, PartTargets
from jaxspec.models.keymap import ParamPath
from jaxspec.models.params import Schemes, dotted, nest
from jaxspec.models.sparse_mla import INDEXER
from pallas_kernels.quant.schemes import SCHEMES

# Parameters in these are loaded in another one of them.
_CAST = {np.dtype(dtype) for dtype in (ml_dtypes.bfloat16, np.float32)}
# Parts that are read at once. Each is in host memory as a whole until it is on its devices.
_AT_ONCE = 2


class ConvertedCheckpoint:
    """A folder that `jaxspec convert` wrote. A `Checkpoint`.

    Raises:
        ModelFormatError: not a converted folder, or an incomplete one.
    """

    def __init__(self, folder: Path):
        manifest = read_manifest(folder)
        self.folder = folder
        self.hf = read_hf_config(folder)
        self.dtype = manifest.dtype
        self.parts = manifest.parts
        self.schemes: Mapping[str, Schemes] = {
            part: {tuple(path.split(".")): SCHEMES[name] for path, name in schemes.items()}
            for part, schemes in manifest.schemes.items()
        }

    def read_parts(self, targets: Mapping[str, PartTargets]) -> Iterator[tuple[str, dict[ParamPath, jax.Array]]]:
        """Reads parts, in order, straight to the targets' shardings and dtypes.

        Raises:
            ModelFormatError: a part is damaged, or does not hold what config.json asks for.
        """
        pool = ThreadPoolExecutor(_AT_ONCE, "load")
        try:
            unread = iter([(part, functools.partial(self._read_part, part, inner)) for part, inner in targets.items()])
            reading = collections.deque((part, pool.submit(read)) for part, read in itertools.islice(unread, _AT_ONCE))
            while reading:
                part, values = reading.popleft()
                yield part, values.result()
                reading.extend((part, pool.submit(read)) for part, read in itertools.islice(unread, 1))
        finally:
            pool.shutdown(cancel_futures=True)

    def _read_part(self, part: str, targets: PartTargets) -> dict[ParamPath, jax.Array]:
        import orbax.checkpoint as ocp

        def options(target: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
            return ocp.ArrayRestoreArgs(sharding=target.sharding, global_shape=target.shape, dtype=target.dtype)

        path = self.folder.resolve() / WEIGHTS / part
        try:
            with checkpointer() as orbax:
                stored = orbax.metadata(path).item_metadata.tree
                _check_arrays(part, stored, targets)
                _check_bytes(part, path, stored)
                restore_args = nest({p: options(t) for p, t in targets.items()})
                wanted = ocp.args.PyTreeRestore(item=nest(targets), restore_args=restore_args, partial_restore=True)
                tree = orbax.restore(path, args=wanted)
        except ModelFormatError as e:
            raise ModelFormatError(f"{self.folder}: {e}; convert the model again") from e
        except Exception as e:  # Orbax raises a bare Exception when it meets damaged data
            reason = str(e.__cause__ or e).strip().split("\n")[0][:200]
            raise ModelFormatError(
                f"{self.folder}: part {part} cannot be read ({reason}); convert the model again"
            ) from e
        return jax.block_until_ready({p: _at(tree, p) for p in targets})


def checkpointer() -> Any:
    """Uncompressed, because bf16 weights hardly shrink and zstd halves the read rate. In OCDBT, a few large files.

    Zarr 2, because the zarr 3 driver cuts its write buffers so that the C library keeps most of them: 0.7 GiB more
    after every few parts of 400 MiB.
    """
    import orbax.checkpoint as ocp

    # Orbax reports every file operation at level INFO.
    logging.getLogger("absl").setLevel(logging.WARNING)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)
    return ocp.Checkpointer(handler)


def _check_arrays(part: str, stored: Any, targets: PartTargets) -> None:
    found = {tuple(key.key for key in path): leaf for path, leaf in jax.tree.leaves_with_path(stored)}
    unread = {path for path in found.keys() - targets.keys() if INDEXER in path}  # of a model for shorter contexts
    if odd := (found.keys() - unread) ^ targets.keys():
        raise ModelFormatError(f"part {part} and config.json disagree on {dotted(min(odd, key=dotted))}")
    for path, target in targets.items():
        shape, dtype = tuple(found[path].shape), np.dtype(found[path].dtype)
        if shape != target.shape:
            raise ModelFormatError(
                f"part {part} holds {dotted(path)} of shape {list(shape)}; config.json asks for {list(target.shape)}"
            )
        # Codes cast to another dtype, or numbers to codes, would be numbers without their scale.
        if dtype != target.dtype and not {dtype, np.dtype(target.dtype)} <= _CAST:
            raise ModelFormatError(f"part {part} holds {dotted(path)} in {dtype}, not in {target.dtype}")


def _check_bytes(part: str, path: Path, stored: Any) -> None:
    """Nothing is compressed, so files that are smaller than their arrays are not whole; zarr would read zeros there."""
    needed = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(stored))
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if size < needed:
        raise ModelFormatError(f"part {part} has {size} bytes, but its arrays have {needed}")


def _at(tree: Any, path: ParamPath) -> jax.Array:
    for key in path:
        tree = tree[key]
    return tree
