"""A Hugging Face model folder: its JSON files and weight shards, found without trusting what the folder says.

Nothing outside the folder is ever opened. The one exception is the Hugging Face cache, whose snapshots are symbolic
links into the `blobs` folder of the same repository.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxspec.errors import ModelFormatError, shown
from jaxspec.models.fields import CONFIG
from jaxspec.models.hf_fields import eos_ids, text_part

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
INDEX = "model.safetensors.index.json"

# Far above any real file; stops a hostile one before it fills the memory.
MAX_JSON_BYTES = 100 * 2**20
_MAX_NAME_BYTES = 255  # what file systems allow
# Half a character: it has no UTF-8, and the Rust parser of tokenizers panics at it.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def cache_repository(folder: Path) -> Path | None:
    """The `models--org--name` folder that a snapshot of the Hugging Face cache belongs to; None for other folders."""
    snapshot = folder.resolve()
    repository = snapshot.parent.parent
    if snapshot.parent.name == "snapshots" and repository.name.startswith("models--"):
        return repository
    return None


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Errors about what a folder holds name the folder; those of the file system are such errors too."""
    try:
        yield
    except ModelFormatError as e:
        if str(folder) in str(e):
            raise
        raise ModelFormatError(f"{folder}: {e}") from e
    except OSError as e:
        raise ModelFormatError(f"{e.filename or folder}: {e.strerror or e}") from e


def inside(folder: Path, name: str) -> Path:
    """The file `name` of a model folder.

    Raises:
        ModelFormatError: it does not exist, is not a plain file name, or is a link that leaves the folder.
    """
    if not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise ModelFormatError(f"{folder}: {shown(name)} points outside its folder (only plain file names are allowed)")
    if len(name.encode("utf-8", "replace")) > _MAX_NAME_BYTES or not name.isprintable():
        raise ModelFormatError(f"{folder}: {shown(name)} is not a file name")
    path = folder / name
    if not path.is_file():
        raise ModelFormatError(f"{folder} has no {name}")
    root = cache_repository(folder) or folder.resolve()
    if not path.resolve().is_relative_to(root):
        raise ModelFormatError(f"{folder}: {name} is a link that points outside its folder")
    return path


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder."""
    path = inside(folder, name)
    check_size(path)
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
        if _SURROGATE.search(raw):  # rare, and legal in pairs
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except OSError as e:
        raise ModelFormatError(f"{path} cannot be read: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise ModelFormatError(f"{path} is not valid JSON: {str(e)[:200]}") from e
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} is not a JSON object")
    return value


def check_size(path: Path, most: int = MAX_JSON_BYTES) -> None:
    """Before a file is read as a whole.

    Raises:
        ModelFormatError: it is larger than `most` bytes.
    """
    if path.stat().st_size > most:
        raise ModelFormatError(f"{path} is larger than {most >> 20} MiB")


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, after checking that there is a folder with one; of a multimodal model its text part."""
    if not folder.is_dir():
        raise ModelFormatError(f"{folder} is not a folder")
    if not (folder / CONFIG).exists():
        raise ModelFormatError(f"{folder} has no {CONFIG}, so it is not a Hugging Face model folder")
    with naming(folder):
        return text_part(read_json(folder, CONFIG))


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a generation: those of generation_config.json, then those only config.json has.

    Chat models name their end-of-turn token in the former alone (Kimi-K2's config.json has only the end of text).
    """
    ids = eos_ids(read_hf_config(folder))
    if (folder / GENERATION_CONFIG).exists():
        ids = eos_ids(read_json(folder, GENERATION_CONFIG), where=GENERATION_CONFIG) + ids
    return tuple(dict.fromkeys(ids))


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors shards, and the index's tensor -> file name map (empty where the folder has no index).

    Raises:
        ModelFormatError: no safetensors (pickled weights are named and refused), or an index that is malformed, points
            outside the folder, or names a file that is not there.
    """
    if not (folder / INDEX).exists():
        names = sorted(p.name for p in folder.glob("*.safetensors"))
        if "model.safetensors" in names:
            names = ["model.safetensors"]
        if not names:
            raise _no_safetensors(folder)
        return [inside(folder, name) for name in names], {}

    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelFormatError(f"{folder / INDEX} has no weight_map of tensor names to file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name.endswith(".safetensors"):
            raise ModelFormatError(f"{folder / INDEX} names {shown(name)}; only .safetensors files are loaded")
    return [inside(folder, name) for name in names], weight_map


def _no_safetensors(folder: Path) -> ModelFormatError:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
    if pickled:
        return ModelFormatError(
            f"{folder} has no .safetensors weights; {pickled[0]} is never loaded, because unpickling can run code "
            "(save the model as safetensors)"
        )
    return ModelFormatError(f"{folder} has no .safetensors weights")
