"""What can be loaded, for people: `jaxspec models` prints it from the registries of models and drafts."""

from collections.abc import Sequence

from jaxspec.models.eagle3 import READERS
from jaxspec.models.registry import FAMILIES

_HEADINGS = ("architectures in config.json", "models", "drafts", "note")


def listing() -> str:
    """A table of the models, and the architectures of EAGLE3 drafts."""
    rows = [_HEADINGS]
    for name, family in FAMILIES.items():
        models, mtp, note = family.published
        rows.append((name, models, "MTP, EAGLE3" if mtp else "EAGLE3", note))
    return "\n".join([*_table(rows), "", f"EAGLE3 drafts, for --speculative-model: {', '.join(READERS)}"])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
