"""How much of the time the device is idle, from a trace."""

from collections.abc import Sequence
from typing import Any

from bench.harness.trace import compute_events


def idle_parts(trace: Any, steps: int) -> dict[str, float | None]:
    """The part of the traced time that the device spent between two steps, and the part without any kernel.

    A step is one recorded graph, whose kernels share the correlation id of its launch. If the trace has more launches
    than steps, they were not whole graphs, and the first figure is None.
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
