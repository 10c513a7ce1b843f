"""The table of what quantising changed, which `jaxspec convert --quantization fp8` and `int4` end with."""

import itertools
from collections.abc import Iterator, Mapping

_TITLE = "changed by quantising (root mean square of the difference, in % of the weights')"


def rounding_table(errors: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lines of a table: a row a layer, a column a kind of weight; neighbours with the same figures share a row.

    Args:
        errors: part -> dotted path in the layer -> relative error.

    Returns:
        No lines, where nothing was quantised.
    """
    columns = list(dict.fromkeys(path for of_part in errors.values() for path in of_part))
    if not columns:
        return []
    rows = [("layer", columns), *_merged(errors, columns)]
    widths = [max(len(name) for name, _ in rows), *(max(6, len(column)) for column in columns)]
    return [
        _TITLE,
        *("  ".join(f"{cell:>{w}}" for cell, w in zip((name, *row), widths, strict=True)) for name, row in rows),
    ]


def _merged(errors: Mapping[str, Mapping[str, float]], columns: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Name and cells of each row."""
    cells = {part: [f"{100 * of[c]:.2f}" if c in of else "-" for c in columns] for part, of in errors.items()}
    for row, group in itertools.groupby(cells, key=cells.__getitem__):
        first, *others = group
        if set(row) != {"-"}:
            yield f"{first}-{others[-1]}" if others else first, row
