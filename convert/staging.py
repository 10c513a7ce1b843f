"""Folders that appear only when they are complete.

A folder is built under a temporary name beside its destination and renamed into place. While its writer lives it holds
a lock (flock) on the temporary folder; the kernel drops the lock when a process dies however it dies, so the next
run can tell leftovers from work in progress.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxspec.loading.manifest import STAGING_INFIX

# Attempts to remove a temporary folder: two seconds of them.
REMOVALS = 100

# Called with the name of a point that conversion has reached; tests kill the process there.
OnEvent = Callable[[str], None]


@contextmanager
def staged(out: Path, on_event: OnEvent) -> Iterator[Path]:
    """A new temporary folder that becomes `out` when the block ends without an exception.

    `out` may be absent, empty, or a folder that the caller has decided to replace; it stays as it is until the new one
    is complete. Leftovers of killed runs for the same `out` are removed first.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)
    folder, lock = _locked_folder(out)
    try:
        yield folder
        _sync(folder)
        _swap_in(folder, out, on_event)
    finally:
        _remove(folder)
        os.close(lock)


def _remove(folder: Path) -> None:
    """Again for a while: where writing failed, other threads of Orbax may still be about to create a file."""
    for _ in range(REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.02)


def _name(out: Path) -> str:
    return f".{out.name}{STAGING_INFIX}{secrets.token_hex(4)}"


def _locked_folder(out: Path) -> tuple[Path, int]:
    while True:
        folder = out.parent / _name(out)
        folder.mkdir()
        # Until it is locked, another run may remove it as a leftover, before it is opened or after.
        with suppress(FileNotFoundError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if folder.exists():
                return folder, fd
            os.close(fd)


def _remove_leftovers(out: Path) -> None:
    for folder in out.parent.glob(f".{_escape(out.name)}{STAGING_INFIX}*"):
        with suppress(FileNotFoundError, NotADirectoryError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            except BlockingIOError:
                pass  # its writer is alive
            finally:
                os.close(fd)


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _swap_in(folder: Path, out: Path, on_event: OnEvent) -> None:
    """Renames `folder` to `out`. A non-empty `out` is moved aside first, and back if the rename fails."""
    with _locked(out.parent):  # if two finish together, the later one replaces the earlier one
        if not out.exists() or not any(out.iterdir()):
            on_event("rename into place")
            folder.rename(out)
        else:
            old = out.parent / _name(out)
            with _locked(out):  # else another run would remove it as a leftover under its new name
                on_event("rename the old one away")
                out.rename(old)
                try:
                    on_event("rename into place")
                    folder.rename(out)
                except BaseException:
                    old.rename(out)
                    raise
                shutil.rmtree(old)
    _sync_folder(out.parent)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _sync(folder: Path) -> None:
    """Flushes every file and folder below `folder`, so that the rename never outruns the contents."""
    for parent, _, files in os.walk(folder):
        for name in files:
            fd = os.open(os.path.join(parent, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        _sync_folder(Path(parent))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)
