"""Progress of a long task: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Protocol, TextIO

from tqdm import tqdm

BYTES = "B"


class Progress(Protocol):
    """Told about a long task: `start` once, `advance` after each part, `close` at the end, successful or not.

    Amounts are bytes, or what `unit` says.
    """

    def start(self, what: str, total: int, unit: str = BYTES) -> None: ...

    def advance(self, part: str, amount: int) -> None: ...

    def note(self, line: str) -> None: ...

    def close(self) -> None: ...


class Silent:
    def start(self, what: str, total: int, unit: str = BYTES) -> None: ...

    def advance(self, part: str, amount: int) -> None: ...

    def note(self, line: str) -> None: ...

    def close(self) -> None: ...


class Bar:
    """A tqdm bar with the rate. Several may be open at once."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._bar: tqdm | None = None

    def start(self, what: str, total: int, unit: str = BYTES) -> None:
        scaled = unit == BYTES
        unit = unit if scaled else f" {unit}"
        self._bar = tqdm(total=total, desc=what, unit=unit, unit_scale=scaled, file=self._stream, leave=True)

    def advance(self, part: str, amount: int) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(part, refresh=False)
            self._bar.update(amount)

    def note(self, line: str) -> None:
        tqdm.write(line, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Lines:
    """For logs: at most one line every `interval` seconds, and one at the end."""

    def __init__(self, stream: TextIO, interval: float = 5.0):
        self._stream = stream
        self._interval = interval
        self._what, self._unit, self._total, self._done = "", BYTES, 0, 0
        self._began = self._printed = time.monotonic()

    def start(self, what: str, total: int, unit: str = BYTES) -> None:
        self._what, self._unit, self._total, self._done = what, unit, total, 0
        self._began = self._printed = time.monotonic()
        self.note(f"{what}: {self._amount(total)}")

    def advance(self, part: str, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._printed >= self._interval or self._done >= self._total:
            self._printed = now
            rate = self._done / max(now - self._began, 1e-9)
            share = 100 * self._done / max(self._total, 1)
            rate_text = f"{rate / 1e6:.0f} MB/s" if self._unit == BYTES else f"{rate:.1f} {self._unit}/s"
            named = f"{part}, " if part else ""
            self.note(f"{self._what}: {named}{share:.0f} %, {self._amount(self._done)}, {rate_text}")

    def note(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def close(self) -> None: ...

    def _amount(self, count: int) -> str:
        return f"{count / 1e6:.1f} MB" if self._unit == BYTES else f"{count} {self._unit}"


def console(stream: TextIO | None = None) -> Progress:
    """Bars or lines, as a stream wants them (default: standard error; standard output is the command's own)."""
    stream = stream or sys.stderr
    return Bar(stream) if stream.isatty() else Lines(stream)
