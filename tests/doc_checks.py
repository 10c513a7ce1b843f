"""Checks of documentation: each takes a page and returns its complaints."""

import ast
import contextlib
import functools
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import bench.__main__
import jaxspec
from jaxspec.errors import UsageError
from serve import cli
from serve.flags import parse

ROOT = Path(jaxspec.__file__).parents[1]
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")
# Paths in code: the folders that git tracks.
_PATH = re.compile(r"(?:\.ci|bench|convert|docs|jaxspec|pallas_kernels|serve|tests)(?:/[\w.-]+)+/?")


@dataclass(frozen=True)
class Page:
    path: Path
    text: str

    @property
    def prose(self) -> str:
        return _FENCE.sub("", self.text)

    @property
    def links(self) -> list[str]:
        return _LINK.findall(_CODE.sub("", self.prose))

    @property
    def code_spans(self) -> list[str]:
        return _CODE.findall(self.prose)

    def blocks(self, *languages: str) -> list[str]:
        return [text for language, text in _FENCE.findall(self.text) if language.strip() in languages]


def read(path: Path) -> Page:
    return Page(path, path.read_text(encoding="utf-8"))


# --- links ---


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        name = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        same = sum(1 for other in found if re.fullmatch(re.escape(name) + r"(-\d+)?", other))
        found.add(f"{name}-{same}" if same else name)
    return found


def broken_links(page: Page) -> list[str]:
    complaints = []
    for link in page.links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve()
        if name and not target.exists():
            complaints.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8") if name else page.text):
            complaints.append(f"{link}: there is no such heading")
    return complaints


def linked_files(page: Page) -> set[Path]:
    return {(page.path.parent / link.partition("#")[0]).resolve() for link in page.links}


# --- commands ---


def commands(block: str) -> Iterator[list[str]]:
    """The commands of a shell block as words, without comments and settings of variables."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            cut = words.index("&&") if "&&" in words else len(words)
            command, words = words[:cut], words[cut + 1 :]
            while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                command = command[1:]
            if command:
                yield command


def check_jaxspec(words: list[str]) -> str | None:
    if words[:1] == ["bench"]:
        return check_bench(words[1:])
    try:
        parse(*cli.parsers(words), words)
    except UsageError as e:
        return str(e)
    return None


def check_bench(words: list[str]) -> str | None:
    """Arguments after `--` are those of `jaxspec serve`."""
    cut = words.index("--") if "--" in words else len(words)
    try:
        bench.__main__.parser(words).parse_args(words[:cut])
    except SystemExit:
        return "it does not parse"
    return check_jaxspec(["serve", *words[cut + 1 :]]) if words[cut:] else None


def check_python(words: list[str]) -> str | None:
    """Modules of the repository that run with -m; what is not in their parsers is looked for in their source."""
    if words[:1] != ["-m"] or len(words) < 2:
        return "only python -m MODULE is known"
    module, rest = words[1], words[2:]
    if module == "bench":
        return check_bench(rest)
    if module == "pytest":
        return check_pytest(rest)
    path = ROOT.joinpath(*module.split("."))
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return f"there is no module {module}"
    known = declared_options(path.read_text(encoding="utf-8"))
    return next(
        (f"{module} has no option {word}" for word in rest if word.startswith("--") and word not in known), None
    )


def declared_options(source: str) -> set[str]:
    """The flags that a module's `add_argument` calls name."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    arguments = (a for c in calls if getattr(c.func, "attr", "") == "add_argument" for a in c.args)
    return {a.value for a in arguments if isinstance(a, ast.Constant) and isinstance(a.value, str)}


@functools.cache
def pytest_options() -> set[str]:
    command = [sys.executable, "-m", "pytest", "--help"]
    text = subprocess.run(command, cwd=ROOT / "docs", capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))


def check_pytest(words: list[str]) -> str | None:
    """Options and markers exist, and so do the paths."""
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("-"):
            if word not in pytest_options():
                return f"pytest has no option {word}"
        elif before == "-m":
            if strange := set(re.findall(r"\w+", word)) - {"not", "and", "or", *markers()}:
                return f"there is no marker {min(strange)}"
        elif "/" in word and not (ROOT / word.partition("::")[0]).exists():
            return f"there is no {word}"
    return None


@functools.cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def markers() -> list[str]:
    return [text.partition(":")[0] for text in project()["tool"]["pytest"]["ini_options"]["markers"]]


def check_pip(words: list[str]) -> str | None:
    extras = set(project()["project"]["optional-dependencies"])
    wanted = {extra for word in words for names in re.findall(r"\[(.+)\]", word) for extra in names.split(",")}
    return f"there is no extra {min(wanted - extras)}" if wanted - extras else None


def check_file(words: list[str]) -> str | None:
    return None if words and (ROOT / words[0]).is_file() else "there is no such script"


CHECKS: dict[str, Callable[[list[str]], str | None]] = {
    "jaxspec": check_jaxspec, "python": check_python, "pytest": check_pytest, "pip": check_pip, "bash": check_file,
    "curl": lambda _words: None, "ruff": lambda _words: None, "mypy": lambda _words: None,
}  # fmt: skip


def broken_commands(page: Page) -> list[str]:
    """Of blocks without a language, which hold commands and nothing else."""
    complaints = []
    for command in (command for block in page.blocks("", "bash") for command in commands(block)):
        name, *words = command
        complaint = CHECKS[name](words) if name in CHECKS else f"{name} is no command that this test knows"
        if complaint:
            complaints.append(f"{shlex.join(command)}: {complaint}")
    return complaints


def unknown_options(page: Page) -> list[str]:
    """Of commands and flags in the text, which may leave arguments out: the command and its options exist."""
    complaints = []
    for span in page.code_spans:
        words = span.replace("python -m bench", "jaxspec bench").split()
        if words[0].startswith("--"):
            known: set[str] | None = every_option()
        elif words[0] == "jaxspec" and len(words) > 1:
            known = options_of(tuple(words[1:3] if words[1] == "bench" else words[1:2]))
        else:
            continue
        if known is None:
            complaints.append(f"{span}: there is no such command")
        elif strange := set(_OPTION.findall(span)) - known:
            complaints.append(f"{span}: there is no option {min(strange)}")
    return complaints


@functools.cache
def options_of(command: tuple[str, ...]) -> set[str] | None:
    """Every option of a command of `jaxspec`; None where there is no such command."""
    if command[0] != "bench" or len(command) == 1:
        sub = cli.parsers(list(command))[1].get(command[0])
        return None if sub is None else set(_OPTION.findall(sub.format_help()))
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            bench.__main__.parser(list(command[1:])).parse_args([command[1], "--help"])
    except SystemExit as e:
        return None if e.code else set(_OPTION.findall(text.getvalue()))
    raise AssertionError("--help ends a parser")


@functools.cache
def every_option() -> set[str]:
    names = [(name,) for name in cli.parsers([])[1]]
    names += [("bench", name) for room in bench.__main__.ROOMS.values() for name in room]
    hidden = cli.parsers([])[1]["serve"].flags()  # those of vLLM and SGLang, which --help leaves out
    return {"--help", *hidden, *(option for name in names for option in options_of(name) or ())}


# --- files and records ---


def missing_paths(page: Page) -> list[str]:
    """Files and folders named in code, which a table may hold without a link."""
    spans = (span.partition("::")[0] for span in page.code_spans)
    return [f"{span}: there is no such file" for span in spans if _PATH.fullmatch(span) and not (ROOT / span).exists()]


def broken_examples(page: Page) -> list[str]:
    """Python compiles and imports what exists, JSON is JSON."""
    complaints = []
    for text in page.blocks("python"):
        try:
            tree = ast.parse(text)
        except SyntaxError as e:
            complaints.append(f"python: {e}")
            continue
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)):
            module = importlib.import_module(str(node.module))
            complaints += [f"{module.__name__} has no {a.name}" for a in node.names if not hasattr(module, a.name)]
    for text in page.blocks("json"):
        try:
            json.loads(text)
        except ValueError as e:
            complaints.append(f"json: {e}")
    return complaints


def unlinked(files: list[Path], pages: list[Page]) -> list[str]:
    linked = set().union(*map(linked_files, pages))
    return [path.name for path in files if path.resolve() not in linked]
