"""What a terminal is told, and whether it is told anything."""

import os
from collections.abc import Mapping
from typing import TextIO

GREEN, RED, DIM, BOLD, PLAIN = "\033[32m", "\033[31m", "\033[2m", "\033[1m", "\033[0m"


def wants_escapes(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Colours and moves of the cursor: on a terminal that knows them, unless NO_COLOR (no-color.org) is set."""
    return stream.isatty() and environ.get("TERM") != "dumb" and not environ.get("NO_COLOR")
