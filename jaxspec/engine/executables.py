"""Executables that are kept from one start to the next, so that a later start neither traces nor compiles."""

import json
import logging
import math
import pickle
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from jaxspec.compile_cache import FileStore
from jaxspec.engine.fingerprint import NotKeptError, digest_of, key_of

logger = logging.getLogger("jaxspec.cache")

# jaxlib has crashed on a CPU while it wrote one executable and compiled another; here at least they never write at once.
_writing = threading.Lock()


@dataclass(frozen=True)
class Executable:
    """
    Attributes:
        compiled: to be called.
        kernels: what it runs, operation -> implementations.
    """

    compiled: jax.stages.Compiled
    kernels: Mapping[str, frozenset[str]]


class ExecutableStore:
    """Keeps executables for one mesh. Without a file store it keeps nothing."""

    def __init__(self, files: FileStore | None, mesh: Mesh):
        self._files, self._mesh = files, mesh
        self._devices = tuple(mesh.devices.flat)
        self._unsaved: list[tuple[str | None, Executable]] = []

    def __reduce__(self) -> tuple[type, tuple[FileStore | None, Mesh]]:
        """For another process: what is unsaved stays here."""
        return ExecutableStore, (self._files, self._mesh)

    def key(self, what: str, *values: Any) -> str | None:
        """The name of what follows from `values`; None if it cannot be kept."""
        if self._files is None:
            return None
        try:
            return key_of(what, self._devices, *values)
        except NotKeptError as error:
            logger.info("%s is not kept: %s", what, error)
            return None

    def digest(self, *values: Any) -> Any:
        """What `key` may be given for values that many keys follow from: describing hundreds of arrays takes 0.2 s."""
        if self._files is None:
            return None
        try:
            return digest_of(*values)
        except NotKeptError:  # `key` will say so
            return values

    def has(self, key: str | None) -> bool:
        """Whether something is kept under a key, sound or not."""
        return self._files is not None and key is not None and self._files.has(key)

    def load(self, key: str | None) -> Executable | None:
        """What is kept under a key; None if nothing is, or if it does not load here."""
        if self._files is None or key is None or (data := self._files.read(key)) is None:
            return None
        began = time.monotonic()
        try:
            serialized, in_tree, out_tree, kernels = pickle.loads(data)
            compiled = deserialize_and_load(serialized, in_tree, out_tree, execution_devices=self._devices)
        except Exception as error:  # jaxlib raises many kinds for what it does not understand
            logger.warning("not used: %s (%s)", key, _first_line(error))
            return None
        logger.debug("loaded %s in %.2f s", key, time.monotonic() - began)
        return Executable(compiled, {name: frozenset(ran) for name, ran in kernels.items()})

    def save(self, key: str | None, executable: Executable) -> None:
        """Keeps an executable. On a CPU nothing may compile meanwhile."""
        if self._files is None or key is None:
            return
        with _writing:
            try:
                serialized, in_tree, out_tree = serialize(executable.compiled)
                kernels = {name: sorted(ran) for name, ran in executable.kernels.items()}
                data = pickle.dumps((serialized, in_tree, out_tree, kernels))
            except Exception as error:  # as above
                logger.warning("not kept: %s (%s)", key, _first_line(error))
                return
            self._files.write(key, data)

    def load_or_make(self, key: str | None, make: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        """A small executable without kernels; a new one is kept at the next `flush`."""
        kept = self.load(key)
        if kept is None:
            kept = Executable(make(), {})
            self._unsaved.append((key, kept))
        return kept.compiled

    def flush(self) -> None:
        """Keeps what `load_or_make` has made. On a CPU nothing may compile meanwhile."""
        while self._unsaved:
            self.save(*self._unsaved.pop())

    def load_record(self, key: str | None, names: Collection[str]) -> dict[str, float] | None:
        """Positive numbers of these names that were measured with executables of the same key; None if nothing is kept.

        What is kept but is no such record is as if it were absent.
        """
        if self._files is None or key is None or (data := self._files.read(key)) is None:
            return None
        try:
            record = json.loads(data)
        except ValueError:
            record = None
        sound = isinstance(record, dict) and record.keys() == set(names)
        if not sound or not all(type(value) in (int, float) and 0 < value < math.inf for value in record.values()):
            logger.warning("not used: %s (it is no record of %s)", key, ", ".join(names))
            return None
        return record

    def save_record(self, key: str | None, record: Mapping[str, float]) -> None:
        if self._files is not None and key is not None:
            self._files.write(key, json.dumps(record).encode())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
