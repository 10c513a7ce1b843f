"""`bench timeline`: a step log as a picture, and a summary of it.

Time runs to the right, each request has a lane, and a lane on top shows the steps with their buckets. A step is drawn
from its start, or from the end of the step before where that is later (with late readout steps overlap), to its end.

Time 0 is the beginning of the log's first step. The summary counts the steps that are at least partly between --from and
--to. The idle part is the share of the time from the first of these steps to the last in which none of them ran. A token's
time is the end of its step, and inter-token latency counts each token (see bench/harness/latency.py); it is given for each
group of requests (--group), and separately for tokens of steps that also prefill, which shows what a long prompt costs the
others.
"""

import argparse
import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import latency, record
from bench.step.step_log import Step, StepLogError, read_steps
from bench.step.timeline_svg import draw
from jaxspec.errors import ConfigError, writing

ALL = "all requests"
BESIDE_PREFILL, WITHOUT_PREFILL = "steps with a prefill", "steps without"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="LOG.jsonl", help="written by jaxspec serve --log-steps FILE")
    out = "the picture (default: in the current folder, with the log's name)"
    parser.add_argument("--out", type=Path, metavar="FILE.svg", help=out)
    seconds = "seconds since the first step"
    parser.add_argument("--from", dest="begin", type=float, metavar="S", help=f"begin there, in {seconds}")
    parser.add_argument("--to", dest="end", type=float, metavar="S", help=f"end there, in {seconds}")
    parser.add_argument("--width", type=int, default=1600, metavar="PIXELS", help="of the picture (default: 1600)")
    group = "regular expression: requests of whose id it matches the same text, from the start, form a group"
    parser.add_argument("--group", metavar="REGEX", help=f"{group} (default: one group)")


def from_zero(steps: Sequence[Step]) -> list[Step]:
    """The steps with times since the first of them: how long the engine loaded and waited is of no interest."""
    zero = steps[0].begin
    return [dataclasses.replace(s, start=s.start - zero, begin=s.begin - zero, end=s.end - zero) for s in steps]


def cut(steps: Sequence[Step], begin: float | None, end: float | None) -> list[Step]:
    """The steps that are at least partly between the two times (s)."""
    return [s for s in steps if (begin is None or s.end > begin) and (end is None or s.begin < end)]


def summarise(steps: Sequence[Step], group: re.Pattern[str] | None = None) -> dict[str, Any]:
    """Counts, milliseconds and latencies of at least one step.

    `latency_ms` has mean, p50 and p99 by group; a group without two tokens of one request is left out.
    """
    span = steps[-1].end - steps[0].begin
    busy = sum(s.end - s.begin for s in steps)
    chunks: dict[str, list[tuple[float, int, bool]]] = defaultdict(list)
    for step in steps:
        for row in step.rows:
            if row.emitted:
                chunks[row.request].append((step.end, row.emitted, step.has_prefill))
    groups: dict[str, list[float]] = defaultdict(list)
    sides: dict[str, list[float]] = {BESIDE_PREFILL: [], WITHOUT_PREFILL: []}
    for request, mine in chunks.items():
        gaps = latency.token_gaps([time for time, _, _ in mine], [count for _, count, _ in mine]).tolist()
        match = group.match(request) if group else None
        groups[ALL if group is None else (match[0] if match else "")] += gaps
        beside = [prefill for _, count, prefill in mine for _ in range(count)]
        for prefill, gap in zip(beside[1:], gaps, strict=True):
            sides[BESIDE_PREFILL if prefill else WITHOUT_PREFILL].append(gap)
    rows = [row for step in steps for row in step.rows]
    return {
        "steps": len(steps),
        "seconds": span,
        "requests": len({row.request for row in rows}),
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "tokens": sum(row.emitted for row in rows),
        "accepted": sum(row.accepted for row in rows),
        "host_ms": _mean([s.host_ms for s in steps]),
        "device_ms": _mean([s.device_ms for s in steps]),
        "idle_part": 1 - busy / span if span else 0.0,
        "latency_ms": {
            name: figures
            for name, gaps in (*sorted(groups.items()), *sides.items())
            if (figures := latency.summary(gaps))
        },
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def print_summary(result: dict[str, Any]) -> None:
    def shown(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.2f} ms"

    r = result
    print(
        f"{r['steps']} steps in {r['seconds']:.3f} s, host {shown(r['host_ms'])} and device {shown(r['device_ms'])} a "
        f"step (means), idle {r['idle_part']:.1%}"
    )
    print(
        f"{r['requests']} requests: {r['prompt_tokens']} prompt tokens prefilled, {r['tokens']} tokens generated, "
        f"{r['accepted']} of them drafted"
    )
    rows = [[name or "(no match)", f"{f['p50']:.2f}", f"{f['p99']:.2f}"] for name, f in r["latency_ms"].items()]
    if rows:
        print(record.table(["inter-token latency, ms", "p50", "p99"], rows))


def run(arguments: argparse.Namespace) -> int:
    if arguments.width < 400:
        raise ConfigError(f"--width must be at least 400 pixels, got {arguments.width}")
    if None not in (arguments.begin, arguments.end) and arguments.begin >= arguments.end:
        raise ConfigError(f"--from must be before --to, got {arguments.begin:g} and {arguments.end:g}")
    try:
        group = re.compile(arguments.group) if arguments.group else None
    except re.error as e:
        raise ConfigError(f"--group is not a regular expression: {e}") from e
    out: Path = arguments.out or Path(arguments.log.with_suffix(".svg").name)
    if out.resolve() == arguments.log.resolve():
        raise ConfigError(f"--out must be another file than the log {out}")
    steps = read_steps(arguments.log)
    if not steps:
        raise StepLogError(f"{arguments.log} holds no steps")
    steps = from_zero(steps)
    chosen = cut(steps, arguments.begin, arguments.end)
    if not chosen:
        span = f"they are between {steps[0].begin:g} and {steps[-1].end:g} s"
        raise ConfigError(f"no step of {arguments.log} lies between --from and --to: {span}")
    begin = chosen[0].begin if arguments.begin is None else arguments.begin
    end = chosen[-1].end if arguments.end is None else arguments.end
    print_summary(summarise(chosen, group))
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(draw(chosen, begin, end, arguments.width), encoding="utf-8")
    print(f"wrote {out}")
    return 0
