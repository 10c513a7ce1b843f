"""The manifest of a converted folder: what it was made from, and what it must hold to be complete."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxspec.errors import ModelFormatError, plain, shown
from jaxspec.loading.hf_folder import read_json
from jaxspec.loading.parts import DRAFT, EMBED, HEAD, MTP, WEIGHTS
from jaxspec.models.fields import require, section, text_list, text_or, whole, wrong
from pallas_kernels.quant.schemes import SCHEMES

MANIFEST = "manifest.json"

# Raised whenever a folder written by an older jaxspec can no longer be read.
LAYOUT_VERSION = 2

# An unfinished folder is named `.NAME.tmp-RANDOM`.
STAGING_INFIX = ".tmp-"

_PART = re.compile(rf"{EMBED}|{HEAD}|{MTP}|{DRAFT}|\d{{3,4}}")
_DTYPES = ("bfloat16", "float32")
_MAX_PARAMETERS = 2**60


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
    schemes: part -> dotted path in the part -> the scheme of a quantised weight, whose codes and scale are two parameters.
    """

    source: str
    revision: str | None
    shards: dict[str, str]
    parts: tuple[str, ...]
    parameters: int
    nextn_parameters: int
    dtype: str
    schemes: dict[str, dict[str, str]]
    layout_version: int = LAYOUT_VERSION
    jaxspec_version: str = ""


def is_staging(folder: Path) -> bool:
    """Whether a folder has the name of an unfinished one."""
    name = folder.resolve().name
    return name.startswith(".") and STAGING_INFIX in name


def has_manifest(folder: Path) -> bool:
    """Whether `folder` was written by `jaxspec convert`, by this or another version."""
    try:
        return type(read_json(folder, MANIFEST).get("layout_version")) is int
    except (OSError, ModelFormatError):
        return False


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
        raw = read_json(folder, MANIFEST)
        require(raw, "layout_version", "jaxspec_version", where=MANIFEST)
    except ModelFormatError as e:
        raise _damaged(folder, e) from e
    if raw["layout_version"] != LAYOUT_VERSION:
        raise ModelFormatError(
            f"{folder} has layout version {shown(raw['layout_version'])} (written by jaxspec "
            f"{plain(raw['jaxspec_version'])}) and this jaxspec reads version {LAYOUT_VERSION}; convert the model again: "
            f"jaxspec convert {plain(raw.get('source', 'SRC'))} {folder}"
        )
    if set(raw) != {f.name for f in fields(Manifest)}:
        raise ModelFormatError(f"{folder / MANIFEST} is damaged (unexpected keys); convert the model again")
    try:
        manifest = _checked(raw)
    except ModelFormatError as e:
        raise _damaged(folder, e) from e
    for part in manifest.parts:
        if not (folder / WEIGHTS / part).is_dir():
            raise ModelFormatError(f"{folder} lacks its part {WEIGHTS}/{part}; convert the model again")
    return manifest


def _damaged(folder: Path, error: ModelFormatError) -> ModelFormatError:
    reason = str(error).removeprefix(f"{folder}/")
    return ModelFormatError(f"{folder / MANIFEST} is damaged ({reason}); convert the model again")


def _checked(raw: dict[str, Any]) -> Manifest:
    """The manifest, with every value of the type and range that `jaxspec convert` writes."""
    require(raw, *(f.name for f in fields(Manifest) if f.name != "revision"), where=MANIFEST)
    shards = section(raw, "shards", where=MANIFEST)
    if not all(isinstance(digest, str) for digest in shards.values()):
        raise wrong("shards", "file names and their SHA-256", shards, MANIFEST)
    parts = tuple(text_list(raw, "parts", where=MANIFEST))
    for part in parts:
        if not _PART.fullmatch(part):  # it becomes a path
            raise wrong("parts", "a list of embed, 000, 001, ..., head, mtp, draft", part, MANIFEST)
    dtype = text_or(raw, "dtype", "", where=MANIFEST)
    if dtype not in _DTYPES:
        raise wrong("dtype", " or ".join(_DTYPES), dtype, MANIFEST)
    return Manifest(
        source=text_or(raw, "source", "", where=MANIFEST),
        revision=text_or(raw, "revision", "", where=MANIFEST) or None,
        shards=shards,
        parts=parts,
        parameters=whole(raw, "parameters", 0, _MAX_PARAMETERS, where=MANIFEST),
        nextn_parameters=whole(raw, "nextn_parameters", 0, _MAX_PARAMETERS, where=MANIFEST),
        dtype=dtype,
        schemes=_schemes(section(raw, "schemes", where=MANIFEST)),
        jaxspec_version=text_or(raw, "jaxspec_version", "", where=MANIFEST),
    )


def _schemes(raw: dict[str, Any]) -> dict[str, dict[str, str]]:
    found = {part: section(raw, part, where=MANIFEST) for part in raw}
    for part, schemes in found.items():
        for path, scheme in schemes.items():
            if not isinstance(scheme, str) or scheme not in SCHEMES:
                raise wrong(f"schemes[{shown(part)}][{shown(path)}]", " or ".join(SCHEMES), scheme, MANIFEST)
    return found
