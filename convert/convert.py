"""`jaxspec convert`: a Hugging Face model in, a converted folder out; and finding or making one for any model name."""

import hashlib
import os
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.digests import ShardDigests
from convert.keymaps import (
    EAGLE3_HARMLESS,
    KeyMap,
    ParamPath,
    Pieces,
    assemble,
    harmless,
    key_map,
    nextn_key_map,
    nextn_prefix,
)
from convert.progress import Progress, Silent
from convert.staging import OnEvent, lock_file, staged
from convert.writer import jaxspec_version, write_manifest, write_part
from jaxspec.errors import ModelFormatError
from jaxspec.loading import hub
from jaxspec.loading.draft import eagle3_source, part_of
from jaxspec.loading.hf_folder import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    cache_repository,
    inside,
    read_hf_config,
    read_json,
)
from jaxspec.loading.key_check import check
from jaxspec.loading.manifest import (
    LAYOUT_VERSION,
    MANIFEST,
    Manifest,
    has_manifest,
    read_manifest,
)
from jaxspec.loading.parts import DRAFT, MTP, WEIGHTS, parts_of
from jaxspec.loading.safetensors_reader import SafetensorsReader
from jaxspec.loading.tokenizer_files import TOKENIZER_FILES, copy_tokenizer, write_json
from jaxspec.models.config import read_config
from jaxspec.models.decoder import CausalLM
from jaxspec.models.eagle3 import Eagle3, is_eagle3, read_eagle3_config
from jaxspec.models.mtp import NextN
from jaxspec.models.params import count_parameters, declarations

DEMO = "demo"
# The embedded model and its EAGLE3 drafts: name -> folder in jaxspec/demo.
EMBEDDED = {DEMO: "target", f"{DEMO}/eagle3-llama": "eagle3-llama", f"{DEMO}/eagle3-mla": "eagle3-mla"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    on_event: OnEvent = lambda _: None,
) -> Path:
    """Converts a model part by part, so that memory follows its largest part and not its size.

    Args:
        source: a local Hugging Face folder, or a hub id.
        out: the folder to make. An older conversion there is replaced, anything else is left alone and an error.
        revision: branch, tag or commit of a hub id; the manifest records the commit.
        progress: `convert.progress.console()` for people; nothing is printed by default.
        on_event: called at every point where a killed process must leave nothing behind that loads.

    Returns:
        `out`. Until it is complete there is nothing at that path, or what was there before.

    Raises:
        ModelFormatError: the source cannot be converted, or `out` is in the way.
    """
    folder, out = _source_folder(str(source), revision), Path(out)
    if has_manifest(folder):
        raise ModelFormatError(f"{folder} is a converted folder already")
    _check_destination(out)
    with staged(out, on_event) as work:
        _convert(folder, work, progress or Silent(), on_event)
    return out


def resolve_model(
    model: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """The converted folder of a model or draft: one of `EMBEDDED`, a converted or Hugging Face folder, or a hub id.

    What is not converted yet is converted once, into `cache_dir` (default: $JAXSPEC_CACHE or ~/.cache/jaxspec). Changed
    weights or configurations get a new entry. Of two processes that need the same one, the second waits.

    Raises:
        ModelFormatError: there is no such model, or it cannot be converted.
    """
    folder = _embedded(str(model)) if model in EMBEDDED else _source_folder(str(model), revision)
    if (folder / MANIFEST).exists() and (folder / WEIGHTS).is_dir():
        read_manifest(folder)
        return folder
    hf = read_hf_config(folder)
    (read_eagle3_config if is_eagle3(hf) else read_config)(hf)

    cache = Path(cache_dir or os.environ.get("JAXSPEC_CACHE") or Path.home() / ".cache" / "jaxspec").expanduser()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = _cache_name(folder)
    with lock_file(cache / f".{name}.lock"):
        if not (cache / name / MANIFEST).exists():
            convert_checkpoint(folder, cache / name, progress=progress)
    return cache / name


def _embedded(name: str) -> Path:
    import jaxspec.demo

    folder = Path(jaxspec.demo.__path__[0]) / EMBEDDED[name]
    if not folder.is_dir():
        raise ModelFormatError(f"the embedded model {name} is missing from this installation ({folder})")
    return folder


def _source_folder(model: str, revision: str | None) -> Path:
    """A local folder as it is; anything else that can be a hub id, downloaded."""
    folder = Path(model).expanduser()
    if folder.exists():
        if revision is not None:
            raise ModelFormatError(f"{model} is a local folder: a revision can only be chosen for a hub id")
        return folder
    if not _HUB_ID.fullmatch(model):
        raise ModelFormatError(
            f"{model} does not exist; a model is a folder, a Hugging Face id (organisation/name) or {DEMO!r}"
        )
    return hub.download(model, revision)


def _check_quantisation(hf: dict[str, Any]) -> None:
    quantisation = hf.get("quantization_config") or {}
    method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size", [128, 128])
    if quantisation and (method, block) != ("fp8", [128, 128]):
        raise ModelFormatError(
            f"quantization {method!r} with blocks {block} is not supported (supported: 'fp8' with blocks [128, 128])"
        )


def _check_destination(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ModelFormatError(f"{out} exists and is not a folder")
    if out.is_dir() and any(out.iterdir()) and not has_manifest(out):
        raise ModelFormatError(f"{out} exists and was not made by jaxspec convert; name another folder or remove it")


@dataclass(frozen=True, eq=False)
class _Job:
    """One parameter to make."""

    pieces: Pieces
    shape: tuple[int, ...]
    dtype: Any


def _jobs(model: CausalLM | NextN | Eagle3, pieces: KeyMap) -> dict[ParamPath, _Job]:
    out = {}
    for path, variable in declarations(model).items():
        value = variable.get_value()
        out[path] = _Job(pieces[path], value.shape, value.dtype)
    return out


@dataclass(frozen=True, eq=False)
class _Source:
    """What a checkpoint becomes.

    Attributes:
        parts: part -> path in the part -> how to make it, in model order.
        ignore: tensors that it may hold beside those.
        parameters: of the model or draft; `nextn_parameters`: of a model's NextN layer.
    """

    parts: dict[str, dict[ParamPath, _Job]]
    ignore: re.Pattern[str]
    parameters: int
    nextn_parameters: int = 0


def _model_source(hf: dict[str, Any], reader: SafetensorsReader, dtype: str) -> _Source:
    config = read_config(hf)
    target, nextn = CausalLM(config, np.dtype(dtype)), None
    parts = parts_of(_jobs(target, key_map(config)))
    # Whoever saves a model with transformers keeps the config's word of a NextN layer and loses its weights.
    if config.num_nextn_layers and any(name.startswith(nextn_prefix(config)) for name in reader.tensors):
        nextn = NextN(config, np.dtype(dtype))
        parts[MTP] = _jobs(nextn, nextn_key_map(config))
    return _Source(
        parts, harmless(config), count_parameters(target), count_parameters(nextn) if nextn is not None else 0
    )


def _draft_source(hf: dict[str, Any], reader: SafetensorsReader, dtype: str) -> _Source:
    model, pieces = eagle3_source(hf, reader, dtype)
    parts: dict[str, dict[ParamPath, _Job]] = {DRAFT: {}}
    for path, job in _jobs(model, pieces).items():
        parts.setdefault(part_of(path), {})[path] = job
    return _Source(parts, EAGLE3_HARMLESS, count_parameters(model))


def _convert(folder: Path, work: Path, progress: Progress, on_event: OnEvent) -> None:
    """Fills the folder `work`, its manifest last."""
    hf = read_hf_config(folder)
    draft = is_eagle3(hf)
    config = read_eagle3_config(hf).model if draft else read_config(hf)
    _check_quantisation(hf)
    reader = SafetensorsReader(folder)
    # bfloat16 would round float16's values, float32 holds them.
    dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
    source = (_draft_source if draft else _model_source)(hf, reader, dtype)
    maps = [{path: job.pieces for path, job in jobs.items()} for jobs in source.parts.values()]
    check(maps, reader.tensors, source.ignore)
    sizes = {part: _source_bytes(jobs, reader) for part, jobs in source.parts.items()}

    progress.start(f"converting {folder.name}", sum(sizes.values()))
    with closing(progress), ShardDigests(reader.files) as digests:
        for part, jobs in source.parts.items():
            values = {path: assemble(job.pieces, job.shape, job.dtype, reader.read) for path, job in jobs.items()}
            write_part(work, part, values)
            # Not kept until the next part is in memory, too.
            del values
            progress.advance(part, sizes[part])
            on_event(f"part {part} written")
        shards = digests.result()

    _write_configs(folder, hf, work)
    copy_tokenizer(folder, work)
    name, revision = _identity(folder)
    manifest = Manifest(
        source=name,
        revision=revision,
        shards=shards,
        parts=tuple(source.parts),
        parameters=source.parameters,
        nextn_parameters=source.nextn_parameters,
        dtype=dtype,
        jaxspec_version=jaxspec_version(),
    )
    write_manifest(work, manifest)


def _source_bytes(jobs: dict[ParamPath, _Job], reader: SafetensorsReader) -> int:
    names = {piece.name for job in jobs.values() for piece in job.pieces}
    return sum(reader.tensors[name].nbytes for name in names)


def _write_configs(folder: Path, hf: dict[str, Any], work: Path) -> None:
    # The weights are no longer quantised, and code that came with the model is never run.
    config = {key: value for key, value in hf.items() if key not in ("quantization_config", "auto_map")}
    write_json(work / CONFIG, config)
    if (folder / GENERATION_CONFIG).exists():
        write_json(work / GENERATION_CONFIG, read_json(folder, GENERATION_CONFIG))


def _identity(folder: Path) -> tuple[str, str | None]:
    """Hub id and commit of a folder in the Hugging Face cache; the name of any other folder."""
    repository = cache_repository(folder)
    if repository is None:
        return folder.resolve().name, None
    return repository.name.removeprefix("models--").replace("--", "/"), folder.resolve().name


def _cache_name(folder: Path) -> str:
    """A name that changes with the folder's place, configuration, weights, tokenizer and our layout."""
    digest = hashlib.sha256(f"{LAYOUT_VERSION}\0{folder.resolve()}".encode())
    for name in (CONFIG, GENERATION_CONFIG, INDEX, *TOKENIZER_FILES):
        if (folder / name).exists():
            digest.update(f"\0{name}\0".encode() + inside(folder, name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        stat = path.stat()
        digest.update(f"\0{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    label = re.sub(r"[^\w.-]", "_", _identity(folder)[0].replace("/", "--"))
    return f"{label}-{digest.hexdigest()[:16]}"
