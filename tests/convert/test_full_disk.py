"""Disks that are full or may not be written: one line, nothing half-written, and what was there is unchanged."""

import errno
import multiprocessing
import os
import resource
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convert.convert import convert_checkpoint
from convert.digests import ShardDigests
from convert.staging import staged
from jaxspec.errors import ConfigError, ModelFormatError
from jaxspec.loading.manifest import read_manifest
from jaxspec.loading.tokenizer_files import load_tokenizer
from serve.cli import main
from tests.eagle3_models import tiny_draft

# As tensorstore reports it.
TENSORSTORE = (
    'RESOURCE_EXHAUSTED: Error writing "fc/0.0" in OCDBT database at local file "x":\n'
    "Failed to write 179 bytes to file 15: No space left on device [os_error_code='28']"
)
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload([__name__])


def full(*_args: Any, **_options: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_checkpointer() -> AbstractContextManager[Any]:
    def save(*_args: Any, **_options: Any) -> None:
        raise ValueError(TENSORSTORE)

    return nullcontext(SimpleNamespace(save=save))


POINTS: list[tuple[str, Callable[..., Any]]] = [
    ("convert.writer.checkpointer", full_checkpointer),
    ("convert.convert.write_json", full),
    ("convert.convert.copy_tokenizer", full),
    ("convert.convert.write_manifest", full),
    ("os.fsync", full),
    ("pathlib.Path.mkdir", full),
    ("pathlib.Path.rename", full),
]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_draft(tmp_path_factory.mktemp("drafts") / "draft")


@pytest.fixture(scope="module")
def converted(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_checkpoint(draft, tmp_path_factory.mktemp("converted") / "draft")


@pytest.mark.parametrize(("where", "fail"), POINTS, ids=[where for where, _ in POINTS])
def test_a_full_disk_leaves_nothing(where: str, fail: Callable[..., Any], draft: Path, tmp_path: Path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        with pytest.raises(ConfigError) as caught:
            convert_checkpoint(draft, out)
    assert str(caught.value) == f"cannot convert into {out}: No space left on device; what was there is unchanged"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("where", "fail"), POINTS, ids=[where for where, _ in POINTS])
def test_a_full_disk_leaves_the_older_conversion(
    where: str, fail: Callable[..., Any], draft: Path, converted: Path, tmp_path: Path, monkeypatch
):
    out = shutil.copytree(converted, tmp_path / "out")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        with pytest.raises(ConfigError, match="No space left on device"):
            convert_checkpoint(draft, out)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    read_manifest(out)


def test_a_thread_that_still_writes_leaves_nothing(tmp_path: Path, monkeypatch):
    """Orbax gives up at the first error, while files of other arrays are being created."""
    remove, calls = shutil.rmtree, []

    def outrun(folder: Path, **options: Any) -> None:
        remove(folder, **options)
        calls.append(folder)
        if len(calls) < 3:
            folder.mkdir()
            (folder / "late").touch()

    monkeypatch.setattr(shutil, "rmtree", outrun)
    with pytest.raises(OSError, match="no space"), staged(tmp_path / "out", lambda _: None):
        raise OSError("no space")
    assert not list(tmp_path.iterdir())


def convert_with_small_files(source: Path, out: Path, most_bytes: int) -> None:
    """The limit of the process on a file's size: a true error of the file system, which any user can have."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    try:
        convert_checkpoint(source, out)
    except ConfigError as e:
        os._exit(7 if "File too large" in str(e) and "\n" not in str(e) else 8)
    os._exit(0)


@pytest.mark.long
@pytest.mark.parametrize("most_bytes", [0, 100, 4096, 40_000])
def test_files_that_cannot_grow(most_bytes: int, draft: Path, tmp_path: Path):
    process = processes.Process(target=convert_with_small_files, args=(draft, tmp_path / "out", most_bytes))
    process.start()
    process.join()
    assert process.exitcode == 7
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_known_before_the_work(draft: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1000))
    monkeypatch.setattr("convert.convert.write_part", lambda *_args: pytest.fail("work began"))
    with pytest.raises(
        ConfigError, match=rf"the converted model has .* GB, but the disk of {tmp_path} has 0\.00 GB free"
    ):
        convert_checkpoint(draft, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_command_says_it_in_one_line(draft: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("convert.convert.write_manifest", full)
    assert main(["convert", str(draft), str(tmp_path / "out")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        last == f"error: cannot convert into {tmp_path / 'out'}: No space left on device; what was there is unchanged"
    )


def test_a_source_that_cannot_be_read(draft: Path, tmp_path: Path, monkeypatch):
    def fail(*_args: Any) -> dict[str, str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "model.safetensors")

    monkeypatch.setattr(ShardDigests, "result", fail)
    with pytest.raises(ConfigError, match=r"Input/output error \(model\.safetensors\)"):
        convert_checkpoint(draft, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_no_room_for_the_copy_of_a_tokenizer(tmp_path: Path, monkeypatch):
    """It is loaded from a temporary copy without the files that name code."""
    (tmp_path / "tokenizer.json").write_text("{}")
    for where in ("shutil.copyfile", "tempfile.TemporaryDirectory"):
        with monkeypatch.context() as patch:
            patch.setattr(where, full)
            with pytest.raises(ModelFormatError, match="No space left on device"):
                load_tokenizer(tmp_path)
