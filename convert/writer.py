"""Writes the parts and the manifest of a converted folder."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

from jaxspec.loading.converted import checkpointer
from jaxspec.loading.manifest import MANIFEST, Manifest
from jaxspec.loading.parts import WEIGHTS
from jaxspec.models.keymap import ParamPath
from jaxspec.models.params import nest

# A loader reads whole chunks: small enough that a shard of a mesh reads little that it does not need, large enough
# for the disk.
_CHUNK_BYTES = 64 * 2**20
_OS_ERROR = re.compile(r"\[os_error_code='(\d{1,4})'\]")


def write_part(folder: Path, part: str, values: Mapping[ParamPath, np.ndarray]) -> None:
    """Writes one part under `folder`; needs memory for two more copies of it.

    Raises:
        OSError: the disk is full, or otherwise refuses.
    """
    import orbax.checkpoint as ocp

    tree = nest(values)
    options = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    try:
        with checkpointer() as orbax:
            orbax.save(folder.resolve() / WEIGHTS / part, args=ocp.args.PyTreeSave(tree, save_args=options))
    except ValueError as e:  # tensorstore reports errors of the file system so
        if (code := _OS_ERROR.search(str(e))) is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from e


def jaxspec_version() -> str:
    try:
        return metadata.version("jaxspec")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Flushes to the disk, so that the folder is renamed only after its manifest is safe."""
    with (folder / MANIFEST).open("w") as f:
        json.dump(asdict(manifest), f, indent=2)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
