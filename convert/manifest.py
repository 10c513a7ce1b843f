"""The manifest of a converted folder: what it was made from, and what it must hold to be complete."""

import json
import os
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from convert.staging import is_staging
from jaxspec.errors import ModelFormatError

MANIFEST = "manifest.json"

# Raised whenever a folder written by an older jaxspec can no longer be read.
LAYOUT_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Attributes:

    source: the hub id, or the name of the folder, that was converted.
    revision: the commit of a hub model; None for a plain folder.
    shards: file name -> SHA-256 (hexadecimal) of every source shard.
    parts: the folders under `weights/`, in model order; "mtp" where the model has a NextN layer; "draft" for an EAGLE3
        draft, then "embed" and "head" where it brings its own.
    parameters: of the model (or the draft); `nextn_parameters`: of the NextN layer, 0 without one.
    dtype: of the stored weights; parameters that a model declares float32 are float32.
    """

    source: str
    revision: str | None
    shards: dict[str, str]
    parts: tuple[str, ...]
    parameters: int
    nextn_parameters: int
    dtype: str
    layout_version: int = LAYOUT_VERSION
    jaxspec_version: str = ""


def jaxspec_version() -> str:
    try:
        return metadata.version("jaxspec")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes through to the disk: whoever renames the folder relies on it."""
    with (folder / MANIFEST).open("w") as f:
        json.dump(asdict(manifest), f, indent=2)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())


def has_manifest(folder: Path) -> bool:
    """Whether `folder` was written by `jaxspec convert`, by this or another version."""
    try:
        return isinstance(_read(folder).get("layout_version"), int)
    except (OSError, ValueError, AttributeError):
        return False


def _read(folder: Path) -> Any:
    return json.loads((folder / MANIFEST).read_text())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete converted folder.

    Raises:
        ModelFormatError: not a converted folder, one of another layout version, or one with parts missing.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise ModelFormatError(
            f"{folder} is not a converted folder (it has no {MANIFEST}); run: jaxspec convert SRC OUT"
        )
    if is_staging(folder):
        raise ModelFormatError(
            f"{folder} was left by an interrupted conversion; run it again and use its output folder"
        )
    try:
        raw = _read(folder)
        version, written_by = raw["layout_version"], raw["jaxspec_version"]
    except (ValueError, KeyError, TypeError) as e:
        raise ModelFormatError(f"{folder / MANIFEST} is damaged ({e}); convert the model again") from e
    if version != LAYOUT_VERSION:
        raise ModelFormatError(
            f"{folder} has layout version {version} (written by jaxspec {written_by}) and this jaxspec reads version "
            f"{LAYOUT_VERSION}; convert the model again: jaxspec convert {raw.get('source', 'SRC')} {folder}"
        )
    if set(raw) != {f.name for f in fields(Manifest)}:
        raise ModelFormatError(f"{folder / MANIFEST} is damaged (unexpected keys); convert the model again")
    manifest = Manifest(**raw | {"parts": tuple(raw["parts"])})
    for part in manifest.parts:
        if not (folder / "weights" / part).is_dir():
            raise ModelFormatError(f"{folder} lacks its part weights/{part}; convert the model again")
    return manifest
