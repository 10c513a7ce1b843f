"""`bench readout`: what late readout gains, and what a long prompt costs the requests that decode.

Both through the production engine, on random weights or a model folder, with greedy requests of random tokens.

- Depths: `--rows` requests decode. For each readout depth the time per output token: wall time of `--tokens` steps of
  the engine, divided by their number, the median of three runs. On a GPU also the part of the time in which the device
  is idle, between two steps and between any two kernels, from a trace of 32 steps that keeps recorded graphs.
- Long prompt: `--decodes` requests decode when a prompt of `--prompt` tokens arrives. Latency between two tokens of the
  decoding requests, without the prompt and from its arrival to its first token, with mixed and with separate steps. Each
  run is drawn beside the result, as `bench timeline` draws step logs.

With `--drafts K` both are of windows of K drafts of an MTP layer, none of which is accepted: a step yields one token.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import jax

from bench.harness import latency, models, record
from bench.harness.arguments import numbers
from bench.harness.shapes import SHAPES
from bench.harness.timing import ms
from bench.harness.trace import keep_graphs, traced
from bench.step import timeline_svg
from bench.step.idle import idle_parts
from bench.step.readout_runners import WARM_UP_STEPS, Runners, end
from bench.step.step_log import read_steps
from jaxspec.compat import compiles
from jaxspec.engine.step_log import StepLog

TRACED_STEPS = 32
REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="demo", help=f"demo, {', '.join(SHAPES)} (random weights), or a model folder"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="shrink a random model to N layers")
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="requests that decode (default: 32)")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="their prompts (default: 1024)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="steps of each measurement (default: 64)")
    parser.add_argument(
        "--depths", type=numbers, default=[0, 1, 2, 3], metavar="N,N,...", help="readout depths (default: 0,1,2,3)"
    )
    decodes = "requests beside the long prompt, in turn (default: 16)"
    parser.add_argument("--decodes", type=numbers, default=[16], metavar="N,N,...", help=decodes)
    parser.add_argument("--drafts", type=int, default=0, metavar="K", help="drafted a step (default: 0)")
    parser.add_argument(
        "--prompt", type=int, default=8192, metavar="TOKENS", help="length of the long prompt (default: 8192)"
    )
    parser.add_argument("--budget", type=int, metavar="TOKENS", help="token budget of a step (default: 2048; CPU: 256)")
    record.add_arguments(parser)


def time_per_token(runners: Runners, rows: int, tokens: int, depth: int) -> dict[str, Any]:
    """Milliseconds a step of the engine, in which every request gets a token, and how long the device is idle."""
    engine = runners.engine(mixed=True, depth=depth)
    requests = runners.start(engine, rows)
    times = []
    for _ in range(REPEATS):
        before = [len(r.tokens) for r in requests]
        started = time.perf_counter()
        for _ in range(tokens):
            engine.step()
        times.append((time.perf_counter() - started) / tokens)
        assert [len(r.tokens) - n for r, n in zip(requests, before, strict=True)] == [tokens] * rows
    result: dict[str, Any] = {
        "depth": depth,
        "time_per_output_token_ms": ms(statistics.median(times)),
        "of_each_run_ms": [ms(t) for t in times],
    }
    if jax.devices()[0].platform == "gpu":
        result |= idle_parts(traced(engine.step, TRACED_STEPS), TRACED_STEPS)
    end(engine, requests)
    return result


def beside_a_prompt(runners: Runners, decodes: int, *, mixed: bool, depth: int, log: Path) -> dict[str, Any]:
    """Milliseconds between two tokens of the decoding requests, without the long prompt and while it prefills."""
    step_log = StepLog(str(log))
    engine = runners.engine(mixed=mixed, depth=depth, log=step_log)
    requests = runners.start(engine, decodes)
    last: dict[str, float] = {}
    gaps: dict[bool, list[float]] = {False: [], True: []}

    def step(*, beside: bool) -> list[str]:
        outputs = engine.step()
        now = time.perf_counter()
        for out in outputs:
            if out.new_ids and out.request_id.startswith("decode"):
                if out.request_id in last:
                    gaps[beside].append(now - last[out.request_id])
                last[out.request_id] = now
        return [out.request_id for out in outputs if out.new_ids]

    for _ in range(4 * WARM_UP_STEPS):
        step(beside=False)
    long = runners.request("long", runners.prompt, max_tokens=8)
    arrived = time.perf_counter()
    engine.add(long)
    while "long" not in step(beside=True):
        pass
    first_token = time.perf_counter() - arrived
    # Each request's first token after the prompt has waited for it too.
    waiting = set(last)
    while waiting:
        waiting -= set(step(beside=True))
    end(engine, [*requests, long])
    step_log.close()
    figures = {
        name: (latency.summary(each) or {}) | {"max": round(1e3 * max(each), 3)}
        for name, each in (("without", gaps[False]), ("beside", gaps[True]))
    }
    return {
        "decodes": decodes,
        "mixed": mixed,
        "depth": depth,
        "time_to_first_token_ms": round(1e3 * first_token, 2),
        "latency_ms": figures,
    }


def draw(log: Path, picture: Path) -> None:
    """The steps from shortly before the long prompt's first to shortly after its last."""
    steps = read_steps(log)
    inside = [i for i, step in enumerate(steps) if any(row.request == "long" for row in step.rows)]
    shown = steps[max(inside[0] - 2 * WARM_UP_STEPS, 0) : inside[-1] + 1]
    picture.write_text(timeline_svg.draw(shown, shown[0].begin, shown[-1].end))


def run(arguments: argparse.Namespace) -> int:
    keep_graphs()
    runners = Runners(arguments, arguments.tokens * REPEATS + TRACED_STEPS + 2 * WARM_UP_STEPS)
    measured = []
    for depth in arguments.depths:
        measured.append(time_per_token(runners, arguments.rows, arguments.tokens, depth))
        print(measured[-1], flush=True)
    name = f"readout_{models.as_recorded(arguments.model)}"
    out: Path = arguments.out or record.results_folder() / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    prompts = []
    for decodes, mixed in itertools.product(arguments.decodes, (True, False)):
        kind = f"{'mixed' if mixed else 'separate'}_{decodes}"
        log = out.with_name(f"{out.stem}_{kind}.jsonl")
        prompts.append(beside_a_prompt(runners, decodes, mixed=mixed, depth=min(1, max(arguments.depths)), log=log))
        draw(log, out.with_name(f"{out.stem}_{kind}.svg"))
        log.unlink()
    settings = runners.settings
    result = {
        "benchmark": "readout",
        "model": arguments.model,
        "dtype": settings.dtype,
        "rows": arguments.rows,
        "context": arguments.context,
        "token_budget": settings.max_num_batched_tokens,
        "depths": measured,
        "drafts": arguments.drafts,
        "prompt": arguments.prompt,
        "long_prompt": prompts,
        "compiles_after_warm_up": compiles.after_warmup,
    }
    print_tables(result)
    record.write(name, result, arguments)
    return 0


def print_tables(result: dict[str, Any]) -> None:
    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %"

    print(f"{result['rows']} rows, {result['context']} tokens of context:")
    lines = [
        [
            str(each["depth"]),
            f"{each['time_per_output_token_ms']:.2f}",
            percent(each.get("idle_between_steps")),
            percent(each.get("idle_between_kernels")),
        ]
        for each in result["depths"]
    ]
    print(record.table(["depth", "ms a token", "idle between steps", "between kernels"], lines))
    print(f"ms between two tokens, beside a prompt of {result['prompt']} tokens:")
    lines = [
        [
            str(each["decodes"]),
            "mixed" if each["mixed"] else "separate",
            name,
            *(f"{figures[key]:.1f}" for key in ("p50", "p99", "max")),
            f"{each['time_to_first_token_ms']:.0f}",
        ]
        for each in result["long_prompt"]
        for name, figures in each["latency_ms"].items()
    ]
    print(record.table(["decodes", "steps", "prompt", "p50", "p99", "max", "TTFT"], lines))
