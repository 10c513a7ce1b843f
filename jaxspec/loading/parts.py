"""The parts that weights are stored and loaded in: the embedding, each layer, the head, the NextN layer, a draft.

A part holds the parameters of one layer (or the embedding, or final norm and head, or the NextN layer) under the names
of `jaxspec.models`, so that a loader holds one part at a time beside what it has placed on the devices.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxspec.models.keymap import ParamPath

WEIGHTS = "weights"
EMBED, HEAD, MTP, DRAFT = "embed", "head", "mtp", "draft"


# What a loader wants of a part: path in the part -> shape, dtype and sharding.
PartTargets = Mapping[ParamPath, jax.ShapeDtypeStruct]


def part_of(path: ParamPath) -> tuple[str, ParamPath]:
    """The part that a parameter of `CausalLM` is stored in, and its path in there."""
    if path[0] == "layers":
        return f"{int(path[1]):03d}", path[2:]
    return (EMBED if path[0] == "embed" else HEAD), path


def path_of(part: str, path: ParamPath) -> ParamPath:
    """The parameter of `CausalLM` that a part holds under `path`: the reverse of `part_of`."""
    return path if part in (EMBED, HEAD) else ("layers", int(part), *path)


def draft_part_of(path: ParamPath) -> str:
    """The part that a parameter of `Eagle3` is stored in, under the same path."""
    return {"embed": EMBED, "head": HEAD}.get(str(path[0]), DRAFT)


def parts_of(values: Mapping[ParamPath, Any]) -> dict[str, dict[ParamPath, Any]]:
    """Part -> path in the part -> value, parts in model order, for values of all parameters of a `CausalLM`."""
    found: dict[str, dict[ParamPath, Any]] = {}
    for path, value in values.items():
        part, inner = part_of(path)
        found.setdefault(part, {})[inner] = value
    layers = sorted(found.keys() - {EMBED, HEAD})
    return {part: found[part] for part in (EMBED, *layers, HEAD)}
