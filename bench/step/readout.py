"""`bench readout`: what reading steps late gains, and what a long prompt costs the requests that decode.

Both through the production engine, on random weights or a model folder, with greedy requests of random tokens.

- Depths: `--rows` requests decode. For each readout depth the time per output token: wall time of `--tokens` steps of
  the engine, divided by their number, the median of three runs. On a GPU also the part of the time in which the device
  is idle, from a trace of 32 steps: between two steps, and between any two kernels. Kernels inside
  recorded graphs are traced as such (`xla_enable_command_buffers_during_profiling`).
- Long prompt: `--decodes` requests decode when a prompt of `--prompt` tokens arrives. Latency between two tokens of the
  decoding requests, from its arrival to its first token and without it, where steps are mixed and where they are not.
  Each run's step log is written beside the result, and drawn (as `bench timeline` does).
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.harness import latency, record
from bench.harness.trace import compute_events, keep_graphs, traced
from bench.step import timeline_svg
from bench.step.step import SHAPES, mesh_of_one
from bench.step.step_log import read_steps
from jaxspec.compat import compiles
from jaxspec.config import EngineConfig, pages_for, resolve, resolve_dtype
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.runner import Runner
from jaxspec.engine.step_log import StepLog
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import random_params
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams

WARM_UP_STEPS = 8
TRACED_STEPS = 32
REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="demo, moonlight, tiny (random weights), or a model folder")
    parser.add_argument("--layers", type=int, metavar="N", help="shrink a random model to N layers")
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="requests that decode (default: 32)")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="their prompts (default: 1024)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="steps of each measurement (default: 64)")
    parser.add_argument("--depths", default="0,1,2,3", metavar="N,N,...", help="readout depths (default: 0,1,2,3)")
    parser.add_argument("--decodes", type=int, default=16, metavar="N", help="beside the long prompt (default: 16)")
    parser.add_argument("--prompt", type=int, default=8192, metavar="TOKENS", help="its length (default: 8192)")
    parser.add_argument("--budget", type=int, metavar="TOKENS", help="token budget of a step (default: 2048; CPU: 256)")
    record.add_arguments(parser)


class Bench:
    """A model and one runner each for mixed and for separate steps."""

    def __init__(self, arguments: argparse.Namespace):
        gpu = jax.devices()[0].platform == "gpu"
        self.context, self.prompt = arguments.context, arguments.prompt
        dtype = np.dtype(jnp.dtype(resolve_dtype(EngineConfig(), on_gpu=gpu)))
        mesh = mesh_of_one()
        most_steps = arguments.tokens * REPEATS + TRACED_STEPS + 2 * WARM_UP_STEPS
        budget = arguments.budget or (2048 if gpu else 256)
        seqs = max(arguments.rows, arguments.decodes + 1)
        # Those that decode go on while the last ones prefill.
        decoding = arguments.context + most_steps + -(-seqs * arguments.context // budget) + seqs + 64
        longest = max(decoding, arguments.prompt + 64) + -(-arguments.prompt // budget)
        if arguments.model in SHAPES:
            hf = dict(SHAPES[arguments.model])
            hf["num_hidden_layers"] = arguments.layers or hf["num_hidden_layers"]
            hf["max_position_embeddings"] = max(hf["max_position_embeddings"], longest)
            model = CausalLM(read_config(hf), dtype)
            params = random_params(model, mesh)
        else:
            from jaxspec.loading.checkpoint import load_params, open_checkpoint
            from jaxspec.loading.resolve import resolve_model

            model, params = load_params(open_checkpoint(resolve_model(arguments.model)), mesh, dtype)
        self.vocab_size = model.config.vocab_size
        self.rng = np.random.default_rng(0)
        self.runners = {}
        for mixed in (True, False):
            settings = resolve(
                EngineConfig(
                    max_model_len=longest,
                    max_num_seqs=seqs,
                    max_num_batched_tokens=max(budget, seqs),
                    num_gpu_blocks_override=seqs * pages_for(decoding) + pages_for(longest) + 1,
                    enable_mixed_batch=mixed,
                    enable_prefix_caching=False,
                ),
                model_max_position=model.config.max_position,
                page_bytes=0,
                free_bytes=0,
                on_gpu=gpu,
            )
            runner = Runner(model, params, settings, mesh)
            used = {arguments.rows, arguments.decodes} if mixed else {arguments.decodes}
            runner.buckets = needed_buckets(runner.buckets, used)
            runner.warm_up(lambda done, total, what: print(f"compiled {done}/{total} {what}", flush=True))
            self.runners[mixed] = runner
        compiles.mark_warm()

    def engine(self, *, mixed: bool, depth: int, log: StepLog | None = None) -> Engine:
        """A new engine over the compiled steps; what ran before is over."""
        runner = self.runners[mixed]
        runner.settings = dataclasses.replace(runner.settings, readout_depth=depth)
        return Engine(runner, vocab_size=self.vocab_size, step_log=log)

    def request(self, name: str, length: int, max_tokens: int | None = None) -> Request:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return Request(name, self.rng.integers(0, self.vocab_size, length).tolist(), params)

    def start(self, engine: Engine, rows: int) -> list[Request]:
        """Requests that all decode, a few steps on."""
        requests = [self.request(f"decode-{i}", self.context) for i in range(rows)]
        for request in requests:
            engine.add(request)
        while any(r.state is not RequestState.DECODE for r in requests):
            engine.step()
        for _ in range(WARM_UP_STEPS):
            engine.step()
        return requests


def needed_buckets(buckets: Sequence[Any], rows: Iterable[int]) -> tuple[Any, ...]:
    """Of the lean ones those for prompts, and for each row count the smallest that holds it."""
    lean = [b for b in buckets if b.variant == "lean"] or list(buckets)
    decode = {min((b for b in lean if not b.prefill_tokens and b.decode_rows >= n), key=lambda b: b.rows) for n in rows}
    largest = max((b for b in lean if not b.prefill_tokens), key=lambda b: b.rows)
    return tuple(sorted({*decode, largest, *(b for b in lean if b.prefill_tokens)}))


def end(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()


def time_per_token(bench: Bench, rows: int, tokens: int, depth: int) -> dict[str, Any]:
    """Milliseconds a step of the engine, in which every request gets a token; and where the device is idle."""
    engine = bench.engine(mixed=True, depth=depth)
    requests = bench.start(engine, rows)
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
        "time_per_output_token_ms": round(1e3 * statistics.median(times), 4),
        "of_each_run_ms": [round(1e3 * t, 4) for t in times],
    }
    if jax.devices()[0].platform == "gpu":
        result |= idle_parts(traced(engine.step, TRACED_STEPS), TRACED_STEPS)
    end(engine, requests)
    return result


def idle_parts(trace: Any, steps: int) -> dict[str, float | None]:
    """Part of the traced time in which the device was between two steps, and in which it ran no kernel.

    A step is one recorded graph, whose kernels share the correlation id of its launch. Where the trace has more
    launches than steps, these were no whole graphs, and the first figure is None.
    """
    kernels: list[tuple[float, float]] = []
    launches: dict[str, tuple[float, float]] = {}
    for start, stop, launch in compute_events(trace):
        kernels.append((start, stop))
        first, last = launches.get(launch, (start, stop))
        launches[launch] = min(first, start), max(last, stop)
    between_steps = idle_part(list(launches.values())) if len(launches) <= steps else None
    return {"idle_between_steps": between_steps, "idle_between_kernels": idle_part(kernels)}


def idle_part(spans: Sequence[tuple[float, float]]) -> float | None:
    """Part of the time from the first start to the last end that lies in no span; None without spans."""
    if not spans:
        return None
    busy, end_of_busy = 0.0, float("-inf")
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end_of_busy))
        end_of_busy = max(end_of_busy, stop)
    return round(1 - busy / (end_of_busy - min(start for start, _ in spans)), 5)


def beside_a_prompt(bench: Bench, decodes: int, *, mixed: bool, depth: int, log: Path) -> dict[str, Any]:
    """Milliseconds between two tokens of the decoding requests, without the long prompt and while it prefills."""
    step_log = StepLog(str(log))
    engine = bench.engine(mixed=mixed, depth=depth, log=step_log)
    requests = bench.start(engine, decodes)
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
    long = bench.request("long", bench.prompt, max_tokens=8)
    arrived = time.perf_counter()
    engine.add(long)
    while "long" not in step(beside=True):
        pass
    first_token = time.perf_counter() - arrived
    # The first token of each request behind the prompt has waited for it too.
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
    depths = [int(part) for part in arguments.depths.split(",")]
    keep_graphs()
    bench = Bench(arguments)
    measured = []
    for depth in depths:
        measured.append(time_per_token(bench, arguments.rows, arguments.tokens, depth))
        print(measured[-1], flush=True)
    name = f"readout_{arguments.model if arguments.model in (*SHAPES, 'demo') else 'folder'}"
    out: Path = arguments.out or record.RESULTS / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    prompts = []
    for mixed in (True, False):
        kind = "mixed" if mixed else "separate"
        log = out.with_name(f"{out.stem}_{kind}.jsonl")
        prompts.append(beside_a_prompt(bench, arguments.decodes, mixed=mixed, depth=min(1, max(depths)), log=log))
        draw(log, out.with_name(f"{out.stem}_{kind}.svg"))
        log.unlink()
    settings = bench.runners[True].settings
    result = {
        "benchmark": "readout",
        "model": arguments.model,
        "dtype": settings.dtype,
        "rows": arguments.rows,
        "context": arguments.context,
        "token_budget": settings.max_num_batched_tokens,
        "depths": measured,
        "decodes": arguments.decodes,
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
    print(f"{result['decodes']} decodes, ms between two tokens, beside a prompt of {result['prompt']} tokens:")
    lines = [
        [
            "mixed" if each["mixed"] else "separate",
            name,
            *(f"{figures[key]:.1f}" for key in ("p50", "p99", "max")),
            f"{each['time_to_first_token_ms']:.0f}",
        ]
        for each in result["long_prompt"]
        for name, figures in each["latency_ms"].items()
    ]
    print(record.table(["steps", "prompt", "p50", "p99", "max", "TTFT"], lines))
