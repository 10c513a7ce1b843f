"""Conversions killed at every point where they could leave files, and conversions that run at the same time."""

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from convert.convert import convert_checkpoint
from convert.staging import staged
from jaxspec.errors import ModelFormatError
from jaxspec.loading.checkpoint import load_params, open_checkpoint
from jaxspec.loading.manifest import is_staging, read_manifest
from tests.convert.edits import edit_config

pytestmark = pytest.mark.torch
Get = Callable[[str], Path]

FRESH = [*(f"part {p} written" for p in ("embed", "000", "001", "002", "head", "mtp")), "rename into place"]
REPLACING = [*FRESH[:-1], "rename the old one away", "rename into place"]
# Written by the same code as the layer between them and what comes last.
ALIKE = ("part 000 written", "part 002 written", "part head written")


# A process that is killed leaves the same kinds of files behind, whichever part it was at.
OTHER_PARTS = ("part embed written", "part mtp written")


def each(points: list[str], *, alike: tuple[str, ...] = ALIKE) -> list[Any]:
    return [pytest.param(point, marks=pytest.mark.full) if point in alike else point for point in points]


# One process imports what converting needs, and those that are killed are forked from it.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload([__name__])


class Killed(BaseException):
    pass


def kill_at(point: str) -> Callable[[str], None]:
    def on_event(name: str) -> None:
        if name == point:
            raise Killed

    return on_event


def convert_until(point: str, source: Path, out: Path) -> None:
    def die(name: str) -> None:
        if name == point:
            os._exit(9)

    convert_checkpoint(source, out, on_event=die)


def killed_conversion(point: str, source: Path, out: Path) -> None:
    """Converts in another process, which ends at the point as if it were killed."""
    process = processes.Process(target=convert_until, args=(point, source, out))
    process.start()
    process.join()
    assert process.exitcode == 9


def loads(path: Path) -> bool:
    try:
        read_manifest(path)
    except ModelFormatError:
        return False
    return True


def old_conversion(source: Path, out: Path) -> None:
    convert_checkpoint(source, out)
    manifest = json.loads((out / "manifest.json").read_text()) | {"layout_version": 0}
    (out / "manifest.json").write_text(json.dumps(manifest))


def test_the_points(source: Get, tmp_path: Path):
    """A new point in the code is a new row in the tests below."""
    seen: list[str] = []
    convert_checkpoint(source("v3-mtp"), tmp_path / "out", on_event=seen.append)
    assert seen == FRESH
    seen.clear()
    convert_checkpoint(source("v3-mtp"), tmp_path / "out", on_event=seen.append)
    assert seen == REPLACING
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
@pytest.mark.parametrize("point", each(FRESH, alike=(*ALIKE, *OTHER_PARTS)))
def test_killed_process_leaves_nothing_that_loads(point: str, source: Get, tmp_path: Path, mesh):
    out = tmp_path / "out"
    killed_conversion(point, source("v3-mtp"), out)
    left = list(tmp_path.iterdir())
    assert left, "the leftovers are what this test is about"
    assert not any(loads(path) for path in left)
    convert_checkpoint(source("v3-mtp"), out)
    assert list(tmp_path.iterdir()) == [out]
    load_params(open_checkpoint(out), mesh)


@pytest.mark.long
@pytest.mark.parametrize("point", each(REPLACING, alike=(*ALIKE, *OTHER_PARTS)))
def test_killed_process_that_was_replacing_an_older_conversion(point: str, source: Get, tmp_path: Path):
    out = tmp_path / "out"
    old_conversion(source("v3-mtp"), out)
    killed_conversion(point, source("v3-mtp"), out)
    assert not any(loads(path) for path in tmp_path.iterdir())
    convert_checkpoint(source("v3-mtp"), out)
    assert list(tmp_path.iterdir()) == [out]
    assert loads(out)


@pytest.mark.parametrize("point", each(FRESH))
def test_exception_leaves_nothing(point: str, source: Get, tmp_path: Path):
    """Control-C and the like, where the process lives long enough to clean up."""
    with pytest.raises(Killed):
        convert_checkpoint(source("v3-mtp"), tmp_path / "out", on_event=kill_at(point))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("point", each(REPLACING))
def test_exception_leaves_the_older_conversion(point: str, source: Get, tmp_path: Path):
    out = tmp_path / "out"
    old_conversion(source("v3-mtp"), out)
    with pytest.raises(Killed):
        convert_checkpoint(source("v3-mtp"), out, on_event=kill_at(point))
    assert list(tmp_path.iterdir()) == [out]
    assert json.loads((out / "manifest.json").read_text())["layout_version"] == 0


def test_a_failed_conversion_leaves_a_good_one_alone(converted: Get, source: Get, tmp_path: Path):
    out = shutil.copytree(converted("llama"), tmp_path / "out")
    bad = shutil.copytree(source("llama"), tmp_path / "bad")
    edit_config(bad, intermediate_size=97)
    with pytest.raises(ModelFormatError):
        convert_checkpoint(bad, out)
    assert loads(out)


def test_work_in_progress_is_not_a_leftover(tmp_path: Path):
    """A second run for the same output must not take the first one's folder away."""
    out = tmp_path / "out"
    with staged(out, lambda _: None) as first:
        (first / "x").write_text("first")
        with pytest.raises(Killed), staged(out, lambda _: None):
            raise Killed
        assert (first / "x").read_text() == "first"
    assert (out / "x").read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]


def test_another_run_takes_a_folder_away_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken: list[Path] = []
    mkdir = Path.mkdir

    def mkdir_and_lose_the_first(self: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(self, *args, **kwargs)
        if is_staging(self) and not taken:
            taken.append(self)
            self.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir_and_lose_the_first)
    with staged(tmp_path / "out", lambda _: None) as folder:
        assert taken
        assert folder not in taken
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_the_old_one_is_no_leftover_while_it_is_being_replaced(tmp_path: Path):
    """A run that starts between the two renames must leave the old one where it can be brought back from."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "x").write_text("old")

    def another_run_then_failure(point: str) -> None:
        if point == "rename into place":
            with suppress(Killed), staged(out, lambda _: None):
                raise Killed
            raise Killed

    with pytest.raises(Killed), staged(out, another_run_then_failure):
        pass
    assert (out / "x").read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_leftovers_of_other_outputs_stay(tmp_path: Path):
    (tmp_path / ".other.tmp-0123").mkdir()
    (tmp_path / ".out.tmp-0123").mkdir()
    (tmp_path / ".out.tmp-file").touch()
    with staged(tmp_path / "out", lambda _: None):
        pass
    assert {p.name for p in tmp_path.iterdir()} == {".other.tmp-0123", ".out.tmp-file", "out"}


def test_parallel_conversions_to_one_output(source: Get, tmp_path: Path, mesh):
    """Each builds its own folder; whichever is renamed last is whole."""
    threads = [threading.Thread(target=convert_checkpoint, args=(source("llama"), tmp_path / "out")) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    load_params(open_checkpoint(tmp_path / "out"), mesh)


def test_umask_does_not_lock_others_out(source: Get, tmp_path: Path):
    old = os.umask(0o022)
    try:
        convert_checkpoint(source("llama"), tmp_path / "out")
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
