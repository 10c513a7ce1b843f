"""Traces of the device: its kernels, the launches that started them, and the time that they take."""

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
