"""What `jaxspec serve` prints while it starts: lines, and on a terminal a bar while it compiles."""

import json
import shlex
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from jaxspec.progress import StartBar
from serve.model import Progress, ServedModel

# Progress may come many times a second; a log gets at most one line in this time.
_PROGRESS_SECONDS = 1.0


def say(line: str) -> None:
    print(line, flush=True)


class ProgressLines:
    """Prints what begins, and what is done at most once a second; of that always the last line."""

    def __init__(self) -> None:
        self._printed = float("-inf")
        self._done = 0
        self._started = time.monotonic()

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        begins = done in (self._done, 0)
        if begins or done >= total or now - self._printed >= _PROGRESS_SECONDS:
            self._printed = now
            say(f"[{now - self._started:6.1f} s] {what}")
        self._done = done


def console_progress(stream: TextIO | None = None) -> Progress:
    """A bar on a terminal, lines elsewhere (default: as standard output is)."""
    stream = stream or sys.stdout
    return StartBar(stream) if stream.isatty() else ProgressLines()


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
    say(f"Serving {name} at {url}. Try{', with one of the keys in $JAXSPEC_API_KEY' if with_key else ''}:")
    say(f"  {suggested_curl(model, name, url, with_key=with_key)}")


def suggested_curl(model: ServedModel, name: str, url: str, *, with_key: bool) -> str:
    """A command for a shell that this server answers, whatever the model is called."""
    if model.tokenizer is None:
        request: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 16, "return_token_ids": True}
    else:
        request = {"prompt": "def fibonacci(n):", "max_tokens": 64}
    body = json.dumps({"model": name} | request, ensure_ascii=False)
    key = ' -H "authorization: Bearer $JAXSPEC_API_KEY"' if with_key else ""
    address = shlex.quote(f"{_reachable(url)}/v1/completions")
    return f"curl {address} -H 'content-type: application/json'{key} -d {shlex.quote(body)}"


def _reachable(url: str) -> str:
    """A server that listens on all addresses is asked on this machine's own."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
