"""How far a conversion is: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Protocol, TextIO

from tqdm import tqdm


class Progress(Protocol):
    """Told about a long task: `start` once, `advance` after each part, `close` at the end, successful or not."""

    def start(self, what: str, total_bytes: int) -> None: ...

    def advance(self, part: str, nbytes: int) -> None: ...

    def note(self, line: str) -> None: ...

    def close(self) -> None: ...


class Silent:
    def start(self, what: str, total_bytes: int) -> None: ...

    def advance(self, part: str, nbytes: int) -> None: ...

    def note(self, line: str) -> None: ...

    def close(self) -> None: ...


class Bar:
    """A tqdm bar, with the rate in bytes."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._bar: tqdm | None = None

    def start(self, what: str, total_bytes: int) -> None:
        self._bar = tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, file=self._stream, leave=True)

    def advance(self, part: str, nbytes: int) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(part, refresh=False)
            self._bar.update(nbytes)

    def note(self, line: str) -> None:
        tqdm.write(line, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Lines:
    """At most one line in `interval` seconds, and one at the end, for logs."""

    def __init__(self, stream: TextIO, interval: float = 5.0):
        self._stream = stream
        self._interval = interval
        self._what, self._total, self._done = "", 0, 0
        self._began = self._printed = time.monotonic()

    def start(self, what: str, total_bytes: int) -> None:
        self._what, self._total, self._done = what, total_bytes, 0
        self._began = self._printed = time.monotonic()
        self.note(f"{what}: {total_bytes / 1e6:.1f} MB")

    def advance(self, part: str, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._printed >= self._interval or self._done >= self._total:
            self._printed = now
            rate = self._done / 1e6 / max(now - self._began, 1e-9)
            share = 100 * self._done / max(self._total, 1)
            self.note(f"{self._what}: {part}, {share:.0f} %, {self._done / 1e6:.1f} MB, {rate:.0f} MB/s")

    def note(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def close(self) -> None: ...


def console(stream: TextIO | None = None) -> Progress:
    """The right one for a stream (default: standard error, so that standard output stays the command's own)."""
    stream = stream or sys.stderr
    return Bar(stream) if stream.isatty() else Lines(stream)
