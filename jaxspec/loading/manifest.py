"""The manifest of a converted folder: what it was made from, and what it must hold to be complete."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxspec.errors import ModelFormatError

MANIFEST = "manifest.json"

# Raised whenever a folder written by an older jaxspec can no longer be read.
LAYOUT_VERSION = 1

# An unfinished folder is named `.NAME.tmp-RANDOM`.
STAGING_INFIX = ".tmp-"


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


def is_staging(folder: Path) -> bool:
    """Whether a folder has the name of an unfinished one."""
    name = folder.resolve().name
    return name.startswith(".") and STAGING_INFIX in name


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
