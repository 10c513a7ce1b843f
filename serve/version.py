"""What runs here: the versions and the commit."""

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import jaxspec

_ROOT = Path(__file__).resolve().parents[1]
_GIT_SECONDS = 10


def version() -> dict[str, str]:
    """jaxspec with its commit, and what it runs on, without importing any of it. May run git."""
    packages = ("jax", "jaxlib", "flax", "transformers", "fastapi")
    return {
        "jaxspec": jaxspec.__version__,
        "commit": commit() or "unknown",
        "python": platform.python_version(),
        **{name: _package_version(name) for name in packages},
    }


def commit() -> str | None:
    """The commit of this code: from $JAXSPEC_COMMIT, from git in a checkout, or from the installed package's metadata.

    pip records it there (PEP 610) when it installs from a git URL. None where nothing tells.
    """
    return os.environ.get("JAXSPEC_COMMIT") or git_commit(_ROOT) or _recorded_commit()


def git_commit(root: Path) -> str | None:
    """The commit that is checked out at `root`, marked where files differ from it.

    None if `root` is not the top of a checkout (site-packages may lie inside somebody else's) or git cannot tell.
    """
    if not (root / ".git").exists():  # a file in a worktree
        return None
    head = _git(root, "rev-parse", "HEAD")
    if head and _git(root, "status", "--porcelain", "--untracked-files=no"):
        head += " with local changes"
    return head


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _recorded_commit() -> str | None:
    try:
        distribution = metadata.distribution("jaxspec")
    except metadata.PackageNotFoundError:
        return None
    # The code that runs need not be the package that is installed.
    if Path(str(distribution.locate_file("serve"))).resolve() != _ROOT / "serve":
        return None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return origin.get("vcs_info", {}).get("commit_id")


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
