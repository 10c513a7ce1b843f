"""The key of a kept executable: a digest of all that the compiler's result follows from, without tracing anything.

Two keys are equal only where configuration, shapes, versions, device, flags and sources are. What cannot be described
completely has no key, and is compiled anew each time.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

# A change of what is kept under a key, or of how.
_FORMAT = 1
# Our own: their sources are in each key.
_PACKAGES = ("jaxspec", "pallas_kernels")
# Their classes may be part of a configuration, and their versions are in each key.
_VERSIONED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "jax-triton", "triton")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_LIBRARIES = ("cublas", "cudnn", "nccl", "cuda-nvcc", "cuda-runtime")
# Options of jax that a traced function, or its executable, depends on.
_JAX_OPTIONS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_random_seed_offset", "jax_debug_nans",
    "jax_debug_infs", "jax_disable_jit", "jax_exec_time_optimization_effort", "jax_memory_fitting_effort",
    "jax_optimization_level", "jax_use_shardy_partitioner", "jax_softmax_custom_jvp",
)  # fmt: skip


class NotKeptError(Exception):
    """A value that no key can describe; the text says which."""


@dataclasses.dataclass(frozen=True)
class Digest:
    """Stands in a key for values that many keys follow from, so that they are described once."""

    sha256: str


def digest_of(*values: Any) -> Digest:
    """
    Raises:
        NotKeptError: see `key_of`.
    """
    return Digest(hashlib.sha256(json.dumps(canonical(values)).encode()).hexdigest())


def key_of(what: str, devices: Iterable[jax.Device], *values: Any) -> str:
    """The name under which an executable is kept.

    Args:
        what: which kind of result it is.
        devices: that it runs on.
        values: all else that it follows from.

    Raises:
        NotKeptError: one of the values has no description, or a class of it is not ours.
    """
    described = json.dumps([_FORMAT, what, environment(tuple(devices)), canonical(values)])
    return f"{what}-{hashlib.sha256(described.encode()).hexdigest()[:40]}"


def canonical(value: Any) -> Any:
    """JSON that is equal for equal values, in every process.

    Raises:
        NotKeptError: for values of types that are not known to be described completely.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return [type(value).__name__, value] if not isinstance(value, enum.Enum) else _named(type(value), value.name)
    if isinstance(value, type):
        return ["type", _path(value)]
    if isinstance(value, enum.Enum):
        return _named(type(value), value.name)
    if isinstance(value, np.dtype):
        return ["dtype", str(value)]
    if isinstance(value, jax.tree_util.PyTreeDef) and " at 0x" not in str(value):
        return ["tree", str(value)]
    if isinstance(value, jax.sharding.Mesh):
        return ["mesh", list(map(str, value.axis_names)), list(value.devices.shape), [d.id for d in value.devices.flat]]
    if isinstance(value, jax.sharding.NamedSharding):
        return ["sharding", canonical(value.mesh), str(value.spec), str(value.memory_kind)]
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return ["array", list(value.shape), str(value.dtype), canonical(value.sharding), bool(value.weak_type)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _named(type(value), [canonical(each) for each in value])
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, [canonical(each) for each in value]]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted((canonical(each) for each in value), key=json.dumps)]
    if isinstance(value, Mapping):
        pairs = [(canonical(key), canonical(each)) for key, each in value.items()]
        return _named(type(value), sorted(pairs, key=json.dumps))
    if dataclasses.is_dataclass(value):
        fields = [(field.name, canonical(getattr(value, field.name))) for field in dataclasses.fields(value)]
        return _named(type(value), fields)
    raise NotKeptError(f"a value of type {_path(type(value), known=False)} is part of the configuration")


def _named(kind: type, content: Any) -> Any:
    return [_path(kind), content]


def _path(kind: type, *, known: bool = True) -> str:
    """A class by its name. Of a class that is not ours the sources are not in the key, unless its version is."""
    root = kind.__module__.partition(".")[0]
    if known and root not in (*_PACKAGES, *_VERSIONED, "builtins", "types"):
        raise NotKeptError(f"{kind.__module__}.{kind.__qualname__} is not part of jaxspec")
    return f"{kind.__module__}.{kind.__qualname__}"


def environment(devices: tuple[jax.Device, ...]) -> Any:
    """What does not change while the process runs, as JSON."""
    return [software(), [_of_device(device) for device in devices], len(jax.devices())]


def software() -> dict[str, str]:
    """Versions, sources, flags and jax's options by name, without a look at a device. What is only for people is no part."""
    return _of_process() | {name: str(value) for name, value in jax_options().items()}


def jax_options() -> dict[str, Any]:
    """Options of jax that a key follows from, by name; None where this jax has no such option."""
    return {name: getattr(jax.config, name, None) for name in _JAX_OPTIONS}


@functools.cache
def _of_process() -> dict[str, str]:
    libraries = [f"nvidia-{name}{suffix}" for name in _LIBRARIES for suffix in ("", "-cu12", "-cu13")]
    flags = sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith("--xla_dump"))
    return {
        **{name: str(_version(name)) for name in (*_VERSIONED, *_PLUGINS, *libraries)},
        "Python": ".".join(map(str, sys.version_info[:2])),
        "XLA_FLAGS": " ".join(flags),
        "jaxspec's sources": source_digest(),
    }


def forget_process() -> None:
    """For tests that change it."""
    _of_process.cache_clear()


def _of_device(device: jax.Device) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": device.id,
        "kind": device.device_kind,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "capability": str(getattr(device, "compute_capability", None)),
        "cores": getattr(device, "core_count", None),
    }
    return out | (_of_host() if device.platform == "cpu" else {"driver": _text("/proc/driver/nvidia/version")})


@functools.cache
def _of_host() -> dict[str, Any]:
    """A CPU's executable is machine code for its instructions, cut into tasks for its number of threads."""
    about = _text("/proc/cpuinfo").partition("\n\n")[0]
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    lines = [line for line in about.splitlines() if line.startswith(wanted)]
    return {"machine": platform.machine(), "cpu": lines, "threads": [os.cpu_count(), os.environ.get("NPROC")]}


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def source_digest() -> str:
    """SHA-256 of all that steps are traced from: our Python files, and the kernels' tuned choices."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        root = Path(importlib.import_module(package).__path__[0])
        files = (file for pattern in ("*.py", "*.json") for file in root.rglob(pattern))
        for file in sorted(file for file in files if "demo" not in file.relative_to(root).parts):
            content = file.read_bytes()
            digest.update(f"{package}/{file.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
