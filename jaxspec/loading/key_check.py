"""Compares what a key map asks for with what a checkpoint's headers say it holds, before any weight is read."""

import re
from collections.abc import Iterable, Mapping

from jaxspec.errors import ModelFormatError
from jaxspec.loading.safetensors_reader import TensorInfo, check_dtype
from jaxspec.models.keymap import KeyMap


def check(maps: Iterable[KeyMap], tensors: Mapping[str, TensorInfo], ignore: re.Pattern[str]) -> None:
    """Compares what the maps ask for with what a checkpoint holds.

    Raises:
        ModelFormatError: naming the first tensor that is missing, unexpected, or of a wrong shape or unsupported dtype.
    """
    wanted = {piece.name: piece.shape for m in maps for pieces in m.values() for piece in pieces}
    if missing := [name for name in wanted if name not in tensors]:
        raise ModelFormatError(f"the checkpoint lacks tensor {_first(missing)}")
    for name, shape in wanted.items():
        check_dtype(name, tensors[name])
        if tensors[name].shape != shape:
            raise ModelFormatError(
                f"tensor {name} has shape {list(tensors[name].shape)}; config.json asks for {list(shape)}"
            )
    if extra := [name for name in tensors if name not in wanted and not ignore.fullmatch(name)]:
        raise ModelFormatError(f"the checkpoint holds tensor {_first(extra)}, which the architecture does not have")


def _first(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
