"""A program in a terminal of its own, and what that terminal shows: enough of a VT100 for `jaxspec chat`."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence

_ESCAPE = re.compile(r"\033(?:\[([?\d;]*)([A-Za-z])|([78DM=>]))")
GREEN = "32"
# The terminal becomes that of the session that this process leads, so that Ctrl-C reaches it; in the background a shell
# would have it ignored.
_PROGRAM = (
    "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); from serve.cli import main; sys.exit(main())"
)


class Terminal:
    """
    Attributes:
        written: everything that the program has written.
    """

    def __init__(self, argv: Sequence[str], *, rows: int = 12, columns: int = 100, **variables: str):
        self.rows, self.columns = rows, columns
        self.written = ""
        self._prompts = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "INPUTRC": "/dev/null", "PYTHONUTF8": "1"}
        for name in ("NO_COLOR", "LINES", "COLUMNS"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *argv],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment | variables, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, seen: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < deadline, self.written[-2000:]
            self._read(0.1)

    def press_until(self, key: str, text: str) -> None:
        """As a person would: Python's input() leaves a Ctrl-C unseen that comes while it begins to wait for a line."""
        for _ in range(20):
            self.type(key)
            until = time.monotonic() + 3
            while text not in self.written and time.monotonic() < until:
                self._read(0.1)
            if text in self.written:
                return
        raise AssertionError(self.written[-2000:])

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.written)

    def wait_for_prompt(self) -> None:
        """The last line is an empty one to type in, and not the one that this has waited for before."""
        self.wait_for(lambda: self.written.count("›") > self._prompts)
        self.wait_for(lambda: [line for line in self.lines() if line][-1:] == ["›"])
        self._prompts = self.written.count("›")

    def end(self) -> int:
        """The exit code, once the program has ended by itself."""
        self.wait_for(lambda: self._process.poll() is not None)
        self._read(0.1)
        return self._process.returncode

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._fd)

    def _read(self, seconds: float) -> None:
        if select.select([self._fd], [], [], seconds)[0]:
            try:
                self.written += self._decoder.decode(os.read(self._fd, 65536))
            except OSError:  # the program has ended
                time.sleep(0.01)

    def screen(self) -> list[list[tuple[str, str]]]:
        """The rows, each a list of (character, colour) pairs; after a scroll region as in VT100."""
        cells = [[] for _ in range(self.rows)]
        row = column = 0
        top, bottom, color, kept = 0, self.rows - 1, "", (0, 0, "")

        def put(character: str) -> None:
            cells[row].extend([(" ", "")] * (column + 1 - len(cells[row])))
            cells[row][column] = (character, color)

        def down() -> int:
            if row != bottom:
                return min(row + 1, self.rows - 1)
            del cells[top]
            cells.insert(bottom, [])
            return row

        text = re.sub(r"\033\]?\?\d+[hl]", "", self.written)
        position = 0
        while position < len(text):
            escape = _ESCAPE.match(text, position)
            if escape is None:
                character = text[position]
                position += 1
                if character == "\n":
                    row = down()
                elif character == "\r":
                    column = 0
                elif character == "\b":
                    column = max(column - 1, 0)
                elif character.isprintable():
                    if column == self.columns:
                        row, column = down(), 0
                    put(character)
                    column += 1
                continue
            position = escape.end()
            parameters, command = escape[1] or "", escape[2] or escape[3]
            numbers = [int(n) for n in parameters.split(";") if n.isdigit()]
            if command == "m":
                color = "" if numbers in ([], [0]) else parameters
            elif command == "7":
                kept = (row, column, color)
            elif command == "8":
                row, column, color = kept
            elif command == "D":
                row = down()
            elif command == "M":
                row = max(row - 1, 0)
            elif command == "H":
                row, column = ([n - 1 for n in numbers] + [0, 0])[:2]
            elif command == "r":
                top, bottom = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, self.rows - 1)
                row = column = 0
            elif command == "K":
                cells[row] = [] if numbers == [2] else cells[row][:column]
        return cells

    def lines(self) -> list[str]:
        return ["".join(character for character, _ in row).rstrip() for row in self.screen()]
