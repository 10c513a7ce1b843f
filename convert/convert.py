"""`jaxspec convert`: writes a Hugging Face model or draft as a converted folder."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

from convert.digests import ShardDigests
from convert.progress import Progress, Silent
from convert.rounding import rounding_table
from convert.staging import OnEvent, staged
from convert.writer import jaxspec_version, write_manifest, write_part
from jaxspec.errors import ConfigError, ModelFormatError
from jaxspec.loading.hf_checkpoint import HFCheckpoint
from jaxspec.loading.hf_folder import CONFIG, GENERATION_CONFIG, cache_repository, naming, read_json
from jaxspec.loading.manifest import Manifest, has_manifest
from jaxspec.loading.parts import MTP
from jaxspec.loading.quantise import Quantization
from jaxspec.loading.resolve import resolve_model
from jaxspec.loading.tokenizer_files import copy_tokenizer, write_json
from jaxspec.models.params import dotted


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    quantization: Quantization = "auto",
    progress: Progress | None = None,
    on_event: OnEvent = lambda _: None,
) -> Path:
    """Converts a model part by part, so that memory follows its largest part and not its size.

    Args:
        source: a local Hugging Face folder, or a hub id.
        out: the folder to make. An older conversion there is replaced, anything else is left alone and an error.
        revision: branch, tag or commit of a hub id; the manifest records the commit.
        quantization: see `HFCheckpoint`.
        progress: `convert.progress.console()` for people; silent by default.
        on_event: called at every point where a process may be killed without leaving a folder that loads.

    Returns:
        `out`. Until it is complete, the path holds what it held before.

    Raises:
        ModelFormatError: the source cannot be converted, or `out` is in the way.
        ConfigError: the disk is full, or `out` cannot be written.
    """
    folder, out = resolve_model(source, revision=revision), Path(out)
    if has_manifest(folder):
        raise ModelFormatError(f"{folder} is a converted folder already")
    _check_destination(out)
    try:
        with staged(out, on_event) as work:
            _convert(folder, work, quantization, progress or Silent(), on_event)
    except OSError as e:
        where = f" ({e.filename})" if e.filename else ""
        raise ConfigError(f"cannot convert into {out}: {e.strerror or e}{where}; what was there is unchanged") from e
    return out


def _check_destination(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ModelFormatError(f"{out} exists and is not a folder")
    if out.is_dir() and any(out.iterdir()) and not has_manifest(out):
        raise ModelFormatError(f"{out} exists and was not made by jaxspec convert; name another folder or remove it")


def _convert(folder: Path, work: Path, quantization: Quantization, progress: Progress, on_event: OnEvent) -> None:
    """Fills the folder `work`, its manifest last."""
    with naming(folder):
        checkpoint = HFCheckpoint(folder, quantization)
    _check_space(checkpoint, work)
    sizes = {part: checkpoint.source_bytes(part) for part in checkpoint.parts}

    progress.start(f"converting {folder.name}", sum(sizes.values()))
    with closing(progress), ShardDigests(checkpoint.reader.files) as digests:
        for part in checkpoint.parts:
            values = {path: checkpoint.assemble(part, path) for path in checkpoint.sources[part]}
            write_part(work, part, values)
            # Freed before the next part is read.
            del values
            progress.advance(part, sizes[part])
            on_event(f"part {part} written")
        shards = digests.result()
        for line in rounding_table({part: checkpoint.rounding(part) for part in checkpoint.parts}):
            progress.note(line)

    _write_configs(folder, checkpoint.hf, work)
    copy_tokenizer(folder, work)
    name, revision = _identity(folder)
    parameters = {part: checkpoint.num_parameters(part) for part in checkpoint.parts}
    manifest = Manifest(
        source=name,
        revision=revision,
        shards=shards,
        parts=checkpoint.parts,
        nextn_parameters=parameters.pop(MTP, 0),
        parameters=sum(parameters.values()),
        dtype=checkpoint.dtype,
        schemes={
            part: {dotted(path): scheme.name for path, scheme in schemes.items()}
            for part, schemes in checkpoint.schemes.items()
            if schemes
        },
        jaxspec_version=jaxspec_version(),
    )
    write_manifest(work, manifest)


def _check_space(checkpoint: HFCheckpoint, work: Path) -> None:
    """A full disk is better known before hours of work than after."""
    needed, free = sum(map(checkpoint.converted_bytes, checkpoint.parts)), shutil.disk_usage(work).free
    if needed > free:
        raise ConfigError(
            f"the converted model has {needed / 1e9:.2f} GB, but the disk of {work.parent} has {free / 1e9:.2f} GB free"
        )


def _write_configs(folder: Path, hf: dict[str, Any], work: Path) -> None:
    # How the weights are stored is the manifest's to say, and code that came with the model is never run.
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
