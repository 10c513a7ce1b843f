"""How `bench kernel` times: launches in flight behind one another, kernels in a trace, and what the device can do."""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernel.case import Case

# Recorded graphs stay graphs while they are traced. For XLA_FLAGS, which is read when jax first starts a device.
TRACE_FLAG = "--xla_enable_command_buffers_during_profiling=true"
REPEATS = 5
TRACED_LAUNCHES = 3
# The first execution runs kernel by kernel, the second records the graph.
WARM_UP_LAUNCHES = 3


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _refill(results: Any, value: float) -> Any:
    """In place: at other addresses the next launch would record its graph anew."""
    return jax.tree.map(lambda r: jnp.full_like(r, value), results)


@jax.jit
def _finite(results: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(r).all() for r in jax.tree.leaves(results)]).all()


def turn_seconds(gpu: bool) -> float:
    """Of one measurement, and of the launches before it.

    Ours ends with a wait for the device, which must not show; and a full batch takes all the power there is, so that each
    kernel has to be met at the clock that it brings about itself.
    """
    return 0.1 if gpu else 0.01


class Loop:
    """An executable of a case with its inputs; results go back in, so every launch uses the same addresses."""

    def __init__(self, case: Case, executable: Any):
        self.calls = case.calls
        self.inputs = case.inputs()
        self._fill = case.fill
        self._executable = executable
        self.results = jax.tree.map(lambda s: jnp.full(s.shape, case.fill, s.dtype), case.results())
        self.launch(WARM_UP_LAUNCHES)

    def launch(self, launches: int) -> None:
        for _ in range(launches):
            self.results = self._executable(self.inputs, self.results)
        jax.block_until_ready(self.results)

    def launch_into_poison(self) -> Any:
        """The results of a launch that cannot leave anything to the one before."""
        self.results = _refill(self.results, self._fill)
        self.launch(1)
        return self.results

    def finite(self) -> bool:
        return bool(_finite(self.results))

    def time(self, launches: int) -> float:
        """Wall time of one call, in seconds."""
        started = time.perf_counter()
        self.launch(launches)
        return (time.perf_counter() - started) / (launches * self.calls)


def launches_for(time_once: Callable[[int], float], calls: int, seconds: float) -> int:
    """How many launches take `seconds`: the wait for the last one must not show."""
    return min(max(round(seconds / (calls * time_once(2))), 2), 500)


def rounds(timers: Mapping[str, tuple[Callable[[int], float], int]], repeats: int = REPEATS) -> dict[str, float]:
    """The median time of a call of each, in seconds. They take turns, so that a machine that changes meets all of them.

    A turn begins with as many launches that are not counted. In 25 milliseconds without them, a call of 306 microseconds
    seemed to take 320 to 370, and its neighbours got the clock that its power had left them.

    Args:
        timers: by name, a function from a number of launches to the time of one call, and that number.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, (time_once, launches) in timers.items():
            time_once(launches)
            times[name].append(time_once(launches))
    return {name: statistics.median(each) for name, each in times.items()}


def device_seconds(loop: Loop) -> float | None:
    """Time of a call's kernels on the device, the gaps between them not counted; None where nothing was traced."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            loop.launch(TRACED_LAUNCHES)
        (trace,) = Path(folder).glob("**/*.xplane.pb")
        total = kernel_seconds(jax.profiler.ProfileData.from_file(str(trace)))
    return total / (TRACED_LAUNCHES * loop.calls) if total else None


def kernel_seconds(trace: Any) -> float:
    """Sum of what ran on a GPU's streams."""
    return 1e-9 * sum(
        event.duration_ns
        for plane in trace.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )


def compute_events(trace: Any) -> Iterator[tuple[float, float, str]]:
    """Start and stop in nanoseconds, and the launch, of each kernel on a GPU; kernels of one graph share a launch."""
    for plane in trace.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not (line.name.startswith("Stream") and "Compute" in line.name):
                continue
            for event in line.events:
                launch = str(dict(event.stats)["correlation_id"])
                yield event.start_ns, event.start_ns + event.duration_ns, launch


def ceilings(gpu: bool) -> dict[str, float]:
    """Bytes a second of reading 2 GiB, FLOP a second of an 8192^3 matmul in bfloat16 (both smaller on a CPU).

    Timed as kernels are: an H200 multiplies faster for the first milliseconds than it has power to go on.
    """
    count, n = (2**29, 8192) if gpu else (2**22, 256)
    array = jax.jit(lambda: jnp.arange(count, dtype=jnp.float32))()
    # Of a whole row, not of all: one number would need a second, serial kernel.
    read = jax.jit(lambda a: a.reshape(-1, 2**16).sum(axis=1))
    a = jax.jit(lambda: jax.random.normal(jax.random.key(0, impl="rbg"), (n, n), jnp.float32).astype(jnp.bfloat16))()
    matmul = jax.jit(lambda a: a @ a)
    jax.block_until_ready((read(array), matmul(a)))  # compiled before they are timed
    runs = {"read": functools.partial(_seconds, read, array), "matmul": functools.partial(_seconds, matmul, a)}
    seconds = rounds({name: (run, launches_for(run, 1, turn_seconds(gpu))) for name, run in runs.items()})
    return {
        "read_bytes_per_s": array.nbytes / seconds["read"],
        "matmul_flop_per_s": 2.0 * n**3 / seconds["matmul"],
    }


def _seconds(run: Callable[[jax.Array], jax.Array], array: jax.Array, launches: int) -> float:
    started = time.perf_counter()
    for _ in range(launches):
        out = run(array)
    out.block_until_ready()
    return (time.perf_counter() - started) / launches
