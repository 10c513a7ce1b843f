"""`bench adaptive`: throughput of drafting that follows the load, beside no drafts and fixed numbers of them.

Drafts are accepted one by one with one probability (`synthetic_acceptance_pattern` "each"), so that windows of k drafts
would yield the given lengths on average. Each engine keeps a number of requests running, with prompts and answers of
random length, and the tokens that it generates in some seconds are counted, prompts being part of the load. Three more
loads: "mixed", where every other request has length 1 and the others length 3; and "switched", where all have length 1 in
the first half of the time and length 3 in the second, those that run included.

Engines: plain (no draft model at all), a fixed engine for each of --fixed, and the adaptive one; each has the buckets that
it would have in a server, less those of the full sampler. They take turns, and medians of the repeats are compared.
The last column is the adaptive engine's throughput over the best of the others at that load.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bench.harness import models, record
from bench.harness.arguments import numbers
from bench.harness.models import SHAPES, Weights, mesh_of_one
from bench.step.engines import warm_up
from jaxspec.config import EngineConfig, Settings, np_dtype, pages_for, resolve, resolve_dtype
from jaxspec.engine.acceptance import probability_for
from jaxspec.engine.buckets import bucket_table
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.state import ACCEPT_PROBABILITY
from jaxspec.sampling.params import SamplingParams

PLAIN, ADAPTIVE = "plain", "adaptive"
MIXED, SWITCHED = "mixed", "switched"
# Lengths of the loads that have two.
LOW, HIGH = 1.0, 3.0
WARMUP_STEPS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = f"random weights of a shape ({', '.join(SHAPES)}), or a folder or hub id, with an MTP layer"
    parser.add_argument("--model", default="moonlight", metavar="NAME", help=f"{model} (default: moonlight)")
    parser.add_argument("--layers", type=int, metavar="N", help="shrink a shape to N layers")
    parser.add_argument("--rows", type=numbers, metavar="N,N,...", help="requests (default: 1,8,32,128; CPU: 1,4)")
    parser.add_argument("--tokens", type=int, default=3, metavar="K", help="most drafts of a step (default: 3)")
    fixed = "numbers of drafts of fixed engines (default: 1 and K)"
    parser.add_argument("--fixed", type=numbers, metavar="N,N,...", help=fixed)
    lengths = "tokens that a window of K drafts yields on average (default: 1.0,1.5,2.2,3.0)"
    parser.add_argument("--lengths", type=_lengths, default=[1.0, 1.5, 2.2, 3.0], metavar="L,L,...", help=lengths)
    parser.add_argument("--prompt", type=int, metavar="N", help="mean tokens of a prompt (default: 256; CPU: 24)")
    parser.add_argument("--output", type=int, metavar="N", help="mean tokens of an answer (default: 256; CPU: 32)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of a measurement (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of each measurement (default: 3)")
    record.add_arguments(parser)


def _lengths(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


@dataclass(frozen=True)
class Sizes:
    """Of the requests; prompts and answers have between half and one and a half of these tokens."""

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
        self._engine.add(Request(f"t{self._begun}", ids, params))
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
    for _ in range(WARMUP_STEPS):
        traffic.step()
    before = engine.stats()
    parts = []
    for part in range(2 if load == SWITCHED else 1):
        if part:
            traffic.switch(HIGH)
        parts.append(traffic.run(seconds / (2 if load == SWITCHED else 1)))
    after = engine.stats()
    traffic.end()
    out: dict[str, Any] = {"tokens_per_s": sum(n for n, _ in parts) / sum(s for _, s in parts)}
    if len(parts) > 1:
        out["tokens_per_s_of_halves"] = [round(n / s, 1) for n, s in parts]
    if after.acceptance is not None and before.acceptance is not None:
        out["mean_length"] = after.acceptance.since(before.acceptance).mean_length
        now, then = after.steps_by_drafts, before.steps_by_drafts
        out["steps_by_drafts"] = {str(k): now[k] - then[k] for k in now}
    return out


def build_engines(weights: Weights, sizes: Sizes, drafts: int, fixed: Sequence[int], dtype: Any) -> dict[str, Engine]:
    """Plain, fixed and adaptive; nothing is compiled yet."""
    plans = {PLAIN: (0, False), **{f"k = {k}": (k, False) for k in fixed}, ADAPTIVE: (drafts, True)}
    out = {}
    for name, (k, adaptive) in plans.items():
        settings = _settings(weights, sizes, k, dtype, adaptive=adaptive)
        table = bucket_table(settings)
        lean = tuple(b for b in table if b.variant == "lean") or table
        draft = weights.draft if k else None
        runner = Runner(weights.model, weights.params, settings, mesh_of_one(), draft=draft, buckets=lean)
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
    """Of each number of requests and each load: every engine's."""
    for rows in arguments.rows:
        for load in (*arguments.lengths, MIXED, SWITCHED):
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
            for _ in range(arguments.repeats):
                for name, engine in engines.items():
                    one = dataclasses.replace(sizes, rows=rows)
                    runs[name].append(measure(engine, one, arguments.tokens, load, arguments.seconds))
            yield rows, load, {name: _summary(each) for name, each in runs.items()}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run whose throughput is the median, with that of all."""
    rates = [run["tokens_per_s"] for run in runs]
    median = statistics.median_low(rates)
    of_runs = [round(rate, 1) for rate in rates]
    return {**runs[rates.index(median)], "tokens_per_s": round(median, 1), "tokens_per_s_of_runs": of_runs}


def run(arguments: argparse.Namespace) -> int:
    on_gpu = jax.devices()[0].platform == "gpu"
    arguments.rows = arguments.rows or ([1, 8, 32, 128] if on_gpu else [1, 4])
    fixed = arguments.fixed or sorted({1, arguments.tokens})
    sizes = Sizes(max(arguments.rows), arguments.prompt or (256 if on_gpu else 24), arguments.output or 256)
    if arguments.output is None and not on_gpu:
        sizes = dataclasses.replace(sizes, output=32)
    dtype = resolve_dtype(EngineConfig(), on_gpu=on_gpu)
    mesh = mesh_of_one()
    models.check_layers(arguments.model, arguments.layers)
    if arguments.model in SHAPES:
        weights = models.draw(models.random_config(arguments.model, arguments.layers), mesh, np_dtype(dtype))
    else:
        weights = models.load(arguments.model, mesh, np_dtype(dtype))
    engines = build_engines(weights, sizes, arguments.tokens, fixed, dtype)
    warm_up(engines)
    header = ["requests", "length", *engines, "of the best"]
    rows, results = [], []
    for number, load, found in _measurements(engines, sizes, arguments):
        rates = {name: each["tokens_per_s"] for name, each in found.items()}
        ratio = rates[ADAPTIVE] / max(rate for name, rate in rates.items() if name != ADAPTIVE)
        results.append({"requests": number, "load": load, "adaptive_of_best": round(ratio, 4), "engines": found})
        rows.append([str(number), str(load), *(f"{rate:.0f}" for rate in rates.values()), f"{ratio:.3f}"])
        print(record.table(header, [rows[-1]]), flush=True)
    print(f"output tokens/s\n{record.table(header, rows)}")
    result = {
        "benchmark": "adaptive",
        "model": models.as_recorded(arguments.model),
        "sizes": dataclasses.asdict(sizes),
        "drafts": arguments.tokens,
        "lowest_ratio": min(each["adaptive_of_best"] for each in results),
        "results": results,
    }
    record.write(f"adaptive_{models.as_recorded(arguments.model)}", result, arguments)
    return 0
