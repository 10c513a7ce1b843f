"""What runs here."""

import platform
from importlib import metadata

import jaxspec


def version() -> dict[str, str]:
    """jaxspec and what it runs on, without importing any of it."""
    packages = ("jaxspec", "jax", "jaxlib", "flax", "transformers", "fastapi")
    return {"python": platform.python_version()} | {name: _package_version(name) for name in packages}


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return jaxspec.__version__ if name == "jaxspec" else "not installed"
