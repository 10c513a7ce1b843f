"""Where the time of a cycle goes: device time by the scopes that the step names in its operations."""

import re
from collections.abc import Mapping
from typing import Any

from bench.step.load import Load

# The scopes of `jaxspec.engine.step`, in order, as records call them: the target's forward pass; logits, verification
# and new lengths; the draft over the window, with its first draft; the other draft steps.
STAGES = {"target": "target", "verify": "verify", "catch_up": "catch_up", "draft": "draft_steps"}

_OPERATION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?\b([a-z][\w\-]*)\(.*metadata=\{[^}]*op_name="([^"]*)"', re.M)
# Their time is that of the operations inside.
_CONTAINERS = ("while", "conditional", "call")


def stage_shares(load: Load, rows: int) -> dict[str, float]:
    """The part of a step's device time that each of its stages needs, from a trace, so after all timing.

    Operations are traced one by one: graphs must not be kept (`bench.harness.trace.keep_graphs`).
    """
    text = load.runner.executable(load.bucket(rows)).as_text()
    assert text is not None
    return shares(load.trace(rows), stage_of_operations(text))


def stage_of_operations(text: str) -> dict[str, str]:
    """The stage of each operation of a compiled step that has one, by the operation's name."""
    stages = {}
    for name, opcode, path in _OPERATION.findall(text):
        scope = next((part for part in path.split("/") if part in STAGES), None)
        if scope is not None and opcode not in _CONTAINERS:
            stages[name] = STAGES[scope]
    return stages


def shares(trace: Any, stages: Mapping[str, str]) -> dict[str, float]:
    """Parts of the time of all operations that have a stage."""
    seconds = dict.fromkeys(STAGES.values(), 0.0)
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                operation = str(dict(event.stats).get("hlo_op", ""))
                if operation in stages:
                    seconds[stages[operation]] += event.duration_ns
    total = sum(seconds.values())
    if not total:
        raise RuntimeError("the trace holds no operation of the step")
    return {name: each / total for name, each in seconds.items()}


def split(step_ms: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of each stage, which sum to the step's."""
    return {name: round(step_ms * part, 4) for name, part in parts.items()}
