"""`bench adaptive`: throughput of drafting that follows the load, beside no drafts and fixed numbers of them.

Drafts are accepted one by one with one probability (`synthetic_acceptance_pattern` "each"), so that windows of k drafts
would yield the given lengths on average. Each engine keeps a number of requests running, with prompts and answers of
random length, and the tokens that it generates in some seconds are counted, prompts being part of the load. Three more
loads: "mixed", where every other request has length 1 and the others length 3; and "switched", where all have length 1 in
the first half of the time and length 3 in the second, those that run included. Each has run for a fifth of that time before:
what it takes to follow a change is measured in "switched".

Engines: plain (no draft model at all), a fixed engine for each of --fixed, and the adaptive one. Each has the steps that a
server has at the server's most requests; what steps cost is measured once nothing compiles. Engines take turns, and medians of
the repeats are compared; the plain engine, to which all loads are alike, runs the first load of each number of requests. The
last column is the adaptive engine's throughput over the best of the others at that load, which is judged at every load.

One command need not do it all: --rows and --lengths choose a part, --prepare compiles some engines' steps, which the next
commands on the machine find, and --merge makes one record and picture of the parts' records:

    python -m bench adaptive --prepare plain,1
    python -m bench adaptive --prepare 3,adaptive
    python -m bench adaptive --rows 1,4,8,16 --out few.json
    python -m bench adaptive --rows 32,64,128 --out many.json
    python -m bench adaptive --merge few.json many.json
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.harness import models, record
from bench.harness.arguments import numbers
from bench.harness.models import SHAPES, Weights, mesh_of_one
from bench.step.adaptive_svg import draw
from bench.step.engines import executables, warm_up
from jaxspec.compile_cache import open_store
from jaxspec.config import EngineConfig, Settings, np_dtype, pages_for, resolve, resolve_dtype
from jaxspec.engine.acceptance import probability_for
from jaxspec.engine.adaptive_drafts import AdaptiveDrafts
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.state import ACCEPT_PROBABILITY
from jaxspec.errors import ConfigError, writing
from jaxspec.sampling.params import SamplingParams

PLAIN, ADAPTIVE = "plain", "adaptive"
MIXED, SWITCHED = "mixed", "switched"
LOADS: tuple[float | str, ...] = (1.0, 1.5, 2.2, 3.0, MIXED, SWITCHED)
# Lengths of the loads that have two.
LOW, HIGH = 1.0, 3.0
ROWS, REPEATED_ROWS = (1, 4, 8, 16, 32, 64, 128), (1, 32, 128)
# The adaptive engine's share of the best of the others, at every load.
GATE, GOAL = 0.97, 0.985
# Of a measurement's time, before it.
WARMUP_PART = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = f"random weights of a shape ({', '.join(SHAPES)}), or a folder or hub id, with an MTP layer"
    parser.add_argument("--model", default="moonlight", metavar="NAME", help=f"{model} (default: moonlight)")
    parser.add_argument("--layers", type=int, metavar="N", help="shrink a shape to N layers")
    parser.add_argument(
        "--rows", type=numbers, metavar="N,N,...", help=f"requests (default: {_listed(ROWS)}; CPU: 1,4)"
    )
    parser.add_argument("--tokens", type=int, default=3, metavar="K", help="most drafts of a step (default: 3)")
    fixed = "numbers of drafts of fixed engines (default: 1 and K)"
    parser.add_argument("--fixed", type=numbers, metavar="N,N,...", help=fixed)
    lengths = f"tokens that a window of K drafts yields on average, {MIXED}, {SWITCHED} (default: {_listed(LOADS)})"
    parser.add_argument("--lengths", type=_loads, default=list(LOADS), metavar="L,L,...", help=lengths)
    parser.add_argument("--prompt", type=int, metavar="N", help="mean tokens of a prompt (default: 256; CPU: 24)")
    parser.add_argument("--output", type=int, metavar="N", help="mean tokens of an answer (default: 256; CPU: 32)")
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S", help="of a measurement (default: 6)")
    repeats = f"of each measurement (default: 3 of {_listed(REPEATED_ROWS)} requests, else 1)"
    parser.add_argument("--repeats", type=int, metavar="N", help=repeats)
    prepare = "only compile the steps of these engines: plain, numbers of drafts, adaptive"
    parser.add_argument("--prepare", type=_engine_names, default=[], metavar="NAME,...", help=prepare)
    merge = "measure nothing: make one record of these, of parts of one run"
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="FILE", help=merge)
    record.add_arguments(parser)


def _listed(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))


def _loads(text: str) -> list[float | str]:
    return [part if part in (MIXED, SWITCHED) else float(part) for part in text.split(",")]


def _engine_names(text: str) -> list[str]:
    return [part if part in (PLAIN, ADAPTIVE) else fixed_name(int(part)) for part in text.split(",")]


def fixed_name(drafts: int) -> str:
    return f"k = {drafts}"


@dataclass(frozen=True)
class Sizes:
    """Of the requests, at most `rows` at once; prompts and answers have between half and one and a half of these tokens."""

    rows: int
    prompt: int
    output: int

    @property
    def longest(self) -> int:
        return 3 * (self.prompt + self.output) // 2 + 2


class Traffic:
    """Keeps requests running on an engine.

    Args:
        lengths: what windows of requests yield, in turn; set anew by `switch`.
    """

    def __init__(self, engine: Engine, sizes: Sizes, drafts: int, lengths: Sequence[float]):
        self._engine, self._sizes, self._drafts = engine, sizes, drafts
        self._probabilities = [probability_for(length, drafts) for length in lengths]
        self._rng, self._begun = np.random.default_rng(0), 0
        for _ in range(sizes.rows):
            self._begin()

    def _begin(self) -> None:
        prompt, output = (
            int(self._rng.integers(-(-size // 2), 3 * size // 2, endpoint=True))
            for size in (self._sizes.prompt, self._sizes.output)
        )
        ids = self._rng.integers(0, self._engine.vocab_size, prompt).tolist()
        # Sampled, because greedy and sampled steps are the same executable and a seed of its own makes rows differ.
        params = SamplingParams(temperature=1, max_tokens=output, ignore_eos=True)
        self._engine.accept_probability = self._probabilities[self._begun % len(self._probabilities)]
        request = Request(f"t{self._begun}", ids, params)
        self._engine.add(request)
        # Every engine's n-th request has the same luck at a position of its text, or chance would move small loads by percents.
        request.seed = self._begun
        self._begun += 1

    def step(self) -> None:
        for out in self._engine.step():
            if out.error:
                raise RuntimeError(f"request {out.request_id} failed in the middle of a measurement: {out.error}")
            if out.finish_reason:
                self._begin()

    def run(self, seconds: float) -> tuple[int, float]:
        """Tokens generated, and seconds."""
        before, started = self._engine.stats().generation_tokens, time.perf_counter()
        while (passed := time.perf_counter() - started) < seconds:
            self.step()
        return self._engine.stats().generation_tokens - before, passed

    def switch(self, length: float) -> None:
        """All requests yield this from now on, those that run included."""
        self._probabilities = [probability_for(length, self._drafts)]
        state = self._engine.runner.state
        params_f = np.array(state.params_f)
        params_f[:, ACCEPT_PROBABILITY] = self._probabilities[0]
        self._engine.runner.state = state._replace(params_f=jax.device_put(params_f, state.params_f.sharding))

    def end(self) -> None:
        for i in range(self._begun):
            self._engine.abort(f"t{i}")
        while self._engine.has_work:
            self._engine.step()


def measure(engine: Engine, sizes: Sizes, drafts: int, load: float | str, seconds: float) -> dict[str, Any]:
    """One measurement: tokens a second, windows' mean length, and how many steps had how many drafts."""
    lengths = {MIXED: [LOW, HIGH], SWITCHED: [LOW]}.get(load, [load]) if isinstance(load, str) else [load]
    traffic = Traffic(engine, sizes, drafts, [float(length) for length in lengths])
    while engine.stats().num_running < sizes.rows:
        traffic.step()
    traffic.run(WARMUP_PART * seconds)
    marks, parts = [engine.stats()], []
    for part in range(2 if load == SWITCHED else 1):
        if part:
            traffic.switch(HIGH)
        parts.append(traffic.run(seconds / (2 if load == SWITCHED else 1)))
        marks.append(engine.stats())
    traffic.end()
    out: dict[str, Any] = {"tokens_per_s": sum(n for n, _ in parts) / sum(s for _, s in parts)}
    if len(parts) > 1:
        out["tokens_per_s_of_halves"] = [round(n / s, 1) for n, s in parts]
    counts = [mark.acceptance for mark in marks if mark.acceptance is not None]
    if counts:
        out["mean_length"] = counts[-1].since(counts[0]).mean_length
        if len(parts) > 1:
            out["mean_length_of_halves"] = [now.since(then).mean_length for then, now in itertools.pairwise(counts)]
        now, then = marks[-1].steps_by_drafts, marks[0].steps_by_drafts
        out["steps_by_drafts"] = {str(k): now[k] - then[k] for k in now}
    return out


def build_engines(
    weights: Weights, sizes: Sizes, drafts: int, fixed: Sequence[int], dtype: Any, only: Sequence[str] = ()
) -> dict[str, Engine]:
    """Plain, fixed and adaptive, or some of them; nothing is compiled yet.

    Raises:
        ConfigError: `only` names an engine that there is not.
    """
    plans = {PLAIN: (0, False), **{fixed_name(k): (k, False) for k in fixed}, ADAPTIVE: (drafts, True)}
    if unknown := set(only) - set(plans):
        raise ConfigError(f"--prepare {min(unknown)}: there are {', '.join(plans)}")
    out = {}
    for name, (k, adaptive) in plans.items():
        if only and name not in only:
            continue
        settings = _settings(weights, sizes, k, dtype, adaptive=adaptive)
        draft = weights.draft if k else None
        runner = Runner(weights.model, weights.params, settings, mesh_of_one(), draft=draft, files=open_store(None))
        out[name] = Engine(runner, vocab_size=weights.model.config.vocab_size)
    return out


def _settings(weights: Weights, sizes: Sizes, k: int, dtype: Any, *, adaptive: bool) -> Settings:
    on_gpu = jax.devices()[0].platform == "gpu"
    budget = max(2048 if on_gpu else 256, sizes.rows * (k + 1))
    return resolve(
        EngineConfig(
            dtype=dtype,
            max_model_len=sizes.longest + 64,
            max_num_seqs=sizes.rows,
            max_num_batched_tokens=budget,
            num_gpu_blocks_override=sizes.rows * pages_for(sizes.longest + 64) + 1,
            num_speculative_tokens=k,
            adaptive_speculation=adaptive,
            synthetic_acceptance_length=float(k + 1) if k else None,  # requests have their own
            synthetic_acceptance_pattern="each" if k else "first",
            enable_prefix_caching=False,
        ),
        model_max_position=weights.model.config.max_position,
        page_bytes=0,
        free_bytes=0,
        on_gpu=on_gpu,
    )


def _measurements(
    engines: dict[str, Engine], sizes: Sizes, arguments: argparse.Namespace
) -> Iterator[tuple[int, float | str, dict[str, Any]]]:
    """Of each number of requests and each load: every engine's. Without drafts loads are alike: that engine runs the first."""
    for rows in arguments.rows:
        of_rows, plain = dataclasses.replace(sizes, rows=rows), list[dict[str, Any]]()
        repeats = arguments.repeats or (3 if rows in REPEATED_ROWS else 1)
        for load in arguments.lengths:
            runs: dict[str, list[dict[str, Any]]] = {name: plain if name == PLAIN else [] for name in engines}
            for repeat, (name, engine) in itertools.product(range(repeats), engines.items()):
                if len(runs[name]) == repeat:  # otherwise an earlier load had it
                    runs[name].append(measure(engine, of_rows, arguments.tokens, load, arguments.seconds))
            yield rows, load, {name: _summary(each) for name, each in runs.items()}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run whose throughput is the median, with that of all."""
    rates = [run["tokens_per_s"] for run in runs]
    median = statistics.median_low(rates)
    of_runs = [round(rate, 1) for rate in rates]
    return {**runs[rates.index(median)], "tokens_per_s": round(median, 1), "tokens_per_s_of_runs": of_runs}


def _measured_costs(engine: Engine) -> dict[str, dict[str, float]]:
    """Milliseconds by which the adaptive engine chooses, of each bucket by its busy decode rows."""
    out: dict[str, dict[str, float]] = {}
    assert isinstance(engine.control, AdaptiveDrafts)
    assert engine.control.costs is not None  # since it is warm
    for (bucket, rows), seconds in sorted(engine.control.costs.measured.items()):
        out.setdefault(str(bucket), {})[str(rows)] = round(1e3 * seconds, 3)
    return out


def judged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The lowest share of the best, where it is, and whether it reaches the gate."""
    lowest = min(results, key=lambda each: each["adaptive_of_best"])
    worst = lowest["adaptive_of_best"]
    return {
        "gate": "adaptive over the best of the others", "worst": worst, "requests": lowest["requests"],
        "load": lowest["load"], "loads": len(results), "bound": GATE, "goal": GOAL, "met": worst >= GATE,
    }  # fmt: skip


def table(results: Sequence[Mapping[str, Any]]) -> str:
    header = ["requests", "length", *results[0]["engines"], "of the best"]
    rows = [
        [
            str(each["requests"]), str(each["load"]), *(f"{e['tokens_per_s']:.0f}" for e in each["engines"].values()),
            f"{each['adaptive_of_best']:.3f}",
        ]
        for each in results
    ]  # fmt: skip
    return record.table(header, rows)


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """One result of the records of a run's parts.

    Raises:
        ConfigError: a file is no such record, is of another run (model, sizes, engines, device, commit), or has a load that
            another has too.
    """
    parts: list[dict[str, Any]] = []
    for file in files:
        try:
            part = json.loads(file.read_text())
            if part["benchmark"] != "adaptive" or not part["results"]:
                raise ValueError("another benchmark, or nothing measured")
            same = {name: part[name] for name in ("model", "sizes", "drafts", "seconds_of_a_measurement")}
            same |= {name: part["environment"].get(name) for name in ("device", "commit", "versions")}
            same["engines"] = list(part["results"][0]["engines"])
        except (OSError, ValueError, LookupError, TypeError) as e:
            raise ConfigError(f"--merge {file} is no record of bench adaptive: {e}") from e
        if parts and (differing := [name for name in same if same[name] != parts[0]["same"][name]]):
            raise ConfigError(f"--merge {file} is of another run than {files[0]}: {', '.join(differing)}")
        parts.append(part | {"same": same})
    results = sorted(
        (each for part in parts for each in part["results"]), key=lambda r: (r["requests"], str(r["load"]))
    )
    loads = [(each["requests"], each["load"]) for each in results]
    if doubled := {load for load in loads if loads.count(load) > 1}:
        raise ConfigError(f"--merge: two parts have {min(map(str, doubled))}")
    kept = {name: parts[0][name] for name in ("model", "sizes", "drafts", "seconds_of_a_measurement")}
    return kept | {
        "parts": [
            {name: part[name] for name in ("command", "environment", "step_ms") if name in part} for part in parts
        ],
        "results": results,
    }


def write(result: dict[str, Any], arguments: argparse.Namespace, *, with_device: bool, announced: bool = True) -> Path:
    """The record, whose path is returned."""
    name, gate = f"adaptive_{result['model']}", judged(result["results"])
    whole = {"benchmark": "adaptive", **result, "gate": gate}
    return record.write(name, whole, arguments, with_device=with_device, announced=announced)


def report(result: dict[str, Any], arguments: argparse.Namespace, *, with_device: bool) -> int:
    """Prints and writes a result with its picture; 1 where the gate is not met."""
    gate = judged(result["results"])
    picture = write(result, arguments, with_device=with_device).with_suffix(".svg")
    with writing(picture):
        picture.write_text(draw(result["results"], GATE, ADAPTIVE), encoding="utf-8")
    print(f"wrote {picture}\noutput tokens/s\n{table(result['results'])}")
    where = f"{gate['worst']:g} of {gate['requests']} requests, length {gate['load']}"
    print(f"{'met' if gate['met'] else 'NOT met'}: {gate['gate']} ({where}; bound {GATE:g}, goal {GOAL:g})")
    return 0 if gate["met"] else 1


def run(arguments: argparse.Namespace) -> int:
    if arguments.merge:
        return report(merged(arguments.merge), arguments, with_device=False)
    on_gpu = jax.devices()[0].platform == "gpu"
    arguments.rows = arguments.rows or (list(ROWS) if on_gpu else [1, 4])
    fixed = arguments.fixed or sorted({1, arguments.tokens})
    most = max(*arguments.rows, ROWS[-1] if on_gpu else 1)
    sizes = Sizes(most, arguments.prompt or (256 if on_gpu else 24), arguments.output or (256 if on_gpu else 32))
    dtype = resolve_dtype(EngineConfig(), on_gpu=on_gpu)
    mesh = mesh_of_one()
    models.check_layers(arguments.model, arguments.layers)
    if arguments.model in SHAPES:
        weights = models.draw(models.random_config(arguments.model, arguments.layers), mesh, np_dtype(dtype))
    else:
        weights = models.load(arguments.model, mesh, np_dtype(dtype))
    engines = build_engines(weights, sizes, arguments.tokens, fixed, dtype, arguments.prepare)
    warm_up(engines)
    if arguments.prepare:
        return 0
    results: list[dict[str, Any]] = []
    result = {
        "model": models.as_recorded(arguments.model),
        "sizes": dataclasses.asdict(sizes),
        "drafts": arguments.tokens,
        "seconds_of_a_measurement": arguments.seconds,
        **executables(engines.values()),
        "step_ms": _measured_costs(engines[ADAPTIVE]),
        "results": results,
    }
    for number, load, found in _measurements(engines, sizes, arguments):
        rates = {name: each["tokens_per_s"] for name, each in found.items()}
        ratio = rates[ADAPTIVE] / max(rate for name, rate in rates.items() if name != ADAPTIVE)
        results.append({"requests": number, "load": load, "adaptive_of_best": round(ratio, 4), "engines": found})
        print(table(results[-1:]), flush=True)
        write(result, arguments, with_device=True, announced=False)  # what is stopped keeps its loads, for --merge
    return report(result, arguments, with_device=True)
