"""`bench grammar`: what grammars cost the rows that have one, and the free rows beside them.

Batches of the same prompts take turns in one engine, for plain steps and for cycles of k drafted tokens (MTP), through the
production scheduler and runner at a readout depth of 1:

- free: greedy rows without grammars;
- full: the same, but each row asks for the full sampler, which grammars need (what of their cost is the sampler's);
- constrained: every second row writes JSON by a schema that never ends within the measurement (llguidance).

Each batch's requests are prefilled anew every turn. Time per token: wall time of `--steps` steps of the engine's loop over
the tokens that a row got, separately for the rows with a grammar and for the others; ratios are over the same rows of the
free batch, medians of the turns; `step_over_free` is that of a step. Drafts accepted a window are reported likewise, and of
each step the host's time: waiting for the device, filling masks, planning and dispatching. On a GPU a trace then tells the
device's.

With random weights no tokenizer exists, so its ids are given made-up words; hardly any draft is accepted. Other models read
source code and then an example of such JSON, and their drafts are accepted as they are: there a ratio also says how well
JSON is drafted. `blocked` is the part of the constrained windows that end at a draft which the grammar forbids: drafts that
know the grammar could gain these and no others. `late` is the part of constrained rows' steps that verified fewer drafts,
because the masks after them would have kept the step waiting.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.harness import models, record
from bench.harness.arguments import numbers
from bench.harness.models import SHAPES, mesh_of_one
from bench.harness.timing import ms
from bench.harness.trace import keep_graphs, traced
from bench.harness.vocabulary import made_up_tokenizer
from bench.step.engines import build_engine, warm_up
from bench.step.idle import idle_parts
from bench.step.load import GREEDY, Load, count_kernels
from bench.step.sizes import DEFAULT_TOKENS, Sizes, default_budget
from bench.step.step import add_storage_arguments, load_weights
from jaxspec.compat import compiles
from jaxspec.config import EngineConfig, np_dtype, resolve_dtype
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.host_rule import FilledMasks, HostRule, RuleResult
from jaxspec.engine.output import FinishReason
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.request import Request
from jaxspec.engine.step_log import StepTimes
from jaxspec.grammar.compiler import GrammarCompiler
from jaxspec.grammar.rule import GrammarRule
from jaxspec.loading.resolve import resolve_model
from jaxspec.sampling.structured import StructuredOutputsParams
from jaxspec.text import Tokenizer, text_stream

# Most time per token of each kind of rows, over the same rows without grammars beside them.
BOUNDS = {"constrained": 1.10, "free": 1.02}
BATCHES = ("free", "full", "constrained")
# `min_tokens` is a rule of the full sampler, and one token has been generated when a measurement begins.
PARAMS = {"free": GREEDY, "full": dataclasses.replace(GREEDY, min_tokens=1), "constrained": GREEDY}
TRACED_STEPS = 8
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["book", "film", "song"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "done": {"type": "boolean"},
    },
    "required": ["name", "count", "kind", "tags", "done"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"records": {"type": "array", "items": _RECORD, "minItems": 100_000}},
    "required": ["records"],
    "additionalProperties": False,
}

EXAMPLE = {
    "records": [
        {"name": "The Wall", "count": 12, "kind": "book", "tags": ["old", "red"], "done": True},
        {"name": "A Night", "count": 3, "kind": "film", "tags": [], "done": False},
        {"name": "Sun", "count": 77, "kind": "song", "tags": ["new"], "done": True},
    ]
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="moonlight", help=f"demo, {', '.join(SHAPES)} (random weights), or a model folder"
    )
    parser.add_argument(
        "--tokens", type=numbers, metavar="K,K,...", help=f"drafted a step (default: 0,{DEFAULT_TOKENS})"
    )
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="of a batch (default: 32)")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="prompt length (default: 1024; CPU: 128)")
    parser.add_argument("--steps", type=int, metavar="N", help="of each measurement (default: 64; CPU: 8)")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="measurements of each batch (default: 5)")
    parser.add_argument("--readout-depth", type=int, choices=[1, 2, 3], default=1, help="how late steps are read")
    parser.add_argument("--layers", type=int, metavar="N", help="shrink a random model to N layers")
    add_storage_arguments(parser)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    record.add_arguments(parser)


class WatchedRule(GrammarRule):
    """A grammar's rule that counts the seconds in which masks were filled, the windows that it has blocked, and those that
    verified fewer drafts because masks would have come too late."""

    seconds = 0.0
    blocked = 0
    asked = 0
    late = 0
    _legal = 0  # drafts of the next window before the first that is forbidden
    _drafts = 0

    @classmethod
    def fill_many(
        cls,
        rows: Sequence[tuple[GrammarRule, Sequence[int]]],
        words: np.ndarray,
        may_begin: Callable[[int], bool] = lambda _rows: True,
    ) -> list[FilledMasks]:
        started = time.perf_counter()
        filled = super().fill_many(rows, words, may_begin)
        seconds = (time.perf_counter() - started) / len(rows)
        for (rule, drafts), (_, count), words_nM in zip(rows, filled, words, strict=True):
            assert isinstance(rule, WatchedRule)
            rule.seconds += seconds
            rule.asked += 1
            rule.late += count < len(drafts)
            masked = enumerate(drafts[:count])
            forbidden = (i for i, draft in masked if not words_nM[i, draft >> 5] >> (draft & 31) & 1)
            rule._drafts, rule._legal = count, next(forbidden, count)
        return filled

    def feed(self, ids: Sequence[int], ended: FinishReason | None) -> RuleResult:
        self.blocked += len(ids) - 1 == self._legal < self._drafts
        return super().feed(ids, ended)


class Times:
    """In place of a step log: the times of each step, and how many of the steps chose late."""

    def __init__(self) -> None:
        self.steps: list[StepTimes] = []
        self.split = 0

    def write(self, plan: StepPlan, _bucket: Bucket, times: StepTimes, *_emitted: Any, waiting: int) -> None:  # noqa: ARG002
        self.steps.append(times)
        self.split += plan.split


@dataclasses.dataclass(frozen=True)
class Group:
    """What some rows of a batch got in one turn.

    Attributes:
        seconds_per_token: of a row. windows: verified. accepted: drafts, of all windows. blocked: windows, by a grammar.
        late: part of the steps in which a row verified fewer drafts, for masks would have been late.
    """

    seconds_per_token: float
    windows: int
    accepted: int
    blocked: int = 0
    late: float = 0.0


@dataclasses.dataclass(frozen=True)
class Turn:
    """One measurement of a batch: its groups ("constrained": the rows that have a grammar in the constrained batch), and
    seconds a step by what the host did."""

    groups: Mapping[str, Group]
    host: Mapping[str, float]
    split_steps: float


class Batches:
    """Makes the batches of one model.

    Args:
        name: of the model, as in `--model`.
    """

    def __init__(self, name: str, vocab_size: int, rows: int, context: int):
        self._rows, self._context = rows, context
        self.prompts: list[list[int]] | None = None
        if name in SHAPES:
            self._tokenizer = made_up_tokenizer(vocab_size)
        else:
            self._tokenizer = Tokenizer.from_folder(resolve_model(name))
            self.prompts = example_prompts(self._tokenizer, rows, context)
        self._compiler = GrammarCompiler(self._tokenizer, vocab_size, [self._tokenizer.hugging_face.eos_token_id])

    def load(self, engine: Engine, batch: str, depth: int) -> Load:
        """A batch's requests, prefilled; those of odd numbers may have a grammar."""
        rules = [self.rule(constrained=batch == "constrained" and i % 2 == 1) for i in range(self._rows)]
        params = PARAMS[batch]
        return Load(engine, self._rows, self._context, depth=depth, params=params, prompts=self.prompts, rules=rules)

    def rule(self, *, constrained: bool) -> HostRule:
        """Of one request: it gives the text, and may have the grammar."""
        text = text_stream(self._tokenizer, [], GREEDY)
        assert text is not None
        if not constrained:
            return text
        grammar = self._compiler.compile(StructuredOutputsParams(json=SCHEMA))
        return WatchedRule(grammar, text)


def example_prompts(tokenizer: Tokenizer, rows: int, context: int) -> list[list[int]]:
    """Pieces of this package's own files, which every machine has, each with the same example of JSON behind it."""
    files = sorted(Path(models.__file__).parents[2].glob("jaxspec/**/*.py"))
    source: list[int] = []
    for file in files:
        source += tokenizer.encode(file.read_text(encoding="utf-8"))
    example = tokenizer.encode(f"\n\n# records.json\n{json.dumps(EXAMPLE)}\n\n# more_records.json\n")[-context:]
    length = context - len(example)
    starts = np.linspace(0, len(source) - length, rows).astype(int)
    return [source[start : start + length] + example for start in starts]


def group_of(number: int) -> str:
    return "constrained" if number % 2 else "free"


def measure(load: Load, steps: int) -> Turn:
    """Of steps that are read late; the load's requests must just have been prefilled."""
    requests = load.requests
    groups = {name: [r for i, r in enumerate(requests) if group_of(i) == name] for name in BOUNDS}
    rules = [r.rule for r in requests if isinstance(r.rule, WatchedRule)]
    log = Times()
    with load.going_on(len(requests)):
        tokens = dict.fromkeys((r.id for r in requests), 0)
        before = {name: _windows(each) for name, each in groups.items()}
        counted = _counted(rules)
        load.engine.step_log = log
        started = time.perf_counter()
        for _ in range(steps):
            for out in load.step():
                tokens[out.request_id] += len(out.new_ids)
        seconds = time.perf_counter() - started
        load.engine.step_log = None
        masks, blocked, asked, late = _counted(rules) - counted
        after = {name: _windows(each) for name, each in groups.items()}
    figures = {}
    for name, each in groups.items():
        windows, accepted = (b - a for a, b in zip(before[name], after[name], strict=True))
        per_row = sum(tokens[r.id] for r in each) / len(each)
        ruled = (int(blocked), late / max(asked, 1)) if name == "constrained" else ()
        figures[name] = Group(seconds / per_row, windows, accepted, *ruled)
    return Turn(figures, host_seconds(log, seconds, masks), log.split / len(log.steps))


def _counted(rules: Sequence[WatchedRule]) -> np.ndarray:
    """Of some rules: seconds of masks, windows blocked, steps, steps that verified fewer drafts."""
    each = [(rule.seconds, rule.blocked, rule.asked, rule.late) for rule in rules]
    return np.array(each, float).reshape(-1, 4).sum(axis=0)


def _windows(requests: Sequence[Request]) -> tuple[int, int]:
    """Verified windows of some requests, and the drafts accepted in them."""
    counts = [sum(each) for each in zip(*(r.windows for r in requests), strict=True)]
    return sum(counts), sum(i * count for i, count in enumerate(counts))


def host_seconds(log: Times, seconds: float, masks: float) -> dict[str, float]:
    """Seconds a step in all, and of the host: planning and dispatching, waiting, working on what it read; masks in that.

    p95: which a step in twenty exceeds.
    """
    steps = log.steps

    def p95(values: Sequence[float]) -> float:
        return float(np.percentile(values, 95))

    return {
        "step": seconds / len(steps),
        "dispatch": statistics.mean(t.dispatched - t.planned for t in steps),
        "wait": statistics.mean(t.read - t.reading for t in steps),
        "after_read": statistics.mean(t.processed - t.read for t in steps),
        "masks": masks / len(steps),
        "step_p95": p95(np.diff([t.read for t in steps]).tolist()),
        "dispatch_p95": p95([t.dispatched - t.planned for t in steps]),
        "after_read_p95": p95([t.processed - t.read for t in steps]),
    }


def figures(turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Of one k: times per token by batch and rows, ratios over the free batch, acceptance, and the host's times."""

    def median(batch: str, group: str) -> float:
        return statistics.median(turn.groups[group].seconds_per_token for turn in turns[batch])

    def accepted(batch: str, group: str) -> float | None:
        windows = sum(turn.groups[group].windows for turn in turns[batch])
        return round(sum(turn.groups[group].accepted for turn in turns[batch]) / windows, 4) if windows else None

    constrained = [turn.groups["constrained"] for turn in turns["constrained"]]

    def blocked() -> float | None:
        windows = sum(group.windows for group in constrained)
        return round(sum(group.blocked for group in constrained) / windows, 4) if windows else None

    def step(batch: str) -> float:
        return statistics.median(turn.host["step"] for turn in turns[batch])

    return {
        "ms_per_token": {b: {g: ms(median(b, g)) for g in BOUNDS} for b in turns},
        "over_free": {g: round(median("constrained", g) / median("free", g), 4) for g in BOUNDS},
        "step_over_free": round(step("constrained") / step("free"), 4),
        "over_full": {g: round(median("constrained", g) / median("full", g), 4) for g in BOUNDS},
        "accepted_a_window": {b: {g: accepted(b, g) for g in BOUNDS} for b in turns},
        "blocked": blocked(),
        "late": round(statistics.mean(group.late for group in constrained), 4),
        "host_ms_a_step": {
            b: {what: ms(statistics.median(turn.host[what] for turn in each)) for what in each[0].host}
            for b, each in turns.items()
        },
        "split_steps": round(statistics.mean(turn.split_steps for turn in turns["constrained"]), 4),
    }


def gates(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each kind of rows the worst ratio over all k, and whether it is within its bound."""
    out = []
    for group, bound in BOUNDS.items():
        row = max(rows, key=lambda each: each["over_free"][group])
        worst = row["over_free"][group]
        out.append(
            {"gate": f"time per token of {group} rows beside grammars, over the same rows without", "worst": worst,
             "drafted_tokens": row["drafted_tokens"], "bound": bound, "met": worst <= bound}
        )  # fmt: skip
    return out


def device_figures(load: Load) -> dict[str, Any]:
    """From a trace of steps that are read late: kernels, launches and kernel time a step, and idle parts of the time."""
    with load.going_on(len(load.requests)):
        trace = traced(load.step, TRACED_STEPS)
    counted = count_kernels(trace, TRACED_STEPS)
    idle = idle_parts(trace, TRACED_STEPS)["idle_between_kernels"]
    return {"kernels": counted.count, "launches": counted.launches, "kernels_ms": ms(counted.seconds), "idle": idle}


def run(arguments: argparse.Namespace) -> int:
    keep_graphs()
    gpu = jax.devices()[0].platform == "gpu"
    mesh = mesh_of_one()
    dtype = resolve_dtype(EngineConfig(dtype=arguments.dtype), on_gpu=gpu)
    began = time.perf_counter()
    weights = load_weights(
        arguments.model,
        arguments.layers,
        mesh,
        np_dtype(dtype),
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    rows, steps = arguments.rows, arguments.steps or (64 if gpu else 8)
    context = arguments.context or (1024 if gpu else 128)
    batches = Batches(arguments.model, weights.model.config.vocab_size, rows, context)
    engines = {}
    for k in arguments.tokens or [0, DEFAULT_TOKENS]:
        budget = default_budget(gpu)
        # Requests that wait for the last one's prefill decode meanwhile, and then go on.
        filling = -(-rows * context // max(budget - rows * (k + 1), 1)) + rows
        loop = steps + TRACED_STEPS + filling
        sizes = Sizes((rows,), context, steps=4, loops=(loop, loop), budget=budget, tokens=k)
        engines[k] = build_engine(weights, sizes, k, mesh, dtype=dtype, lean=True, full=True, split=True)
    warm_up({f"{k} drafts": engine for k, engine in engines.items()})
    print(f"compiled after {time.perf_counter() - began:.1f} s", flush=True)

    measured = []
    for k, engine in engines.items():
        turns: dict[str, list[Turn]] = {batch: [] for batch in BATCHES}
        for number in range(arguments.turns):
            shift = number % len(BATCHES)
            for batch in (*BATCHES[shift:], *BATCHES[:shift]):
                load = batches.load(engine, batch, arguments.readout_depth)
                turns[batch].append(measure(load, steps))
                load.close()
        measured.append({"drafted_tokens": k} | figures(turns))
        print(measured[-1], flush=True)
    result: dict[str, Any] = {
        "benchmark": "grammar",
        "model": arguments.model,
        "layers": weights.model.config.num_layers,
        "dtype": dtype,
        "rows": rows,
        "constrained_rows": rows // 2,
        "context": context,
        "steps": steps,
        "turns": arguments.turns,
        "readout_depth": arguments.readout_depth,
        "executables": sum(len(engine.runner.executables) for engine in engines.values()),
        "compiles_after_warm_up": compiles.after_warmup,
        "gates": gates(measured),
        "drafts": measured,
    }

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - began, 1)
        record.write(f"grammar_{models.as_recorded(arguments.model)}", result, arguments)

    if gpu:
        save()  # before tracing, which may crash the process
        for row in measured:
            row["device"] = {}
            for batch in BATCHES:
                load = batches.load(engines[row["drafted_tokens"]], batch, arguments.readout_depth)
                row["device"][batch] = device_figures(load)
                load.close()
    save()
    print_tables(result)
    return 0


def print_tables(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['layers']} layers, {result['dtype']}, {result['rows']} rows: ms per token")
    lines = []
    shown = ("step", "step_p95", "wait", "dispatch", "after_read", "after_read_p95", "masks")
    for row in result["drafts"]:
        for batch, times in row["ms_per_token"].items():
            host = row["host_ms_a_step"][batch]
            device = row.get("device", {}).get(batch)
            accepted = row["accepted_a_window"][batch]
            lines.append(
                [str(row["drafted_tokens"]), batch, *(f"{times[group]:.3f}" for group in BOUNDS)]
                + ["" if accepted[group] is None else f"{accepted[group]:.2f}" for group in BOUNDS]
                + [f"{host[what]:.3f}" for what in shown]
                + ([f"{device['kernels_ms']:.3f}", f"{device['launches']:g}", f"{100 * device['idle']:.1f} %"] if device
                   else ["", "", ""])
            )  # fmt: skip
    header = ["drafts", "batch", *BOUNDS, *(f"accepted, {group}" for group in BOUNDS)]
    header += [
        "ms a step",
        "p95",
        "host waits",
        "dispatches",
        "after read",
        "p95",
        "masks",
        "kernels",
        "launches",
        "idle",
    ]
    print(record.table(header, lines))
    for row in result["drafts"]:
        late = f"{100 * row['late']:.1f} % of constrained rows' steps verified fewer drafts"
        ratios = ", ".join(
            f"{group} {row['over_free'][group]:.3f} (over full sampling {row['over_full'][group]:.3f})"
            for group in BOUNDS
        )
        step = f"a step {row['step_over_free']:.3f}"
        split = f"{100 * row['split_steps']:.0f} % of the steps chose late"
        print(f"{row['drafted_tokens']} drafts: {ratios}; {step}; {split}; {late}")
    for gate in result["gates"]:
        where = f"{gate['worst']:g} at {gate['drafted_tokens']} drafts; bound {gate['bound']:g}"
        print(f"{'met' if gate['met'] else 'NOT met'}: {gate['gate']} ({where})")
