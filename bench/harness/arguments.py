"""Types of arguments that several benchmarks have."""

import argparse
from collections.abc import Callable, Collection


def numbers(text: str) -> list[int]:
    """Whole numbers after one another, "1,4,16": ascending, each once."""
    return sorted({int(part) for part in text.split(",")})


def names_among(known: Collection[str], kind: str) -> Callable[[str], list[str]]:
    """The type of "a,b,c", names of some of the known ones; `kind` is what an error calls them."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {kind} {unknown[0]}; there are {', '.join(known)}")
        return chosen

    return names
