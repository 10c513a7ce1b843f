"""SHA-256 of the source shards, computed on a thread during the conversion.

Hashing reads every shard in order shortly before the conversion does, so that the bytes come from the disk once.
"""

import hashlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

_CHUNK = 4 * 2**20


class ShardDigests:
    """Starts hashing when entered; `result()` waits for {file name: hexadecimal SHA-256}. Leaving stops it."""

    def __init__(self, files: Iterable[Path]):
        self._files = list(files)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sha256")

    def __enter__(self) -> "ShardDigests":
        self._future = self._pool.submit(lambda: {f.name: self._digest(f) for f in self._files})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._pool.shutdown()

    def result(self) -> dict[str, str]:
        return self._future.result()

    def _digest(self, file: Path) -> str:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_CHUNK))
        with file.open("rb", buffering=0) as f:
            while not self._stop.is_set() and (count := f.readinto(buffer)):
                digest.update(buffer[:count])
        return digest.hexdigest()
