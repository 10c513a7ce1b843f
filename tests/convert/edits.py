"""Changing copies of tiny checkpoints."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(t) for name, t in load_file(folder / "model.safetensors").items()}


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(folder: Path, *, remove: Iterable[str] = (), add: Mapping[str, np.ndarray] | None = None) -> None:
    kept = {n: t for n, t in tensors(folder).items() if n not in set(remove)} | dict(add or {})
    save_file(kept, folder / "model.safetensors")
