"""Which checkpoint tensors make up each parameter: the pieces that every family's key map is made of.

A parameter is filled by pieces, each saying `parameter[at] = tensor.reshape(view).transpose(order)[take]`. Every
conversion that the models need (splits, fusions, stacked experts, reordered rotary rows) is of that form, so a map is
data: it can be checked against a checkpoint's headers before a single weight is read.
"""

import re
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import numpy as np

ParamPath = tuple[str | int, ...]
Index = int | slice | EllipsisType | tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Piece:
    """`parameter[at] = tensor.reshape(view).transpose(order)[take]`; the tensor must have exactly `shape`.

    `view` () keeps its shape, `order` () the order of its axes. `also` is a name that some writers give it instead.
    """

    name: str
    shape: tuple[int, ...]
    at: Index = ...
    view: tuple[int, ...] = ()
    take: Index = ...
    order: tuple[int, ...] = ()
    also: str = ""

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """What the tensor gives to the parameter."""
        viewed = tensor.reshape(self.view or self.shape)
        return (viewed.transpose(self.order) if self.order else viewed)[self.take]


Pieces = tuple[Piece, ...]
KeyMap = dict[ParamPath, Pieces]

# Matches rotary frequencies, which old checkpoints store and every model computes.
ROTARY_TABLES = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


# Gives the tensor of a name. A second argument is an array of the tensor's size, without gaps, that may be filled and
# given back instead of a new one, if it has the tensor's dtype.
Read = Callable[[str, np.ndarray | None], np.ndarray]


# Of a transposed tensor so many columns are copied at a time: for each row NumPy walks through all that it copies, and of
# gpt-oss's experts whole it makes a third to a fifth of the speed.
COLUMNS = 256


def fill(piece: Piece, out: np.ndarray, read: Read) -> None:
    """Fills one piece of a parameter, cast to its dtype. Pieces may be filled in any order, and in several threads."""
    place = out[piece.at] if piece.take is ... and not piece.order else None
    if place is not None and not (
        # A tensor of another shape must not be read into a place: the assignment below is what refuses it.
        place.shape == (piece.view or piece.shape) and place.flags.c_contiguous and np.may_share_memory(place, out)
    ):
        place = None
    tensor = read(piece.name, place)
    if tensor is place:
        return
    if tensor.dtype == out.dtype:  # as integers: NumPy holds Python's lock while it copies bfloat16
        bits = f"u{out.dtype.itemsize}"
        tensor, out = tensor.view(bits), out.view(bits)
    value, place = piece.of(tensor), out[piece.at]
    if not (piece.order and place.shape == value.shape and np.may_share_memory(place, out)):
        out[piece.at] = value
        return
    for first in range(0, value.shape[-1], COLUMNS):
        columns = slice(first, first + COLUMNS)
        place[..., columns] = value[..., columns]


def nested(parts: dict[str, KeyMap]) -> KeyMap:
    """The maps of a module's children, under their names."""
    return {(part, *path): pieces for part, child in parts.items() for path, pieces in child.items()}


def norm_weight(name: str, size: int) -> KeyMap:
    """The map of an `RMSNorm` that checkpoints store as `name`.weight."""
    return {("weight",): (Piece(f"{name}.weight", (size,)),)}


def as_named(keys: KeyMap, names: Container[str]) -> KeyMap:
    """The map of a checkpoint that has tensors of these names."""

    def found(piece: Piece) -> Piece:
        return replace(piece, name=piece.also) if piece.name not in names and piece.also in names else piece

    keys = {path: tuple(map(found, pieces)) for path, pieces in keys.items()}
    return _with_stacked_experts(keys, names)


def mixtral_name(name: str) -> str:
    """What checkpoints with Mixtral's names call a mixture's tensor of this name."""
    for pattern, new in _MIXTRAL_NAMES:
        name = re.sub(pattern, new, name)
    return name


_MIXTRAL_NAMES = (
    (r"\.mlp\.", ".block_sparse_moe."),
    (r"(\.experts\.\d+)\.gate_proj\.", r"\1.w1."),
    (r"(\.experts\.\d+)\.down_proj\.", r"\1.w2."),
    (r"(\.experts\.\d+)\.up_proj\.", r"\1.w3."),
)


def _with_stacked_experts(keys: KeyMap, names: Container[str]) -> KeyMap:
    """The map with experts that a checkpoint of these names holds together: [E, 2 I, H] with gates first, and [E, H, I]."""

    def stacked(pieces: Pieces) -> Pieces:
        first = pieces[0]
        found = re.fullmatch(r"(.*\.experts)\.0\.(gate|down)_proj\.weight", first.name)
        halves = 2 if found and found[2] == "gate" else 1
        if found is None or (name := f"{found[1]}.{'gate_up' if halves == 2 else 'down'}_proj") not in names:
            return pieces
        E, (rows, columns) = len(pieces) // halves, first.shape
        view = (E, halves, rows, columns) if halves == 2 else ()
        return (Piece(name, (E, halves * rows, columns), view=view),)

    return {path: stacked(pieces) for path, pieces in keys.items()}


def any_of(patterns: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{p})" for p in patterns))
