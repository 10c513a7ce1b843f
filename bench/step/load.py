"""Requests that decode through the production engine, and what is measured of them, for `bench step`."""

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
from jaxspec.engine.buckets import Bucket, choose_bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.step_log import StepTimes
from jaxspec.sampling.params import SamplingParams

# Steps that are not counted at the start of each measurement.
WARMUP_STEPS = 3
TRACED_STEPS = 4
REPEATS = 3


@dataclass(frozen=True)
class LoopTimes:
    """Of the engine's own loop: seconds a step, of each run too, and tokens that a row got in a step."""

    seconds: float
    of_each_run: tuple[float, ...]
    tokens: float


@dataclass(frozen=True)
class Kernels:
    """Of one step: kernels, graph launches and single kernels that started them, seconds in which kernels ran."""

    count: float
    launches: float
    seconds: float


class TimesByRows:
    """In a step log's place: of each step that was read its decode rows and its times."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, StepTimes]] = []

    def write(self, plan: StepPlan, _bucket: Bucket, times: StepTimes, *_emitted: Any, waiting: int) -> None:  # noqa: ARG002
        self.steps.append((len(plan.decode), times))

    def seconds(self) -> dict[int, float]:
        """Mean time, by row count, between the moment at which the step before was read and the one at which it was."""
        spans: dict[int, list[float]] = {}
        for (_, before), (rows, times) in zip(self.steps, self.steps[1:], strict=False):
            spans.setdefault(rows, []).append(times.read - before.read)
        return {rows: statistics.mean(each) for rows, each in spans.items()}


def prefill_seconds(engine: Engine, rows: int, context: int, repeats: int = REPEATS) -> float:
    """Median time in which as many new requests get their first token and end, all of them there from the start."""
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

    Measurements start from the same state: `rewind` takes back what the last one generated.

    Args:
        depth: readout depth of the engine's own loop.
    """

    def __init__(self, engine: Engine, rows: int, context: int, *, depth: int = 1, seed: int = 0):
        self.engine, self.runner, self._depth = engine, engine.runner, depth
        self.scheduler = engine.scheduler
        rng = np.random.default_rng(seed)
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        self.requests = [
            Request(f"r{i}", rng.integers(0, engine.vocab_size, context).tolist(), params, arrival_time=float(i))
            for i in range(rows)
        ]
        for request in self.requests:
            engine.add(request)
        while any(r.state is not RequestState.DECODE for r in self.requests):
            self.step()
        state = self.runner.state
        slots = [r.slot for r in self.requests]
        self._seq_len, self._last_token = np.zeros_like(state.seq_len), np.zeros_like(state.last_token)
        self._seq_len[slots] = context
        self._last_token[slots] = [r.tokens[context] for r in self.requests]
        # Legal wherever a request stands; a copy, because the next step is given the array's buffer to write in.
        self._drafts = np.array(state.drafts) if self.runner.window > 1 else None

    def rewind(self) -> None:
        """Every request back to its prompt and first token. Pages stay: what they hold is written again."""
        for request in self.requests:
            del request.tokens[request.prompt_len + 1 :]
            request.computed = request.prompt_len
        state = self.runner.state
        sharding = state.seq_len.sharding
        fields = {"seq_len": self._seq_len, "last_token": self._last_token}
        if self._drafts is not None:
            fields["drafts"] = self._drafts
        # Copies: on a CPU an array on the device may be the host's own, and the next step writes in it.
        self.runner.state = state._replace(
            **{name: jax.device_put(value.copy(), sharding) for name, value in fields.items()}
        )

    def select(self, rows: int) -> None:
        """The first `rows` requests run, the others stand still with their pages."""
        self.scheduler.running = self.requests[:rows]

    def step(self) -> None:
        """One engine step, at the engine's readout depth: 0 but for `time_loop` and `times_alternating`."""
        for out in self.engine.step():
            if out.finish_reason:
                raise RuntimeError(f"request {out.request_id} ended in the middle of a measurement: {out}")

    def bucket(self, rows: int) -> Bucket:
        return choose_bucket(self.runner.buckets, prefill_tokens=0, prefill_rows=0, decode_rows=rows, full=False)

    def time_loop(self, rows: int, steps: int) -> LoopTimes:
        """The engine's own loop, each step read while later ones run."""
        times, tokens = [], []
        for _ in range(REPEATS):
            with self._running_late(rows):
                before = self.engine.stats().generation_tokens
                started = time.perf_counter()
                for _ in range(steps):
                    self.step()
                times.append((time.perf_counter() - started) / steps)
                tokens.append((self.engine.stats().generation_tokens - before) / (steps * rows))
        return LoopTimes(statistics.median(times), tuple(times), statistics.mean(tokens))

    def times_alternating(self, order: Sequence[int], steps: int) -> dict[int, tuple[float, float]]:
        """The same loop over row counts that take turns: of each, seconds a step, and of planning and dispatching one."""
        spans: dict[int, list[float]] = {rows: [] for rows in order}
        hosts: dict[int, list[float]] = {rows: [] for rows in order}
        for _ in range(REPEATS):
            log = TimesByRows()
            with self._running_late(order[-1]):
                self.engine.step_log = log  # type: ignore[assignment]
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
    def _running_late(self, rows: int) -> Iterator[None]:
        """From the start, warm, with steps unread; at the end all are read."""
        self.rewind()
        with _readout_depth(self.engine, self._depth):
            self.select(rows)
            for _ in range(WARMUP_STEPS):
                self.step()
            yield
            self.scheduler.running = []  # nothing is planned
            while self.runner.in_flight:
                self.step()

    def kernels(self, rows: int) -> Kernels:
        """From a trace. A device that has been traced need not be as fast as before: after all else."""
        self.rewind()
        self.select(rows)
        for _ in range(WARMUP_STEPS):
            self.step()
        return count_kernels(traced(self.step, TRACED_STEPS), TRACED_STEPS)

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

    def times_ahead(self, order: Sequence[int], steps: int) -> tuple[float, float, float]:
        """Dispatches without reading: seconds a step, median seconds of `Runner.dispatch`, of `Scheduler.plan`."""
        self.rewind()
        self._dispatch(order, WARMUP_STEPS * len(order))
        self._drain()
        totals, dispatches, plans = [], [], []
        for _ in range(3):
            self.rewind()
            jax.block_until_ready(self.runner.state)
            started = time.perf_counter()
            planned, dispatched = self._dispatch(order, steps)
            jax.block_until_ready(self.runner.state)
            totals.append((time.perf_counter() - started) / steps)
            self._drain()
            plans += planned
            dispatches += dispatched
        return statistics.median(totals), statistics.median(dispatches), statistics.median(plans)

    def _dispatch(self, order: Sequence[int], steps: int) -> tuple[list[float], list[float]]:
        plans, dispatches = [], []
        for i in range(steps):
            self.select(order[i % len(order)])
            started = time.perf_counter()
            plan = self.scheduler.plan()
            planned = time.perf_counter()
            assert plan is not None
            self.runner.dispatch(plan)
            plans.append(planned - started)
            dispatches.append(time.perf_counter() - planned)
            for request in plan.decode:
                # The device knows the tokens; the host only has to know how many more there may be.
                request.tokens += [0] * self.runner.window
        return plans, dispatches

    def _drain(self) -> None:
        while self.runner.in_flight:
            if self.runner.read().flags.any():
                raise RuntimeError("a request ended in the middle of a measurement")


def count_kernels(trace: Any, steps: int) -> Kernels:
    events = list(compute_events(trace))
    launches = {launch for _, _, launch in events}
    seconds = 1e-9 * sum(stop - start for start, stop, _ in events)
    return Kernels(len(events) / steps, len(launches) / steps, seconds / steps)
