"""What a chat shows: answers with their drafts, a line of figures at the bottom meanwhile, and what the user types."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import TextIO

from jaxspec.engine.acceptance import Acceptance
from serve.drafts import DraftRun
from serve.terminal.colors import BOLD, DIM, GREEN, PLAIN, RED, wants_escapes

PROMPT = "› "
# A text may not move the cursor, or do worse: all control characters but the end of a line and the tab.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LEAST_ROWS = 5


class Screen:
    """
    Args:
        typed: where questions come from, a line each.
        out: where answers go. Elsewhere than on a terminal it gets the answers and nothing else.
    """

    def __init__(self, typed: TextIO, out: TextIO):
        self._typed = typed
        self._out = out
        self._on_terminal = out.isatty()
        self._escapes = wants_escapes(out)
        self._column = 0
        self.interactive = typed.isatty() and out.isatty()
        if self.interactive:
            import readline  # noqa: F401 - gives input() a line to edit, and a history

    def ask(self) -> str | None:
        """The next line that the user types; None at the end.

        Raises:
            KeyboardInterrupt: for Ctrl-C.
        """
        if not self.interactive:
            return self._typed.readline() or None
        # What readline is not to count as width is between \1 and \2.
        prompt = f"\1{BOLD}\2{PROMPT}\1{PLAIN}\2" if self._escapes else PROMPT
        try:
            return input(prompt)
        except EOFError:
            self._write("\n")
            return None
        except KeyboardInterrupt:
            self._write("\n")
            raise

    def note(self, text: str) -> None:
        """A line that is no answer; only on a terminal."""
        if self._on_terminal:
            self._end_line()
            self._write(self._painted(text, DIM) + "\n")

    def fail(self, text: str) -> None:
        self._end_line()
        self._write(self._painted(f"error: {text}", RED) + "\n")

    def show(self, runs: Sequence[DraftRun]) -> None:
        """The newest text of an answer."""
        for run in runs:
            text = run["text"]
            self._column = 1 if text and not text.endswith("\n") else self._column * (not text)
            # No colour goes over the end of a line: it would fill the rest of it on some terminals.
            lines = text.split("\n")
            self._write("\n".join(self._painted(line, GREEN if run["accepted"] else "") for line in lines))

    def end_answer(self) -> None:
        self._end_line()

    def _end_line(self) -> None:
        if self._column:
            self._write("\n")
            self._column = 0

    def _painted(self, text: str, color: str) -> str:
        text = _CONTROL.sub("\ufffd", text)
        return f"{color}{text}{PLAIN}" if self._escapes and color and text else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    @contextlib.contextmanager
    def status_line(self) -> Iterator["StatusLine"]:
        """The bottom line, kept out of the text that scrolls above it until the block ends."""
        line = StatusLine(self._out if self._escapes else None)
        try:
            yield line
        finally:
            line.remove()


class StatusLine:
    """
    Args:
        out: a terminal; None: nothing is shown.
    """

    def __init__(self, out: TextIO | None):
        self._out = out
        self._rows = 0

    def draw(self, text: str) -> None:
        if self._out is None:
            return
        size = os.get_terminal_size(self._out.fileno())
        if size.lines != self._rows:
            self.remove()
            if size.lines < _LEAST_ROWS:
                return
            self._rows = size.lines
            # Room below the cursor, then a region that scrolls without the last row. Setting it moves the cursor.
            self._out.write(f"\033D\033M\0337\033[1;{size.lines - 1}r\0338")
        self._out.write(f"\0337\033[{self._rows};1H\033[2K{DIM}{text[: size.columns - 1]}{PLAIN}\0338")
        self._out.flush()

    def remove(self) -> None:
        if self._out is not None and self._rows:
            self._out.write(f"\0337\033[{self._rows};1H\033[2K\033[r\0338")
            self._out.flush()
        self._rows = 0


def figures(num_tokens: int, seconds: float, histogram: Sequence[int] | None) -> str:
    """A line about an answer so far.

    Args:
        histogram: entry i: windows with i accepted drafts.
    """
    rate = f", {num_tokens / seconds:.1f} tokens/s" if seconds > 0 else ""
    line = f"{num_tokens} token{'s' if num_tokens != 1 else ''}{rate}"
    if not histogram:
        return line
    acceptance = Acceptance(tuple(histogram), sum(histogram) * (len(histogram) - 1))
    if acceptance.rate_per_position is None:
        return line
    parts = ", ".join(f"{100 * part:.0f} %" for part in acceptance.rate_per_position)
    return f"{line}, {acceptance.mean_length:.2f} a step, drafts accepted by position: {parts}"
