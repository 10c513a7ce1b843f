"""The step log of an engine (`jaxspec serve --log-steps FILE`): JSON lines, one object a step.

    {"step": 12, "start": 3.014, "end": 3.029, "bucket": "prefill 64x4, decode 8, full", "host_ms": 0.8,
     "device_ms": 13.9, "prefill": [{"request": "r1", "start": 64, "tokens": 50, "final": false, "emitted": 0}],
     "decode": [{"request": "r0", "emitted": 3, "accepted": 2}], "waiting": 4}

`start` and `end` are seconds since the engine started: when the step was dispatched, and when its output had been read.
Unknown keys are ignored.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.errors import JaxspecError


class StepLogError(JaxspecError):
    """A line that is not a step, or lines in an order that no engine writes. The message names the line."""


@dataclass(frozen=True)
class Row:
    """One request's part in a step.

    Attributes:
        prompt_tokens: prefilled; 0 of a decode.
        emitted: tokens that the request got.
        accepted: how many of them were drafted.
    """

    request: str
    prompt_tokens: int
    emitted: int
    accepted: int


@dataclass(frozen=True)
class Step:
    """One line.

    Attributes:
        begin: seconds from which the step is drawn: its start, or the end of the step before, whichever is later. With
            late readout a step is dispatched while another still runs.
        host_ms, device_ms: milliseconds; None where they were not measured.
    """

    number: int
    start: float
    begin: float
    end: float
    bucket: str
    host_ms: float | None
    device_ms: float | None
    rows: tuple[Row, ...]
    waiting: int

    @property
    def has_prefill(self) -> bool:
        return any(row.prompt_tokens for row in self.rows)


def read_steps(path: Path) -> list[Step]:
    """
    Raises:
        StepLogError: the file cannot be read, or a line is not a step.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return list(parse_steps(file, str(path)))
    except (OSError, UnicodeDecodeError) as e:
        raise StepLogError(f"cannot read {path}: {e}") from e


def parse_steps(lines: Iterable[str], name: str) -> Iterator[Step]:
    """
    Args:
        name: of the log, for errors.

    Raises:
        StepLogError: a line is not a step.
    """
    previous = -math.inf
    for number, line in enumerate(lines, 1):
        try:
            step = _step(json.loads(line), previous)
        except ValueError as e:
            what = "not JSON" if isinstance(e, json.JSONDecodeError) else "not a step"
            raise StepLogError(f"{name}, line {number}: {what}: {e}") from e
        if step.end < previous:
            raise StepLogError(
                f"{name}, line {number}: the step ends at {step.end:g} s, before the one above it ({previous:g} s): does "
                "the file hold the steps of several engines?"
            )
        yield step
        previous = step.end


def _step(value: Any, previous: float) -> Step:
    line = _object(value, "the line")
    start, end = _number(line, "start"), _number(line, "end")
    if end < start:
        raise ValueError(f"end ({end:g}) is before start ({start:g})")
    prefill = [_object(row, "a row of prefill") for row in _get(line, "prefill", list)]
    decode = [_object(row, "a row of decode") for row in _get(line, "decode", list)]
    rows = [Row(_get(r, "request", str), _count(r, "tokens"), _count(r, "emitted"), 0) for r in prefill]
    for row in decode:
        emitted = _count(row, "emitted")
        # A stop inside the window cuts off what was accepted after it.
        rows.append(Row(_get(row, "request", str), 0, emitted, min(_count(row, "accepted"), emitted)))
    return Step(
        _count(line, "step"),
        start,
        min(max(start, previous), end),
        end,
        _get(line, "bucket", str),
        _milliseconds(line, "host_ms"),
        _milliseconds(line, "device_ms"),
        tuple(rows),
        _count(line, "waiting"),
    )


_NAMES: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, got {_shown(value)}")
    return value


def _get(line: Mapping[str, Any], key: str, kind: type) -> Any:
    if key not in line:
        raise ValueError(f"{key} is missing")
    if not isinstance(line[key], kind):
        raise ValueError(f"{key} must be {_NAMES[kind]}, got {_shown(line[key])}")
    return line[key]


def _number(line: Mapping[str, Any], key: str) -> float:
    if key not in line:
        raise ValueError(f"{key} is missing")
    value = line[key]
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{key} must be a number of at least 0, got {_shown(value)}")
    return float(value)


def _milliseconds(line: Mapping[str, Any], key: str) -> float | None:
    return None if line.get(key, 0) is None else _number(line, key)


def _count(line: Mapping[str, Any], key: str) -> int:
    if (value := _number(line, key)) != int(value):
        raise ValueError(f"{key} must be a whole number, got {_shown(line[key])}")
    return int(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
