"""What `jaxspec serve` prints while it starts: lines, and on a terminal a bar while it compiles."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from serve.model import Progress, ServedModel

# Progress may come many times a second; a log gets at most one line in this time.
_PROGRESS_SECONDS = 1.0


def say(line: str) -> None:
    print(line, flush=True)


class ProgressLines:
    """Prints progress at most once a second, and always its first and last line."""

    def __init__(self) -> None:
        self._printed = float("-inf")
        self._started = time.monotonic()

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if done >= total or now - self._printed >= _PROGRESS_SECONDS:
            self._printed = now
            say(f"[{now - self._started:6.1f} s] {done}/{total} {what}")


class ProgressBar:
    """Shows how many parts are done, and which one was the last."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: tqdm | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._bar is None or self._bar.total != total:
            self._bar = tqdm(total=total, desc="Compiling", file=self._stream, leave=True)
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()


def console_progress(stream: TextIO | None = None) -> Progress:
    """A bar on a terminal, lines elsewhere (default: as standard output is)."""
    stream = stream or sys.stdout
    return ProgressBar(stream) if stream.isatty() else ProgressLines()


def both(first: Progress, second: Progress) -> Progress:
    def report(done: int, total: int, what: str) -> None:
        first(done, total, what)
        second(done, total, what)

    return report


def announce_start(version: str, options: Mapping[str, Mapping[str, str]]) -> None:
    """
    Args:
        options: source -> option -> value, of what is not as by default.
    """
    say(f"jaxspec {version}")
    for source, values in options.items():
        say(f"Options from {source}: " + ", ".join(f"{name}={value}" for name, value in values.items()))


def announce_ready(model: ServedModel, name: str, url: str, *, with_key: bool) -> None:
    width = max(map(len, model.description), default=0)
    for label, value in model.description.items():
        say(f"{label + ':':<{width + 1}} {value}")
    say(f"Serving {name} at {url}. Try:")
    key = ' -H "authorization: Bearer $JAXSPEC_API_KEY"' if with_key else ""
    if model.tokenizer is None:
        body = f'{{"model": "{name}", "prompt": [1, 2, 3], "max_tokens": 16, "return_token_ids": true}}'
    else:
        body = f'{{"model": "{name}", "prompt": "def fibonacci(n):", "max_tokens": 64}}'
    say(f"  curl {url}/v1/completions -H 'content-type: application/json'{key} -d '{body}'")
