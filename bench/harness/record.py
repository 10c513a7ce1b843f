"""Records: results with the device, driver, versions, commit and command that they need to be worth anything later."""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxspec.errors import writing
from serve.version import commit as code_commit

CHECKOUT = Path(__file__).parents[2]
RESULTS = CHECKOUT / "bench" / "results"
_VERSIONS = ("jax", "jaxlib", "flax", "torch", "transformers", "orbax-checkpoint", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write JSON (default: in the current folder; in a checkout, in its bench/results)",
    )
    parser.add_argument(
        "--commit",
        metavar="ID",
        help="commit of this code (default: what `jaxspec version` says)",
    )


def results_folder() -> Path:
    """Where records go by default: for somebody who works in the checkout, its results; else the current folder."""
    return RESULTS if Path.cwd().resolve().is_relative_to(CHECKOUT.resolve()) else Path()


def environment(commit: str | None = None, *, with_device: bool = True) -> dict[str, Any]:
    """Device, driver, versions and commit of this process. Starts jax's default backend, unless `with_device` is False."""
    return {
        **(_device() if with_device else {}),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name in _VERSIONS if (version := _version(name))},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": commit or code_commit(),
    }


def write(
    name: str,
    result: dict[str, Any],
    arguments: argparse.Namespace,
    *,
    with_device: bool = True,
    announced: bool = True,
) -> Path:
    """Writes `result` and the environment as JSON to --out, or to `<name>.json` in `results_folder()`.

    Args:
        with_device: False if this process's device was not measured.
        announced: print the path. False for early writes of a record that is written several times.
    """
    path: Path = arguments.out or results_folder() / f"{name}.json"
    record = {"command": command_line(), "environment": environment(arguments.commit, with_device=with_device)} | result
    unfinished = path.with_name(f"{path.name}.unfinished")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(dumps(record) + "\n")
        unfinished.replace(path)
    if announced:
        print(f"wrote {path}")
    return path


def dumps(value: Any) -> str:
    """JSON for people and diffs: innermost lists and objects on one line where they fit."""

    def joined(match: re.Match[str]) -> str:
        line = re.sub(r"\n\s*", " ", match.group())  # strings hold no raw newlines
        return line if len(line) <= 150 else match.group()

    return re.sub(r"[\[{][^\[\]{}]*[\]}]", joined, json.dumps(value, indent=1))


def command_line() -> str:
    """The command as typed in a checkout, without --out and --commit.

    Of absolute paths, which belong to one machine, only the last part stays.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    argv = parser.parse_known_args(sys.argv[1:cut])[1] + sys.argv[cut:]  # argparse must not see what follows --
    if argv[:1] == ["bench"]:  # through the script `jaxspec`
        argv = argv[1:]
    argv = [re.sub(r"(^|=)/(?:[^/]*/)*([^/]+)/*$", r"\1\2", argument) for argument in argv]
    return shlex.join(["python", "-m", "bench", *argv])


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns, right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in [header, *rows])


def _device() -> dict[str, Any]:
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": len(jax.devices()),
        "driver": _driver() if device.platform == "gpu" else None,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _output(command)


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().split("\n")[0] or None
