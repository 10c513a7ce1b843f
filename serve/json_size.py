"""How much a JSON body would cost to parse, counted on its bytes.

The parser holds the interpreter while it works and makes an object of each value: eight megabytes of `[],` are two
million lists. Counting is vectorised and lets other threads run, so a body that is too much is refused before it is
parsed, and what is parsed takes tens of milliseconds and megabytes at most.
"""

from dataclasses import dataclass

import numpy as np

_CHUNK = 2**20
_QUOTE, _COMMA, _COLON, _POINT = (ord(c) for c in '",:.')


@dataclass(frozen=True)
class JsonSize:
    """
    Attributes:
        values: at least as many values as there are, names of fields not counted.
        containers: objects and lists.
        names: names of fields.
        strings: names and texts.
        fractions: decimal points.
        outside: bytes outside strings.
    """

    values: int = 0
    containers: int = 0
    names: int = 0
    strings: int = 0
    fractions: int = 0
    outside: int = 0


# A chat of 4096 messages with four text parts each stays below all of them, and half a million ids are more than a
# context holds.
MOST = JsonSize(values=2**19, containers=2**16, names=2**16, strings=2**17, fractions=2**16)
# Outside strings; more is numbers of hundreds of digits, or white space.
_BYTES_A_VALUE = 64


def measure(body: bytes) -> JsonSize:
    """Counts what is outside strings. Exact for JSON; for anything else the numbers mean nothing, but are finite."""
    if b"\\" in body:  # pairs first, so that what precedes a quote afterwards is an escape
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    commas = containers = names = quotes = points = outside = 0
    inside = np.uint8(0)
    data = np.frombuffer(body, np.uint8)
    for start in range(0, len(data), _CHUNK):
        chunk = data[start : start + _CHUNK]
        is_quote = chunk == _QUOTE
        in_string = np.bitwise_xor.accumulate(is_quote.view(np.uint8)) ^ inside
        inside = in_string[-1]
        structure = chunk[in_string == 0]
        quotes += int(np.count_nonzero(is_quote))
        outside += len(structure)
        points += int(np.count_nonzero(structure == _POINT))
        commas += int(np.count_nonzero(structure == _COMMA))
        names += int(np.count_nonzero(structure == _COLON))
        containers += int(np.count_nonzero((structure == ord("[")) | (structure == ord("{"))))
    return JsonSize(commas + containers + 1, containers, names, quotes // 2, points, outside)


def excess(body: bytes) -> str | None:
    """What the body has too many of, or None."""
    size = measure(body)
    for have, most, what in (
        (size.containers, MOST.containers, "objects and lists"),
        (size.names, MOST.names, "fields"),
        (size.strings, MOST.strings, "strings"),
        (size.fractions, MOST.fractions, "fractions"),
        (size.values, MOST.values, "values"),
        (size.outside, _BYTES_A_VALUE * size.values + 2**16, "bytes outside strings"),
    ):
        if have > most:
            return f"{have} {what}, and at most {most} are accepted"
    return None
