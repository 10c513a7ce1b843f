"""What lowered steps pass to the kernels of Mosaic GPU."""

import math
import re

ALIGNMENT = 256  # bytes
_MOVES_NOTHING = ("reshape", "bitcast_convert")


def misplaced_operands(text: str) -> list[str]:
    """The slices that kernels of a StableHLO module are given as pieces of memory that begin elsewhere than at a multiple
    of 256 bytes, by the functions that hold the kernels."""
    module = _Module(text)
    return sorted(
        {f"{caller}: {slice_}" for caller, slice_ in module.slices_of_kernels() if _first_byte(slice_) % ALIGNMENT}
    )


def _first_byte(slice_: str) -> int:
    """Where a slice begins in its array, as in "slice %1 [8:136, 0:4] : (tensor<136x4xf32>) -> ..."; 0 of one that is no
    piece of memory."""
    ranges, shape = re.findall(r"\[(.*?)\] : \(tensor<(.*?)>", slice_)[0]
    *sizes, dtype = shape.split("x")
    bounds = [[int(bound) for bound in part.split(":")] for part in ranges.split(", ")]
    counts = [end - start for start, end, *_ in bounds]
    cut = [axis for axis, size in enumerate(sizes) if counts[axis] != int(size)]
    if math.prod(counts[: max(cut, default=0)]) > 1:
        return 0
    strides = [math.prod(map(int, sizes[axis + 1 :])) for axis in range(len(sizes))]
    bits = int(re.findall(r"\d+", dtype)[0])
    return max(1, bits // 8) * sum(start * stride for (start, *_), stride in zip(bounds, strides, strict=True))


class _Module:
    """Functions of a module: what defines each value of theirs, and with which values they are called."""

    def __init__(self, text: str) -> None:
        self._definitions: dict[str, dict[str, str]] = {}
        self._calls: dict[str, list[tuple[str, list[str]]]] = {}
        self._kernels: list[tuple[str, list[str]]] = []
        function = ""
        for line in text.splitlines():
            if found := re.match(r"\s*func\.func.*?@(\S+?)\(", line):
                function = found.group(1)
                self._definitions[function] = {}
            elif found := re.match(r"\s*(%\w+)(?::\d+)? = (.*)", line):
                self._definitions[function][found.group(1)] = found.group(2)
            if found := re.search(r"(?<!custom_)call @([\w.]+)\(([^)]*)\)", line):
                self._calls.setdefault(found.group(1), []).append((function, found.group(2).split(", ")))
            if found := re.search(r"custom_call @mosaic_gpu_v2\(([^)]*)\)", line):
                self._kernels.append((function, found.group(1).split(", ")))
        assert self._kernels, "no kernel of Mosaic GPU"

    def slices_of_kernels(self) -> list[tuple[str, str]]:
        """Each with the function that holds the kernel."""
        return [
            (function, slice_)
            for function, operands in self._kernels
            for operand in operands
            for slice_ in self._slices(function, operand)
        ]

    def _slices(self, function: str, value: str) -> list[str]:
        """Of which a value is one, for some caller, but for its shape."""
        definition = self._definitions[function].get(value.split("#", maxsplit=1)[0])
        if definition is None:
            place = re.fullmatch(r"%arg(\d+)", value)
            callers = self._calls.get(function, []) if place else []
            return [each for caller, given in callers for each in self._slices(caller, given[int(place.group(1))])]
        operation = definition.split(" ")[0].removeprefix("stablehlo.")
        if operation in _MOVES_NOTHING:
            return self._slices(function, re.findall(r"%[\w#]+", definition)[0])
        return [definition] if operation == "slice" else []
