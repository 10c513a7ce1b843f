"""`bench traces`: how many drafts are accepted on traces of agents, by what proposes them.

The engine runs the embedded demo model, but each request may only choose its answer's next token, at every position of a
window (by masks, as grammars do). So all drafts are judged on the same text, models see true hidden states, and what is
accepted is what a model that writes this text would accept. Greedy; speed is what `bench lookup` measures.
"""

import argparse
import collections
import dataclasses
import json
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import record
from bench.harness.agent_traces import KINDS, Encode, Trace, make_trace, sources
from jaxspec.engine.host_rule import Constraint, RuleResult

ROWS = 8
# Of a trace, in tokens: the demo model's context is 4096, and a prompt of this length takes a CPU a second.
MOST_PROMPT, MOST_ANSWER = 900, 128


@dataclass(frozen=True)
class Choice:
    """What proposes `k` tokens, as options of an engine."""

    name: str
    k: int
    options: tuple[tuple[str, Any], ...] = ()


EAGLE3 = (("speculative_model", "demo/eagle3-mla"),)


def choices(k: int) -> tuple[Choice, ...]:
    lookups = {kind: (("speculative_method", kind),) for kind in ("ngram", "suffix")}
    both = {f"{kind}+mtp": (("speculative_method", f"{kind}+mtp"),) for kind in ("ngram", "suffix")}
    eagle3 = {"eagle3": EAGLE3, "ngram+eagle3": (("speculative_method", "ngram+eagle3"), *EAGLE3)}
    return tuple(Choice(name, k, o) for name, o in ({"mtp": ()} | eagle3 | lookups | both).items())


def smaller(k: int, sizes: Sequence[int], tokens: str) -> tuple[Choice, ...]:
    """The NextN layer with a head of so many rows, those of the most frequent tokens of a file."""
    cut = {size: (("speculative_token_map", tokens), ("speculative_vocab_size", size)) for size in sizes}
    return tuple(Choice(f"mtp of {size}", k, options) for size, options in cut.items())


class Follow(Constraint):
    """A host rule that allows only the next id of an answer."""

    needs_readback = True

    def __init__(self, answer: Sequence[int]):
        self._answer = answer
        self._fed = 0

    @property
    def constraint(self) -> "Follow":
        return self

    def feed(self, ids: Sequence[int], ended: Any) -> RuleResult:  # noqa: ARG002
        self._fed += len(ids)
        return RuleResult()

    def fill_masks(self, drafts: Sequence[int], words: np.ndarray) -> None:  # noqa: ARG002
        """Row i allows the answer's token there: where an earlier draft is another one, nobody reads it."""
        for row, mask in enumerate(words):
            token = self._answer[min(self._fed + row, len(self._answer) - 1)]
            mask[:] = 0
            mask.view(np.uint32)[token // 32] = 1 << token % 32


def make_traces(encode: Encode, count: int) -> list[Trace]:
    """`count` traces of each kind, whose answers are cut to the length above."""
    files = sources()
    out = []
    for path, text in (files[i * len(files) // count] for i in range(count)):
        for kind in KINDS:
            trace = make_trace(encode, kind, path, text)
            assert len(trace.prompt) <= MOST_PROMPT, path
            out.append(dataclasses.replace(trace, answer=trace.answer[:MOST_ANSWER]))
    return out


def frequent(encode: Encode, folder: Path) -> Path:
    """A file of token counts: of the standard library's modules, which are much of what the demo model was trained on."""
    counts: collections.Counter[int] = collections.Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]:
        counts.update(encode(path.read_text(encoding="utf-8", errors="replace")))
    file = folder / "frequent.json"
    file.write_text(json.dumps(counts))
    return file


def measure(engine: Any, traces: Sequence[Trace]) -> dict[str, dict[str, Any]]:
    """Figures of one engine by kind of trace: tokens of a decode step above all. Without drafts that is 1."""
    from jaxspec.engine.request import Request
    from jaxspec.sampling.params import SamplingParams

    requests: dict[str, tuple[Trace, Request]] = {}
    for i, trace in enumerate(traces):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=len(trace.answer))
        request = Request(f"{trace.kind}{i}", trace.prompt, params, Follow(trace.answer))
        requests[request.id] = trace, request
    steps: collections.Counter[str] = collections.Counter()

    def look(step: Any) -> None:
        emitted = step.emitted[len(step.plan.prefill) :].tolist()
        steps.update(requests[r.id][0].kind for r, count in zip(step.plan.decode, emitted, strict=True) if count)

    engine.observer = look
    engine.add(*(request for _, request in requests.values()))
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
    out = {}
    for kind in KINDS:
        mine = [(trace, request) for trace, request in requests.values() if trace.kind == kind]
        assert all(tuple(request.tokens[request.prompt_len :]) == trace.answer for trace, request in mine)
        tokens = sum(len(trace.answer) - 1 for trace, _ in mine)  # the first one comes from the prompt's step
        drafted = sum(request.drafted for _, request in mine)
        accepted = sum(i * count for _, request in mine for i, count in enumerate(request.windows))
        out[kind] = {
            "tokens": tokens,
            "decode_steps": steps[kind],
            "tokens_per_step": round(tokens / steps[kind], 4),
            "steps_with_drafts": round(sum(sum(request.windows) for _, request in mine) / steps[kind], 4),
            "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        }
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafts", type=int, default=3, metavar="K", help="tokens drafted per step (default: 3)")
    parser.add_argument("--traces", type=int, default=6, metavar="N", help="traces of each kind (default: 6)")
    parser.add_argument("--only", metavar="NAME,...", help="these drafts alone, such as ngram,mtp")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=N", help="of every lookup, such as prompt_lookup_min=1"
    )
    parser.add_argument(
        "--vocabulary",
        type=_sizes,
        default=(),
        metavar="N,...",
        help="also the NextN layer with heads of so many tokens",
    )
    record.add_arguments(parser)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def run(arguments: argparse.Namespace) -> int:
    from jaxspec.config import EngineConfig
    from jaxspec.loading.engine import build_engine
    from jaxspec.loading.resolve import resolve_model
    from jaxspec.text import Tokenizer

    folder = resolve_model("demo")
    encode = Tokenizer.from_folder(folder).encode
    traces = make_traces(encode, arguments.traces)
    more = {name: int(value) for name, _, value in (word.partition("=") for word in arguments.option)}
    wanted = arguments.only.split(",") if arguments.only else None
    figures = []
    with tempfile.TemporaryDirectory() as folder_of_map:
        tokens = str(frequent(encode, Path(folder_of_map)))
        for choice in [*choices(arguments.drafts), *smaller(arguments.drafts, arguments.vocabulary, tokens)]:
            if wanted and choice.name not in wanted:
                continue
            began = time.perf_counter()
            options = dict(choice.options)
            if "speculative_method" in options:
                options |= more
            config = EngineConfig(
                dtype="float32", max_model_len=MOST_PROMPT + MOST_ANSWER, max_num_seqs=ROWS, max_num_batched_tokens=128,
                num_speculative_tokens=choice.k, adaptive_speculation=False, readout_depth=0, enable_prefix_caching=False,
                **options,
            )  # fmt: skip
            engine, _ = build_engine(folder, config)
            runner = engine.runner
            runner.buckets = runner.buckets[-1:]  # the one that holds every plan
            engine.warm_up()
            figures.append({"draft": choice.name, "k": choice.k, "kinds": measure(engine, traces)})
            print(f"{choice.name}: measured in {time.perf_counter() - began:.0f} s", flush=True)
    result = {
        "benchmark": "traces",
        "model": "demo",
        "traces_per_kind": arguments.traces,
        "options": more,
        "drafts": figures,
    }
    print_table(figures)
    record.write("traces_demo", result, arguments)
    return 0


def print_table(figures: Sequence[dict[str, Any]]) -> None:
    print("tokens a decode step, and how many drafts were accepted")
    lines = []
    for figure in figures:
        cells = [figure["draft"], str(figure["k"])]
        for kind in KINDS:
            found = figure["kinds"][kind]
            rate = found["acceptance_rate"]
            cells += [f"{found['tokens_per_step']:.2f}", "" if rate is None else f"{rate:.0%}"]
        lines.append(cells)
    print(record.table(["draft", "k", *(cell for kind in KINDS for cell in (kind, ""))], lines))
