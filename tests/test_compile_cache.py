"""The folder of compiled steps: this user's alone, bounded, and of no use to anybody who would plant a file in it."""

import os

import pytest

from jaxspec.compile_cache import OFF, FileStore, open_store
from jaxspec.errors import ConfigError


@pytest.fixture
def store(tmp_path):
    tmp_path.chmod(0o700)
    return FileStore(tmp_path)


def test_a_new_folder_is_closed_to_others(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    store = open_store(None)
    assert store.folder == tmp_path / "executables"
    assert store.folder.stat().st_mode & 0o777 == 0o700


def test_off():
    assert open_store(OFF) is None


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="yours alone"):
        open_store(str(tmp_path))


def test_a_folder_that_cannot_be_made_is_an_error_only_where_it_was_asked_for(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--compilation-cache-dir"):
        open_store(str(tmp_path / "file" / "inside"))
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "file"))
    assert open_store(None) is None
    assert "compiled steps are not kept" in caplog.text


def test_what_was_written_is_read(store):
    assert store.read("a") is None
    store.write("a", b"one")
    store.write("a", b"two")
    assert store.read("a") == b"two"
    assert (store.folder / "a").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in store.folder.iterdir()] == ["a"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_version(path):
    path.write_bytes(path.read_bytes().replace(b"executable 1", b"executable 0"))


def linked(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "spoil", [truncate, flip, other_version, linked, folder, lambda p: p.write_bytes(b""), lambda p: p.chmod(0o622)]
)
def test_a_file_that_is_not_as_it_was_written_is_absent(store, spoil, caplog):
    store.write("a", b"content")
    spoil(store.folder / "a")
    assert store.read("a") is None
    assert len(caplog.records) == 1
    assert "not used" in caplog.text


def test_a_file_of_another_user_is_absent(store, monkeypatch, caplog):
    store.write("a", b"content")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert store.read("a") is None
    assert "others may have written it" in caplog.text


def test_the_longest_unused_are_dropped(tmp_path):
    store = FileStore(tmp_path, limit_bytes=3500)
    for number, name in enumerate("abc"):
        store.write(name, bytes(1000))
        os.utime(tmp_path / name, (number, number))
    assert store.read("a")  # now b is the longest unused
    (tmp_path / "killed.unfinished").write_bytes(b"")
    os.utime(tmp_path / "killed.unfinished", (0, 0))
    store.write("d", bytes(1000))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "c", "d"]


def test_a_full_disk_is_one_line(store, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    store.write("a", b"content")
    assert store.read("a") is None
    assert len(caplog.records) == 1
    assert not list(store.folder.iterdir())
