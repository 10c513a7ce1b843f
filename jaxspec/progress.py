"""Bars for what takes long: loading, compiling, generating. Elsewhere than on a terminal there are none by default."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

# Called with how many of how many parts are ready, and what is being done or has just been done, which begins with the
# stage's name: "Loading weights: ...", "Compiling 2 of 4: ...", "Compiled ...".
Progress = Callable[[int, int, str], None]

LOADING, COMPILING = "Loading weights", "Compiling"


def wants_bar(use_tqdm: bool | None, stream: TextIO | None = None) -> bool:
    """Whether to show a bar: as the user says, else where standard error is a terminal."""
    return (stream or sys.stderr).isatty() if use_tqdm is None else use_tqdm


class StartBar:
    """A `Progress` for people: one bar for each stage of a start."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._stage = ""
        self._bar: tqdm | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        stage = LOADING if what.startswith(LOADING) else COMPILING
        if self._bar is None or stage != self._stage or self._bar.total != total:
            self.close()
            self._stage = stage
            self._bar = tqdm(total=total, desc=stage, file=self._stream, leave=True)
        self._bar.set_postfix_str(what.removeprefix(f"{stage} ").removeprefix(f"{stage}: "), refresh=True)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class PromptsBar:
    """How many prompts are done, with the rates of prompt and output tokens, as vLLM shows them."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._started = time.monotonic()
        self._prompt_tokens = self._output_tokens = 0
        self._bar = tqdm(total=total, desc="Processed prompts", file=stream or sys.stderr, dynamic_ncols=True)

    def add(self, prompt_tokens: int, output_tokens: int, *, finished: bool) -> None:
        """New output of one prompt, whose own tokens count once it has ended."""
        self._output_tokens += output_tokens
        if finished:
            self._prompt_tokens += prompt_tokens
            seconds = max(time.monotonic() - self._started, 1e-9)
            read, written = self._prompt_tokens / seconds, self._output_tokens / seconds
            rates = f"est. speed input: {read:.2f} toks/s, output: {written:.2f} toks/s"
            self._bar.set_postfix_str(rates, refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        self._bar.close()
