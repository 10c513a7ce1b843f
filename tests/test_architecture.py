"""The layers of the code base: who may import whom, how long files are, and who owns the top-level names."""

import ast
import importlib.metadata
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(jaxspec.__file__).parents[1]
PACKAGES = ("jaxspec", "pallas_kernels", "convert", "serve")
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))

# The first matching prefix is a file's layer; a layer may import itself and the layers named.
LAYERS = {
    "pallas_kernels.backend": (),
    "pallas_kernels": ("pallas_kernels.backend",),
    "jaxspec.errors": (),
    "jaxspec.compat": (),
    "jaxspec.compile_cache": ("jaxspec.errors",),
    "jaxspec.config": ("jaxspec.errors",),
    "jaxspec.sampling": ("jaxspec.errors", "pallas_kernels"),
    "jaxspec.models": ("jaxspec.errors", "pallas_kernels"),
    "jaxspec.engine": (
        "jaxspec.errors", "jaxspec.config", "jaxspec.compat", "jaxspec.models", "jaxspec.sampling",
        "pallas_kernels.backend",
    ),
    "jaxspec.text": ("jaxspec.errors", "jaxspec.sampling", "jaxspec.engine"),
    "jaxspec.loading": (
        "jaxspec.errors", "jaxspec.config", "jaxspec.compile_cache", "jaxspec.models", "jaxspec.engine", "jaxspec.text",
        "jaxspec.demo",
    ),
    # Compares through the public API.
    "convert.compare_command": ("convert", "convert.compare", "jaxspec.llm"),
    "convert.compare": ("convert", "jaxspec.errors", "jaxspec.sampling", "jaxspec.llm"),
    "convert": (
        "jaxspec.errors", "jaxspec.models", "jaxspec.config", "jaxspec.text", "jaxspec.loading", "jaxspec.demo",
    ),
    "jaxspec.llm": (
        "jaxspec.errors", "jaxspec.config", "jaxspec.compile_cache", "jaxspec.models", "jaxspec.engine",
        "jaxspec.sampling", "jaxspec.text", "jaxspec.loading", "convert",
    ),
    "jaxspec.demo": (),
    "serve": (
        "jaxspec.errors", "jaxspec.config", "jaxspec.compat", "jaxspec.engine", "jaxspec.sampling", "jaxspec.text",
        "jaxspec.llm", "jaxspec.loading", "convert", "convert.compare_command",
    ),
    "jaxspec": ("jaxspec.config", "jaxspec.sampling", "jaxspec.llm"),
}  # fmt: skip


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer_of(module: str) -> str:
    return next(name for name in LAYERS if module == name or module.startswith(name + "."))


def imports(path: Path) -> set[str]:
    """Our own modules that a file imports anywhere, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in (*PACKAGES, "bench", "tests")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    layer = layer_of(module_name(path))
    for name in imports(path):
        assert name.split(".")[0] in PACKAGES, f"{path} imports {name}"
        if name in ("jaxspec.__version__",):
            continue
        target = layer_of(name) if name != "jaxspec" else "jaxspec"
        allowed = (layer, *LAYERS[layer], "jaxspec")
        assert target in allowed, f"{path} ({layer}) must not import {name} ({target})"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_idea(path):
    assert len(path.read_text().splitlines()) <= 700


@pytest.mark.parametrize("name", PACKAGES)
def test_each_top_level_name_has_one_owner(name):
    owners = set(importlib.metadata.packages_distributions().get(name, []))
    assert owners <= {"jaxspec"}, f"{name} also belongs to {owners - {'jaxspec'}}"


def test_embedded_models_stay_small():
    """What git carries: 30 MiB in all, no file over 14 MiB."""
    sizes = [p.stat().st_size for p in (ROOT / "jaxspec" / "demo").rglob("*") if p.is_file()]
    assert sum(sizes) <= 30 * 2**20
    assert max(sizes) <= 14 * 2**20
