"""Traces of agents: a prompt and the answer that a perfect model would give to it.

An answer is the prompt's file with a name changed, a function of it that is quoted, a call that is made again, or, as a
control, the rest of a file that is not in the prompt. The files are this package's own: they are on every machine, and the
demo model was not trained on them.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jaxspec

KINDS = ("edit", "quote", "call", "new")
_LONGER_NAME = re.compile(r"\b[a-z]+_[a-z_]+\b")
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Trace:
    """Token ids of a prompt and of the answer to it."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def sources() -> list[tuple[str, str]]:
    """(name, text) of this package's modules of a fitting size that have a longer name, the same on every machine with the
    same commit."""
    root = Path(jaxspec.__file__).parent
    files = sorted(path for path in root.rglob("*.py") if 1000 < path.stat().st_size < 2300)
    texts = [(str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in files]
    return [(name, text) for name, text in texts if _LONGER_NAME.search(text)]


def edited(text: str) -> str:
    """The file with its most frequent longer name changed, as a refactoring would."""
    words = _LONGER_NAME.findall(text)
    name = max(sorted(set(words)), key=words.count)
    return re.sub(rf"\b{name}\b", f"new_{name}", text)


def quoted(text: str) -> str:
    """The function or class in the middle of a file."""
    starts = [match.start() for match in re.finditer(r"^(?:def|class) ", text, re.MULTILINE)]
    return text[starts[len(starts) // 2] :] if starts else text


def call(path: str, line: int) -> str:
    return f'{{"name": "edit_file", "arguments": {{"path": "jaxspec/{path}", "line": {line}, "text": "pass"}}}}\n'


def make_trace(encode: Encode, kind: str, path: str, text: str) -> Trace:
    """The trace of a kind on one file."""
    calls = [call(path, 10 * i) for i in range(1, 9)]
    half = len(text) // 2
    prompt, answer = {
        "edit": (f"# {path}\n{text}\n# The same file with another name:\n", edited(text)),
        "quote": (f"# {path}\n{text}\n# The function again:\n", quoted(text)),
        "call": ("".join(calls[:3]), "".join(calls[3:])),
        "new": (f"# {path}\n{text[:half]}", text[half:]),
    }[kind]
    return Trace(kind, tuple(encode(prompt)), tuple(encode(answer)))


def traces_of_size(encode: Encode, kind: str, count: int, *, prompt: int, answer: int) -> list[Trace]:
    """`count` traces of a kind whose prompts and answers have exactly so many tokens.

    Prompts are cut at their beginning, or begin with other files as an agent's context does. An answer that is too short
    goes on with those to the following files.
    """
    files = sources()
    made = [make_trace(encode, kind, path, text) for path, text in files]
    out = []
    for i in range(count):
        order = [made[(i + j) % len(made)] for j in range(len(made))]
        answers = itertools.chain.from_iterable(itertools.cycle(trace.answer for trace in order))
        # What the answer repeats lies at the prompt's end; before it comes what the answers to other files would repeat.
        context = _last(itertools.cycle(trace.prompt for trace in order), prompt)
        out.append(Trace(kind, context, tuple(itertools.islice(answers, answer))))
    return out


def _last(parts: "itertools.cycle[tuple[int, ...]]", count: int) -> tuple[int, ...]:
    """The last `count` of the parts, the first of them at the end."""
    context: tuple[int, ...] = ()
    while len(context) < count:
        context = next(parts) + context
    return context[-count:]
