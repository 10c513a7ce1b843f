"""Comes to a group of processes: first to rank 0, which compares what each runs, then to jax's."""

import hashlib
import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import jax

from jaxspec.config import EngineConfig, flagged
from jaxspec.engine.fingerprint import software
from jaxspec.engine.follower import Follower
from jaxspec.engine.group import JOIN_SECONDS
from jaxspec.engine.leader import Leader
from jaxspec.errors import ConfigError, GroupError
from jaxspec.loading.manifest import MANIFEST, has_manifest
from jaxspec.loading.mesh import switch_multicast_off
from jaxspec.loading.resolve import resolve_model
from jaxspec.progress import Progress

# Files of a host's own, or compared by their content.
_OF_HOST = frozenset(("log_steps", "compilation_cache_dir"))
_OF_CONTENT = frozenset(("speculative_model", "speculative_token_map"))
# Of a large file so many parts are compared, beside its size: reading all of it would take as long as loading it.
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def join(group: Leader | Follower, folder: Path, config: EngineConfig, progress: Progress | None = None) -> None:
    """Before jax touches a device.

    Raises:
        GroupError: some have not come, or jax's processes do not find each other. ConfigError: rank 0 refuses this one, or
            the environment asks for NVLink multicast.
    """
    nodes = group.nodes
    switch_multicast_off(os.environ)
    if config.compilation_cache_dir not in (None, "off"):
        raise ConfigError(f"{flagged('compilation_cache_dir')}: several processes keep no steps; leave it out")
    group.join(facts_of(folder, config), progress)
    # It would take SIGTERM for itself, and this process would not end.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            nodes.coordinator,
            nodes.count,
            nodes.rank,
            cluster_detection_method="deactivate",
            initialization_timeout=int(JOIN_SECONDS),
            coordinator_bind_address=nodes.coordinator if nodes.rank == 0 else None,
        )
    except jax.errors.JaxRuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        raise GroupError(f"jax's coordinator at {nodes.coordinator} (--coordinator, the next port): {first}") from error


def facts_of(folder: Path, config: EngineConfig) -> dict[str, str]:
    """What processes that share steps must have in common: versions, sources, model, options."""
    facts = {"jaxspec": importlib.metadata.version("jaxspec"), **software()}
    for option in fields(EngineConfig):
        if option.name not in _OF_HOST | _OF_CONTENT:
            facts[flagged(option.name)] = str(getattr(config, option.name))
    facts["the model's content"] = digest_of(folder)
    if config.speculative_model is not None:
        facts["the draft's content"] = digest_of(resolve_model(config.speculative_model))
    if config.speculative_token_map is not None:
        facts["the token map's content"] = _digest([Path(config.speculative_token_map)])
    return facts


def digest_of(folder: Path) -> str:
    """Of a model: of a converted one its manifest, which has the digests of its sources, otherwise samples of its weights."""
    names = (MANIFEST, "config.json") if has_manifest(folder) else ("*.json", "*.safetensors")
    return _digest(sorted({path for name in names for path in folder.glob(name)}))


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()[:16]


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
