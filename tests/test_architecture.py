"""The order of the folders, private names, the length of files, and who owns the top-level names.

The checks take a tree, so that they are tested on small trees with a planted fault.
"""

import ast
import importlib.metadata
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(jaxspec.__file__).parents[1]
PRODUCT = ("pallas_kernels", "jaxspec", "convert", "serve")
FOLDERS = (*PRODUCT, "bench", "tests")
MAX_LINES = 500

_DOTTED = re.compile(rf"({'|'.join(FOLDERS)})(\.\w+)+")

# From the bottom up: a module may import its own part of a layer and all layers below, but no neighbour in its layer.
LAYERS = (
    ("pallas_kernels",),
    ("jaxspec.errors", "jaxspec.compat", "jaxspec.comm", "jaxspec.demo", "jaxspec.progress"),
    ("jaxspec.pool", "jaxspec.lookup", "jaxspec.defaults"),
    ("jaxspec.config", "jaxspec.compile_cache", "jaxspec.chat_template"),
    ("jaxspec.models", "jaxspec.sampling", "jaxspec.speculative_config", "jaxspec.nodes"),
    ("jaxspec.engine",),
    ("jaxspec.text",),
    ("jaxspec.grammar",),
    ("jaxspec.loading",),
    ("jaxspec.llm",),
    ("jaxspec",),
    ("convert",),
    ("serve",),
    ("bench",),
    ("tests",),
)
# What is further below and still none of a folder's business.
KNOWS_NOTHING_OF = {"convert": ("pallas_kernels", "jaxspec.engine"), "serve": ("pallas_kernels", "jaxspec.models")}


class Tree:
    """The Python files of a checkout."""

    def __init__(self, root: Path):
        files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        self.files = {_module(path.relative_to(root)): path for path in files}
        self.packages = {module[:i] for module in self.files for i, c in enumerate(module) if c == "."}
        self.parsed = {module: ast.parse(path.read_text()) for module, path in self.files.items()}

    def imports(self, module: str) -> Iterator[tuple[int, str]]:
        """Line and module of everything of ours that a module imports anywhere, inside functions too."""
        for node in ast.walk(self.parsed[module]):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}:{node.lineno} has a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in self.files or name in self.packages else str(node.module) for name in names]
            for name in names:
                if name.split(".")[0] in FOLDERS:
                    yield node.lineno, name


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _place(module: str) -> tuple[int, str]:
    """The layer of a module, and its part of the layer: the longest that it is in."""
    places = [(i, part) for i, parts in enumerate(LAYERS) for part in parts if f"{module}.".startswith(f"{part}.")]
    return max(places, key=lambda place: len(place[1]))


def upward_imports(tree: Tree) -> list[str]:
    """Imports of a higher layer, of a neighbour, or of what a folder should know nothing of."""
    found = []
    for module in tree.files:
        layer, part = _place(module)
        for line, name in tree.imports(module):
            other_layer, other = _place(name)
            unknown = other in KNOWS_NOTHING_OF.get(part, ())
            if other != part and (other_layer >= layer or unknown):
                found.append(f"{module}:{line} imports {name}")
    return found


def private_uses(tree: Tree) -> list[str]:
    """Private names of one of our modules or classes that another module imports or uses.

    An attribute of an object counts where another file defines such a name and this one does not.
    """
    defined = {module: _private_definitions(parsed) for module, parsed in tree.parsed.items()}
    everywhere = set().union(*defined.values())
    found = []
    for module, parsed in tree.parsed.items():
        bound = _bound_modules(tree, parsed)
        for node in ast.walk(parsed):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in FOLDERS:
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and _DOTTED.fullmatch(str(node.value)):
                names = str(node.value).split(".")
            elif isinstance(node, ast.Attribute):
                head, _, rest = ast.unparse(node.value).partition(".")
                of_module = ".".join(filter(None, (bound.get(head), rest))) in tree.files
                names = [node.attr] if of_module or node.attr in everywhere - defined[module] else []
            found += [f"{module}:{node.lineno} uses {name}" for name in names if _is_private(name)]
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _bound_modules(tree: Tree, parsed: ast.Module) -> dict[str, str]:
    """Name -> our module or package that an import binds it to."""
    bound = {}
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            bound |= {alias.asname: alias.name for alias in node.names if alias.asname}
            bound |= {name: name for alias in node.names for name in [alias.name.split(".")[0]] if not alias.asname}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: module for name, module in bound.items() if module in tree.files or module in tree.packages}


def _private_definitions(parsed: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return {name for name in names if _is_private(name)}


def long_files(tree: Tree) -> list[str]:
    lengths = {module: len(path.read_text().splitlines()) for module, path in tree.files.items()}
    return [f"{module} has {length} lines" for module, length in lengths.items() if length > MAX_LINES]


CHECKS = (upward_imports, private_uses, long_files)


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_the_tree_is_in_order(check: Callable[[Tree], list[str]], tree: Tree):
    assert check(tree) == []


SOUND = {
    "pallas_kernels/moe/api.py": "_TILE = 8\n",
    "jaxspec/__init__.py": "",
    "jaxspec/errors.py": "",
    "jaxspec/models/moe.py": "from pallas_kernels.moe import api\n\n\nclass Moe:\n    def f(self):\n        self._x = 1\n",
    "jaxspec/engine/step.py": "import jaxspec.models.moe\n",
    "jaxspec/engine/runner.py": "from jaxspec.engine import step\n",
    "jaxspec/loading/engine.py": "from jaxspec.engine.runner import run\n",
    "jaxspec/llm.py": "def build():\n    import jaxspec.loading.engine\n",
    "convert/convert.py": "import jaxspec.loading.engine\n",
    "serve/cli.py": "from jaxspec import LLM\nimport argparse\n\nargparse._ActionsContainer\n",
    "bench/step/step.py": "import serve.cli\n",
    "tests/test_x.py": "import bench.step.step\n",
}
PLANTED = [
    (upward_imports, "jaxspec/models/mla.py", "import jaxspec.engine.step\n", "imports jaxspec.engine.step"),
    (upward_imports, "jaxspec/models/mla.py", "from jaxspec.engine import step\n", "imports jaxspec.engine.step"),
    (upward_imports, "jaxspec/models/mla.py", "from jaxspec import LLM\n", "imports jaxspec"),
    (upward_imports, "jaxspec/models/mla.py", "def f():\n    import jaxspec.sampling\n", "imports jaxspec.sampling"),
    (upward_imports, "jaxspec/loading/hub.py", "import convert.convert\n", "imports convert.convert"),
    (upward_imports, "pallas_kernels/mla/api.py", "import jaxspec.errors\n", "imports jaxspec.errors"),
    (upward_imports, "serve/app.py", "import bench.step.step\n", "imports bench.step.step"),
    (upward_imports, "serve/app.py", "import jaxspec.models.moe\n", "imports jaxspec.models.moe"),
    (upward_imports, "bench/step/load.py", "import tests.test_x\n", "imports tests.test_x"),
    (private_uses, "pallas_kernels/moe/mosaic.py", "from pallas_kernels.moe.api import _TILE\n", "uses _TILE"),
    (private_uses, "jaxspec/models/mla.py", "from pallas_kernels.moe import api\n\napi._TILE\n", "uses _TILE"),
    (private_uses, "jaxspec/models/mla.py", "import pallas_kernels.moe.api as a\n\n_TILE = a._TILE\n", "uses _TILE"),
    (private_uses, "jaxspec/models/mla.py", "import pallas_kernels.moe.api\n\npallas_kernels.moe.api._x\n", "uses _x"),
    (private_uses, "jaxspec/models/mla.py", "from pallas_kernels.moe.api import _TILE\n\n_TILE = 8\n", "uses _TILE"),
    (private_uses, "bench/step/load.py", "def f(moe):\n    return moe._x\n", "uses _x"),
    (private_uses, "tests/test_y.py", 'def f(patch):\n    patch("pallas_kernels.moe.api._TILE")\n', "uses _TILE"),
    (long_files, "bench/step/load.py", "pass\n" * 501, "has 501 lines"),
]


@pytest.mark.parametrize(("check", "path", "text", "message"), PLANTED)
def test_a_planted_fault_is_found(check: Callable, path: str, text: str, message: str, tmp_path: Path):
    for name, content in (SOUND | {path: text}).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    module = _module(Path(path))
    found = {each: each(Tree(tmp_path)) for each in CHECKS}
    assert len(found[check]) == 1
    assert found[check][0].startswith(module)
    assert found[check][0].endswith(message)
    assert not any(found[each] for each in CHECKS if each is not check)


@pytest.mark.parametrize("name", PRODUCT)
def test_each_top_level_name_has_one_owner(name):
    owners = set(importlib.metadata.packages_distributions().get(name, []))
    assert owners <= {"jaxspec"}, f"{name} also belongs to {owners - {'jaxspec'}}"


def test_embedded_models_stay_small():
    """What git carries: 30 MiB in all, no file over 14 MiB."""
    sizes = [p.stat().st_size for p in (ROOT / "jaxspec" / "demo").rglob("*") if p.is_file()]
    assert sum(sizes) <= 30 * 2**20
    assert max(sizes) <= 14 * 2**20
