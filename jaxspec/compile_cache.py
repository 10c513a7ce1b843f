"""The folder in which compiled steps, and what was measured with them, stay from one start to the next.

What is read from it is executed, so it belongs to this user alone, and so does each file. Files are whole or absent: they
are written under another name first, and carry a checksum. A file that is not what it should be is as if it were absent.
"""

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import time
from pathlib import Path

from jaxspec.errors import ConfigError

OFF = "off"
# All files together. Steps of a large model are about 14 MB each, and a server has at most 32, with those in two parts.
LIMIT_BYTES = 4 << 30
_MAGIC = b"jaxspec executable 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_UNFINISHED = ".unfinished"
_UNFINISHED_SECONDS = 3600

logger = logging.getLogger("jaxspec.cache")


class FileStore:
    """Named byte strings in a folder, of which the longest unused are dropped when they grow over a limit.

    No method raises for what the disk or others do: a start without this folder is slower, not wrong.
    """

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES):
        self.folder = folder
        self._limit = limit_bytes

    def has(self, name: str) -> bool:
        """Whether there is a file of a name, sound or not."""
        return (self.folder / name).is_file()

    def read(self, name: str) -> bytes | None:
        """What was written under a name; None if nothing was, or if the file is not as it was written."""
        path = self.folder / name
        try:
            data = _read_own(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("not used: %s (%s)", path, getattr(error, "strerror", None) or error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it is among the newest again
        return data

    def write(self, name: str, data: bytes) -> None:
        """Keeps `data` under a name, in place of what was there."""
        try:
            descriptor, unfinished = tempfile.mkstemp(_UNFINISHED, dir=self.folder)  # readable by this user only
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(data).digest())
                    file.write(data)
                os.replace(unfinished, self.folder / name)
            except BaseException:
                os.unlink(unfinished)
                raise
            self._drop_oldest(name)
        except OSError as error:
            logger.warning("not kept in %s: %s", self.folder, error.strerror or error)

    def _drop_oldest(self, newest: str) -> None:
        """Other processes may do the same meanwhile."""
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if path.name.endswith(_UNFINISHED):
                    if time.time() - status.st_mtime > _UNFINISHED_SECONDS:  # its writer was killed
                        path.unlink()
                elif stat.S_ISREG(status.st_mode):
                    found.append((path.name != newest, status.st_mtime, status.st_size, path))
        total = sum(size for _, _, size, _ in found)
        newest_first = sorted(found, key=lambda file: (not file[0], file[1]), reverse=True)
        while total > self._limit and newest_first:
            _, _, size, path = newest_first.pop()
            path.unlink(missing_ok=True)
            total -= size


def _read_own(path: Path) -> bytes:
    """The bytes of a sound file that nobody else can have written.

    Raises:
        OSError: it cannot be read. ValueError: it is not sound, or not ours.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ValueError("others may have written it")
        head = file.read(len(_MAGIC) + _DIGEST_BYTES)
        data = file.read()
    if head != _MAGIC + hashlib.sha256(data).digest():
        raise ValueError("it is damaged, or of another version")
    return data


def open_store(folder: str | None) -> FileStore | None:
    """The store of a folder that belongs to this user alone; None where nothing is to be kept.

    Args:
        folder: None for `executables` in $JAXSPEC_CACHE or ~/.cache/jaxspec; "off" for none.

    Raises:
        ConfigError: others have access to it, or the folder that was asked for cannot be made.
    """
    if folder == OFF:
        return None
    home = os.environ.get("JAXSPEC_CACHE") or Path.home() / ".cache" / "jaxspec"
    path = Path(folder).expanduser() if folder else Path(home).expanduser() / "executables"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        if folder:
            raise ConfigError(
                f"compilation_cache_dir (--compilation-cache-dir) {path} cannot be used: {error.strerror or error}"
            ) from error
        logger.warning("compiled steps are not kept: %s cannot be used (%s)", path, error.strerror or error)
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"the compilation cache {path} must be yours alone (chmod 700), because its files are executed; or set "
            f"compilation_cache_dir to another folder or to {OFF!r}"
        )
    return FileStore(path)
