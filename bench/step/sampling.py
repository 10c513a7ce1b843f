"""`bench sampling`: what a step costs when every row asks for a sampling rule, over the same step when all are greedy.

Plain steps and cycles of k drafted tokens (MTP) run in two engines that share the weights, as in `bench step`: the
production runner and scheduler, requests that were prefilled, the engine's own loop at a readout depth of 1. Each rule
has requests of its own, from the same prompts. Greedy requests are measured first and last, and the mean counts. On a
GPU, a trace then tells the kernels and launches of each step.

With random weights hardly any draft is accepted, and distributions are flatter than a trained model's: more ids stay
within top_p.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax

from bench.harness import models, record
from bench.harness.arguments import names_among, numbers
from bench.harness.models import SHAPES, mesh_of_one
from bench.harness.timing import ms
from bench.harness.trace import keep_graphs
from bench.step.engines import build_engine, executables, warm_up
from bench.step.load import GREEDY, Load
from bench.step.sizes import DEFAULT_TOKENS, Sizes, default_budget
from bench.step.step import kind
from jaxspec.compat import compiles
from jaxspec.config import EngineConfig, np_dtype, resolve_dtype
from jaxspec.engine.engine import Engine
from jaxspec.sampling.params import SamplingParams

LARGEST_RATIO = 1.05


def _rule(temperature: float = 0.7, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=None, ignore_eos=True, **params)


RULES = {
    "temperature": _rule(),
    "min_p": _rule(min_p=0.05),
    "top_k": _rule(top_k=50),
    "top_p": _rule(top_p=0.95),
    "top_k+top_p": _rule(top_k=50, top_p=0.95),
    "penalties": _rule(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "logit_bias": _rule(logit_bias=dict.fromkeys(range(100), 1.0)),
    "alternatives": _rule(temperature=0, logprobs=5),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="moonlight", help="its shape, with random weights")
    parser.add_argument(
        "--tokens", type=int, default=DEFAULT_TOKENS, metavar="K", help="drafted a cycle (default: 3); 0: no cycles"
    )
    parser.add_argument("--rows", type=numbers, metavar="N,N,...", help="decode rows (default: 1,32,128; CPU: 1,2)")
    parser.add_argument(
        "--rules", type=names_among(RULES, "rule"), default=list(RULES), metavar="NAME,...", help=f"{'; '.join(RULES)}"
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="prompt length (default: 1024; CPU: 128)")
    parser.add_argument("--loop", type=int, metavar="N", help="steps of each run (default: 64; CPU: 8)")
    parser.add_argument("--layers", type=int, metavar="N", help="shrink the model to N layers")
    record.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    keep_graphs()
    gpu = jax.devices()[0].platform == "gpu"
    mesh = mesh_of_one()
    dtype = resolve_dtype(EngineConfig(), on_gpu=gpu)
    began = time.perf_counter()
    loop = arguments.loop or (64 if gpu else 8)
    sizes = Sizes(
        rows=tuple(arguments.rows or ((1, 32, 128) if gpu else (1, 2))),
        context=arguments.context or (1024 if gpu else 128),
        steps=4,
        loops=(loop, loop),
        budget=default_budget(gpu),
        tokens=arguments.tokens,
    )
    weights = models.draw(models.random_config(arguments.model, arguments.layers), mesh, np_dtype(dtype))
    engines = {
        k: build_engine(weights, sizes, k, mesh, dtype=dtype, lean=True, full=True) for k in sorted({0, sizes.tokens})
    }
    warm_up({kind(k): engine for k, engine in engines.items()})
    print(f"compiled after {time.perf_counter() - began:.1f} s", flush=True)

    times = {k: step_seconds(engine, sizes, k, arguments.rules) for k, engine in engines.items()}
    rows = [{"rows": n, "drafted_tokens": k, **figures(times[k], n)} for k in engines for n in sizes.rows]
    result: dict[str, Any] = {
        "benchmark": "sampling",
        "model": arguments.model,
        "layers": weights.model.config.num_layers,
        "dtype": dtype,
        "context": sizes.context,
        "loop_steps": loop,
        "rules": {name: repr(RULES[name]) for name in arguments.rules},
        **executables(engines.values()),
        "compiles_after_warm_up": compiles.after_warmup,
        "gate": gate(rows),
        "rows": rows,
    }

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - began, 1)
        record.write(f"sampling_{arguments.model}", result, arguments)

    if gpu:
        save()  # before tracing, which may crash the process
        for row in rows:
            row["kernels"] = {}
        for k, engine in engines.items():
            add_kernels(
                engine, sizes, arguments.rules, {r["rows"]: r["kernels"] for r in rows if r["drafted_tokens"] == k}
            )
    save()
    print_table(result)
    return 0


def step_seconds(engine: Engine, sizes: Sizes, k: int, rules: list[str]) -> dict[str, dict[int, float]]:
    """Seconds of a step by rule and row count; "greedy" is the mean of the first and the last measurement."""

    def measured(params: SamplingParams) -> dict[int, float]:
        load = Load(engine, sizes.rows[-1], sizes.context, params=params)
        out = {n: load.time_loop(n, sizes.loop(k)).seconds for n in sizes.rows}
        load.close()
        return out

    first = measured(GREEDY)
    out = {}
    for name in rules:
        out[name] = measured(RULES[name])
        shown = ", ".join(f"{ms(seconds)} ms at {n}" for n, seconds in out[name].items())
        print(f"{kind(k)}, {name}: {shown}", flush=True)
    last = measured(GREEDY)
    return {"greedy": {n: statistics.mean((first[n], last[n])) for n in sizes.rows}} | out


def figures(times: Mapping[str, Mapping[int, float]], rows: int) -> dict[str, Any]:
    """Milliseconds of each rule's step at a row count, and over the greedy one's."""
    greedy = times["greedy"][rows]
    return {
        "step_ms": {name: ms(each[rows]) for name, each in times.items()},
        "over_greedy": {name: round(each[rows] / greedy, 4) for name, each in times.items() if name != "greedy"},
    }


def gate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst ratio over all rules and row counts, where it is, and whether it is within the bound."""
    worst, rule, row = max(
        ((ratio, rule, row) for row in rows for rule, ratio in row["over_greedy"].items()), key=lambda each: each[0]
    )
    at = {"rule": rule, "at_rows": row["rows"], "drafted_tokens": row["drafted_tokens"]}
    return {"gate": "a step with a rule over the greedy one", "worst": worst, **at, "bound": LARGEST_RATIO,
            "met": worst <= LARGEST_RATIO}  # fmt: skip


def add_kernels(engine: Engine, sizes: Sizes, rules: list[str], rows: Mapping[int, dict[str, Any]]) -> None:
    """Adds to each row count's figures the kernels, launches and kernel time of each rule's step. Traces: at the end."""
    for name, params in {"greedy": GREEDY, **{name: RULES[name] for name in rules}}.items():
        load = Load(engine, sizes.rows[-1], sizes.context, params=params)
        for n, out in rows.items():
            counted = load.kernels(n)
            out[name] = {"kernels": counted.count, "launches": counted.launches, "kernels_ms": ms(counted.seconds)}
        load.close()


def print_table(result: dict[str, Any]) -> None:
    names = list(result["rows"][0]["over_greedy"])
    lines = [
        [str(r["rows"]), str(r["drafted_tokens"]), f"{r['step_ms']['greedy']:.2f}"]
        + [f"{r['over_greedy'][name]:.3f}" for name in names]
        for r in result["rows"]
    ]
    print(f"{result['model']}, {result['layers']} layers, {result['dtype']}; over the greedy step's time")
    print(record.table(["rows", "drafts", "greedy ms", *names], lines))
    gate = result["gate"]
    where = f"{gate['rule']} at {gate['at_rows']} rows, {gate['drafted_tokens']} drafts"
    print(
        f"{'met' if gate['met'] else 'NOT met'}: {gate['gate']} ({gate['worst']:g}: {where}; bound {gate['bound']:g})"
    )
