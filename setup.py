"""Adds to pyproject.toml what it cannot say: the commit goes into the package's metadata, where `serve.version` reads it."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # build backends leave it out

from serve.version import COMMIT_FILE, git_commit  # noqa: E402


class EggInfo(egg_info):
    """Wheels take all files of this folder into their metadata."""

    def run(self) -> None:
        super().run()
        commit = git_commit(ROOT)
        if commit:  # else a source archive's own stays
            (Path(self.egg_info) / COMMIT_FILE).write_text(f"{commit}\n", encoding="utf-8")


setup(cmdclass={"egg_info": EggInfo})
