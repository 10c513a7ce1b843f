"""Cases of the Triton kernels, their errors in Triton's interpreter, and the shared memory of GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from pallas_kernels.triton_call import Tile

ROOT = Path(__file__).parents[2]
# Shared memory of a program at most, in KiB, by the least compute capability.
SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}


class Case(NamedTuple):
    """A call of mla_decode: lengths, window, heads and dtype, and the multiprocessors and capability that it is cut for."""

    lengths: tuple[int, ...]
    n: int
    heads: int
    sms: int
    capability: int
    dtype: str = "float32"  # the interpreter multiplies the bits of bfloat16 as integers


CASES = {
    "some requests split, a window longer than its context": Case((70, 200, 64, 333, 1), 4, 4, 4, 90),
    "more requests than programs, whole pages": Case((130, 128, 64), 1, 8, 1, 80),
    "two blocks of rows, rows of padding, tiles of 64 rows": Case((65, 300), 3, 32, 6, 90),
    "tiles of 32 rows, a window that is no power of two": Case((200, 3), 5, 5, 2, 90),
    "small shared memory": Case((130, 1), 2, 32, 4, 86),
    "more parts than are merged at once": Case((2200,), 1, 4, 20, 90),
    "float16": Case((100, 257), 8, 2, 3, 80, "float16"),
}


class GqaCase(NamedTuple):
    """A call of gqa_decode: as `Case`, with key heads, query heads of each, and their size."""

    lengths: tuple[int, ...]
    n: int
    key_heads: int
    group: int
    head_dim: int
    sms: int
    capability: int
    dtype: str = "float32"
    window: int | None = None
    sinks: bool = False


GQA_CASES = {
    "some requests split, a window longer than its context": GqaCase((70, 200, 64, 333, 1), 4, 2, 4, 64, 4, 90),
    "more requests than programs, whole pages": GqaCase((130, 128, 64), 1, 2, 2, 128, 1, 80),
    "two blocks of rows, rows of padding, tiles of 64 rows": GqaCase((65, 300), 3, 2, 32, 64, 6, 90),
    "tiles of 32 rows, a window that is no power of two": GqaCase((200, 3), 5, 4, 5, 128, 2, 90),
    "half pages": GqaCase((130, 1, 257), 8, 1, 8, 64, 4, 86),
    "more parts than are merged at once": GqaCase((2200,), 1, 1, 4, 64, 20, 90),
    "sinks, some requests split": GqaCase((70, 333), 2, 2, 3, 64, 8, 90, sinks=True),
    "sliding windows": GqaCase((300, 65, 129, 8), 4, 1, 8, 64, 2, 90, window=70, sinks=True),
    "float16": GqaCase((100, 257), 8, 8, 1, 64, 3, 80, "float16"),
}


# Interpreting takes seconds a case: these reach most of a kernel, the others run under `full`.
DEFAULT = ("some requests split, a window longer than its context", "sinks, some requests split", "float16")


def parameters(cases: Iterable[str]) -> list[Any]:
    return [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.full) for name in cases]


def errors_of(operation: str, request: pytest.FixtureRequest) -> dict[str, float]:
    """Relative errors of the cases that this run's `test_interpreted` asks for.

    They come from a process of their own, because importing triton decides whether it interprets.
    """
    here = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in here if item.originalname == "test_interpreted"]
    pytest.importorskip("triton", reason="needs Triton: pip install -e '.[test]'")
    pytest.importorskip("torch", reason="Triton's interpreter needs PyTorch: pip install -e '.[test]' on Python 3.11")
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_interpreter", operation, *names],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def check_fit(attend: SimpleNamespace, merge: SimpleNamespace, tile: Tile, capability: int) -> None:
    """The kernels are compiled for that capability, and as many programs fit as the tile says."""
    for call in (attend, merge):
        assert call.capability == capability
        assert f".target sm_{capability}" in call.ptx
    assert attend.warps == tile.warps
    # A multiprocessor reserves a KiB for each program, and has one more than a single program can have.
    assert tile.resident * (attend.shared_bytes + 1024) <= (SHARED_KIB[capability] + 1) * 1024
