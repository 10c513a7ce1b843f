"""Requests that decode through the production engine, and the measurements that `bench step` and `bench cycle` make."""

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bench.harness.trace import compute_events, traced
from bench.step.engines import decode_bucket
from bench.step.sizes import WARMUP_STEPS
from bench.step.step_vllm import random_prompts
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.host_rule import HostRule
from jaxspec.engine.output import RequestOutput
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.scheduler import plan_step
from jaxspec.engine.step_log import StepTimes
from jaxspec.sampling.params import SamplingParams

TRACED_STEPS = 4
REPEATS = 3
GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@dataclass(frozen=True)
class LoopTimes:
    """Of the engine's own loop: median seconds a step, those of each run, and tokens a row got in a step."""

    seconds: float
    of_each_run: tuple[float, ...]
    tokens: float


@dataclass(frozen=True)
class Kernels:
    """Of one step: kernels, the launches (of graphs or single kernels) that started them, and their seconds."""

    count: float
    launches: float
    seconds: float


@dataclass(frozen=True)
class AheadTimes:
    """Of steps dispatched ahead of reading: seconds a step, and of each `Runner.dispatch` and `Scheduler.plan`."""

    step: float
    dispatches: list[float]
    plans: list[float]

    @property
    def dispatch(self) -> float:
        return statistics.median(self.dispatches)

    @property
    def plan(self) -> float:
        return statistics.median(self.plans)


class TimesByRows:
    """In place of a step log: the decode rows and the times of each step that was read."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, StepTimes]] = []

    def write(self, plan: StepPlan, _bucket: Bucket, times: StepTimes, *_emitted: Any, waiting: int) -> None:  # noqa: ARG002
        self.steps.append((len(plan.decode), times))

    def seconds(self) -> dict[int, float]:
        """Mean time, by row count, from when the step before was read to when the step was."""
        spans: dict[int, list[float]] = {}
        for (_, before), (rows, times) in zip(self.steps, self.steps[1:], strict=False):
            spans.setdefault(rows, []).append(times.read - before.read)
        return {rows: statistics.mean(each) for rows, each in spans.items()}


def prefill_seconds(engine: Engine, rows: int, context: int, repeats: int = REPEATS) -> float:
    """Median time until `rows` new requests, all there from the start, have their first token, which ends them."""
    rng = np.random.default_rng(rows)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times = []
    for _ in range(1 + repeats):
        prompts = rng.integers(0, engine.vocab_size, (rows, context)).tolist()
        with _readout_depth(engine, 1):
            started = time.perf_counter()
            for i, prompt in enumerate(prompts):
                engine.add(Request(f"prompt-{i}", prompt, params))
            while engine.has_work:
                for out in engine.step():
                    _check(out)
            times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


@contextlib.contextmanager
def _readout_depth(engine: Engine, depth: int) -> Iterator[None]:
    settings = engine.settings
    engine.settings = dataclasses.replace(settings, readout_depth=depth)
    try:
        yield
    finally:
        engine.settings = settings


def _check(out: Any) -> None:
    if out.error:
        raise RuntimeError(f"request {out.request_id} failed in the middle of a measurement: {out.error}")


class Load:
    """An engine whose requests have been prefilled and decode; any number of them can be made to run.

    Each measurement starts from the same state: `rewind` drops what the last one generated.

    Args:
        depth: readout depth of the engine's own loop.
        params: of the requests (default: greedy).
        prompts: of the requests (default: `random_prompts`).
        firsts: their first output tokens (default: those that the model chooses).
        rules: of the requests, if they have any. A rule does not follow a `rewind`: such requests only go on.
    """

    def __init__(
        self,
        engine: Engine,
        rows: int,
        context: int,
        *,
        depth: int = 1,
        params: SamplingParams = GREEDY,
        prompts: Sequence[Sequence[int]] | None = None,
        firsts: Sequence[int] | None = None,
        rules: Sequence[HostRule | None] | None = None,
    ) -> None:
        self.engine, self.runner, self._depth = engine, engine.runner, depth
        prompts = prompts or random_prompts(rows, context, engine.vocab_size)
        self.requests = [
            Request(f"r{i}", prompt, params, rule, arrival_time=float(i))
            for i, (prompt, rule) in enumerate(zip(prompts, rules or [None] * rows, strict=True))
        ]
        for request, first in zip(self.requests, firsts or (), strict=firsts is not None):
            request.tokens.append(first)  # as of a request that goes on after it was preempted
        engine.add(*self.requests)
        self.requests = _by_turns(self.requests)
        while any(r.state is not RequestState.DECODE for r in self.requests):
            self.step()
        state = self.runner.state
        slots = [r.slot for r in self.requests]
        seq_len, last_token = np.zeros_like(state.seq_len), np.zeros_like(state.last_token)
        seq_len[slots] = context
        last_token[slots] = [r.tokens[context] for r in self.requests]
        self._start = {"seq_len": seq_len, "last_token": last_token}
        if self.runner.window > 1:
            # A copy: the next step is given the array's buffer to write into. These drafts are legal at any length.
            self._start["drafts"] = np.array(state.drafts)

    @property
    def slots(self) -> list[int]:
        """Of the requests, in their order."""
        return [r.slot for r in self.requests]

    def rewind(self) -> None:
        """Every request back to its prompt and first token. Pages stay: their contents are written again."""
        for request in self.requests:
            del request.tokens[request.prompt_len + 1 :]
            request.computed = request.prompt_len
        state = self.runner.state
        # Copies: on a CPU an array on the device may be the host's own, and the next step writes into it.
        fields = {name: jax.device_put(v.copy(), state.seq_len.sharding) for name, v in self._start.items()}
        self.runner.state = state._replace(**fields)

    def select(self, rows: int) -> None:
        """The first `rows` requests run, the others pause and keep their pages."""
        for number, rank in enumerate(self.engine.ranks):
            rank.running = [request for request in self.requests[:rows] if request.rank == number]

    def close(self) -> None:
        """Ends the requests: the engine is free for another load."""
        self.select(len(self.requests))
        for request in self.requests:
            self.engine.abort(request.id)
        while self.engine.has_work:
            self.engine.step()

    def step(self) -> list[RequestOutput]:
        """One engine step, at the engine's readout depth: 0 but for `time_loop` and `times_alternating`."""
        outputs = self.engine.step()
        for out in outputs:
            if out.finish_reason:
                raise RuntimeError(f"request {out.request_id} ended in the middle of a measurement: {out}")
        return outputs

    def bucket(self, rows: int) -> Bucket:
        return decode_bucket(self.runner.buckets, -(-rows // len(self.engine.ranks)))

    def time_loop(self, rows: int, steps: int) -> LoopTimes:
        """The engine's own loop, each step read while later ones run."""
        times, tokens = [], []
        for _ in range(REPEATS):
            with self.running_late(rows):
                before = self.engine.stats().generation_tokens
                started = time.perf_counter()
                for _ in range(steps):
                    self.step()
                times.append((time.perf_counter() - started) / steps)
                tokens.append((self.engine.stats().generation_tokens - before) / (steps * rows))
        return LoopTimes(statistics.median(times), tuple(times), statistics.mean(tokens))

    def times_alternating(self, order: Sequence[int], steps: int) -> dict[int, tuple[float, float]]:
        """The same loop over row counts in turn: for each, seconds a step, and of planning and dispatching one."""
        spans: dict[int, list[float]] = {rows: [] for rows in order}
        hosts: dict[int, list[float]] = {rows: [] for rows in order}
        for _ in range(REPEATS):
            log = TimesByRows()
            with self.running_late(order[-1]):
                self.engine.step_log = log
                for i in range(steps):
                    self.select(order[i % len(order)])
                    self.step()
                self.engine.step_log = None
            for rows, seconds in log.seconds().items():
                spans[rows].append(seconds)
            for rows, times in log.steps:
                hosts[rows].append(times.dispatched - times.planned)
        return {rows: (statistics.median(spans[rows]), statistics.median(hosts[rows])) for rows in order}

    @contextlib.contextmanager
    def running_late(self, rows: int) -> Iterator[None]:
        """From the start, else as `going_on`."""
        self.rewind()
        with self.going_on(rows):
            yield

    @contextlib.contextmanager
    def going_on(self, rows: int) -> Iterator[None]:
        """Warm, at the load's readout depth, with steps unread; at the end all are read."""
        with _readout_depth(self.engine, self._depth):
            self.select(rows)
            for _ in range(WARMUP_STEPS):
                self.step()
            yield
            self.select(0)  # plans no more steps
            while self.runner.in_flight:
                self.step()

    def kernels(self, rows: int) -> Kernels:
        """From a trace, so after all timing."""
        return count_kernels(self.trace(rows), TRACED_STEPS)

    def trace(self, rows: int) -> Any:
        """Of `TRACED_STEPS` steps, each read before the next."""
        self.rewind()
        self.select(rows)
        for _ in range(WARMUP_STEPS):
            self.step()
        return traced(self.step, TRACED_STEPS)

    def times_reading(self, order: Sequence[int], rounds: int) -> dict[int, float]:
        """Median seconds of a step by row count, the row counts taking turns, each step read before the next."""
        self.rewind()
        times: dict[int, list[float]] = {rows: [] for rows in order}
        for _ in range(WARMUP_STEPS + rounds):
            for rows in order:
                self.select(rows)
                started = time.perf_counter()
                self.step()
                times[rows].append(time.perf_counter() - started)
        return {rows: statistics.median(t[WARMUP_STEPS:]) for rows, t in times.items()}

    def times_ahead(self, order: Sequence[int], steps: int) -> AheadTimes:
        """Steps that are read only after the last has been dispatched: medians of three runs."""
        self.rewind()
        self._dispatch(order, WARMUP_STEPS * len(order))
        self._drain()
        runs = [self.time_ahead(order, steps) for _ in range(REPEATS)]
        return AheadTimes(
            statistics.median(run.step for run in runs),
            [each for run in runs for each in run.dispatches],
            [each for run in runs for each in run.plans],
        )

    def time_ahead(self, order: Sequence[int], steps: int) -> AheadTimes:
        """One run of them, without a warm-up."""
        self.rewind()
        jax.block_until_ready(self.runner.state)
        started = time.perf_counter()
        plans, dispatches = self._dispatch(order, steps)
        jax.block_until_ready(self.runner.state)
        seconds = (time.perf_counter() - started) / steps
        self._drain()
        return AheadTimes(seconds, dispatches, plans)

    def _dispatch(self, order: Sequence[int], steps: int) -> tuple[list[float], list[float]]:
        """Seconds of planning and of dispatching each step."""
        plans, dispatches = [], []
        for i in range(steps):
            self.select(order[i % len(order)])
            started = time.perf_counter()
            plan = self.plan()
            planned = time.perf_counter()
            self.runner.dispatch(plan)
            plans.append(planned - started)
            dispatches.append(time.perf_counter() - planned)
            for request in plan.decode:
                # Stand-ins: the device knows the tokens, the host only has to know how many there may be.
                request.tokens += [0] * self.runner.window
        return plans, dispatches

    def plan(self) -> StepPlan:
        """The next step of the requests that run."""
        plan = plan_step(self.engine.ranks)
        assert plan is not None
        return plan

    def _drain(self) -> None:
        while self.runner.in_flight:
            if self.runner.read().flags.any():
                raise RuntimeError("a request ended in the middle of a measurement")


def _by_turns(requests: Sequence[Request]) -> list[Request]:
    """One of each rank after the other, so that the first ones, however many, are shared out evenly."""
    seen = collections.Counter[int]()
    turns = []
    for request in requests:
        turns.append((seen[request.rank], request.rank))
        seen[request.rank] += 1
    return [request for _, request in sorted(zip(turns, requests, strict=True), key=lambda each: each[0])]


def count_kernels(trace: Any, steps: int) -> Kernels:
    events = list(compute_events(trace))
    launches = {launch for _, _, launch in events}
    seconds = 1e-9 * sum(stop - start for start, stop, _ in events)
    return Kernels(len(events) / steps, len(launches) / steps, seconds / steps)
