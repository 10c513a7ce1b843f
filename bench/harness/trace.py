"""Traces of the device: its kernels, the launches that started them, and the time that they take."""

import bisect
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

# For XLA_FLAGS, which jax reads when it first starts a device.
_KEEP_GRAPHS = "--xla_enable_command_buffers_during_profiling=true"


def keep_graphs() -> None:
    """Lets traces of this process show recorded graphs as graphs. To be called before jax starts a device."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _KEEP_GRAPHS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_KEEP_GRAPHS}".strip()


def traced(run: Callable[[], object], times: int = 1) -> Any:
    """The trace (`jax.profiler.ProfileData`) of `times` calls of `run`.

    A device that has been traced may be slower than before: trace after all timing.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(times):
                run()
        (file,) = Path(folder).glob("**/*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(file))


def kernel_seconds(trace: Any) -> dict[str, float]:
    """Of everything that ran on a GPU's streams: seconds by name."""
    out: defaultdict[str, float] = defaultdict(float)
    for plane in trace.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    out[event.name] += 1e-9 * event.duration_ns
    return dict(out)


class KernelRun(NamedTuple):
    """One run of a kernel: start and stop in nanoseconds, and the number of the launch that started it."""

    start: float
    stop: float
    launch: str


def compute_events(trace: Any) -> Iterator[KernelRun]:
    """Each kernel on a GPU; kernels of one graph share a launch."""
    for plane in trace.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        kernels = [
            KernelRun(event.start_ns, event.start_ns + event.duration_ns, str(dict(event.stats)["correlation_id"]))
            for line in plane.lines
            if line.name.startswith("Stream") and "Compute" in line.name
            for event in line.events
        ]
        yield from in_launches(kernels)


def in_launches(kernels: Sequence[KernelRun]) -> Iterator[KernelRun]:
    """The kernels of one device, those of graphs' branches with the number of their graph's launch.

    A branch's kernels may all carry one number that is no launch of the trace, whichever launch ran them (inferred from
    counts, driver 580.159). An engine's launches follow each other, so a number in whose time another begins and ends is none.
    """
    spans: dict[str, tuple[float, float]] = {}
    for start, stop, launch in kernels:
        first, last = spans.get(launch, (start, stop))
        spans[launch] = min(first, start), max(last, stop)
    launches: list[tuple[float, str]] = []
    earliest = math.inf  # end of those that begin later
    for launch, (first, last) in sorted(spans.items(), key=lambda each: each[1], reverse=True):
        if last <= earliest:
            launches.append((first, launch))
        earliest = min(earliest, last)
    launches.reverse()
    numbers = {launch for _, launch in launches}
    for kernel in kernels:
        begun = bisect.bisect_right(launches, kernel.start, key=lambda each: each[0])
        launch = kernel.launch if kernel.launch in numbers else launches[max(0, begun - 1)][1]
        yield kernel._replace(launch=launch)
