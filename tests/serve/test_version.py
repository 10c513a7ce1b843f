"""Where the commit comes from: the environment, git in a checkout, an installed package's metadata."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve.version import commit, git_commit, version

ROOT = Path(__file__).parents[2]


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    shutil.copy(ROOT / "README.md", folder)
    (folder / "serve").mkdir()
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "serve" / name, folder / "serve")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def commit_of(folder: Path) -> str:
    """What the code in a folder says of itself."""
    code = "from serve.version import commit; print(commit())"
    environment = {name: value for name, value in os.environ.items() if name != "JAXSPEC_COMMIT"}
    environment["PYTHONPATH"] = str(ROOT)  # for what the folder lacks
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_checkout(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    assert git_commit(checkout) == head
    assert commit_of(checkout) == head
    (checkout / "new").touch()  # untracked files change nothing that runs
    assert git_commit(checkout) == head
    (checkout / "README.md").write_text("changed")
    assert git_commit(checkout) == f"{head} with local changes"


def test_a_folder_inside_a_checkout_is_not_that_checkout(checkout):
    assert git_commit(checkout / "serve") is None


def test_no_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_commit(checkout) is None


def test_not_a_working_repository(tmp_path):
    (tmp_path / ".git").mkdir()
    assert git_commit(tmp_path) is None


def test_the_environment_comes_first(monkeypatch):
    monkeypatch.setenv("JAXSPEC_COMMIT", "abc")
    assert commit() == "abc"
    assert version()["commit"] == "abc"


def test_nobody_knows(tmp_path):
    shutil.copytree(ROOT / "serve", tmp_path / "serve", ignore=shutil.ignore_patterns("__pycache__"))
    assert commit_of(tmp_path) == "None"


@pytest.mark.parametrize(
    ("origin", "commit"),
    [
        ({"url": "https://example.com/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}, "abc"),
        ({"url": "file:///x", "dir_info": {}}, "None"),
        (None, "None"),
    ],
)
def test_an_installed_package(tmp_path, origin, commit):
    shutil.copytree(ROOT / "serve", tmp_path / "serve", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = tmp_path / "jaxspec-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxspec\nVersion: 0.1.0\n")
    if origin:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    assert commit_of(tmp_path) == commit
