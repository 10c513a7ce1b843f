"""How far the start is: a bar on a terminal, lines elsewhere."""

import io

from serve.startup import console_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_that_ends_full():
    stream = Terminal()
    progress = console_progress(stream)
    for done in (1, 2, 3):
        progress(done, 3, f"bucket {done}")
    last = stream.getvalue().rstrip("\n").rsplit("\r", 1)[-1]
    assert "100%" in last
    assert "3/3" in last
    assert "bucket 3" in last


def test_elsewhere_the_first_and_the_last_line_are_always_there(capsys):
    progress = console_progress(io.StringIO())
    for done in (1, 2, 3):
        progress(done, 3, f"bucket {done}")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["1/3 bucket 1", "3/3 bucket 3"]
