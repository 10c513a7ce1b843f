"""The tables that `bench cycle` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import record


def print_tables(result: dict[str, Any]) -> None:
    print(
        f"{result['model']}, {result['layers']} layers, {result['dtype']}, {result['context']} tokens of context, "
        f"{result['drafted_tokens']} drafts a cycle; {result['executables']} executables "
        f"({result['executables_of_earlier_runs']} kept by earlier runs) in {result['compile_seconds']} s; ms a step"
    )
    header = ["rows", "draft", "ahead", "skip off", "saved", "x plain", "read", "floor", "of ahead", "same drafts"]
    lines: list[list[str]] = []
    splits: list[list[str]] = []
    for row in result["rows"]:
        rows, plain = str(row["rows"]), row["plain"]
        lines.append([rows, "none", f"{plain['ahead_ms']:.2f}", "", "", "", *_tail(plain, plain), ""])
        for name, f in row["drafts"].items():
            on, off = f["skip_on"], f["skip_off"]
            times = [on["ahead_ms"], off["ahead_ms"], f["saved_ms"], f["times_plain"]]
            same = f"{100 * f['check']['same_drafts']:.1f} %"
            lines.append([rows, name, *(f"{value:.2f}" for value in times), *_tail(on, f), same])
            if "split_ms" in f:
                splits.append([rows, name, *_cells(f["split_ms"])])
    print(record.table(header, lines))
    if splits:
        print("where a cycle goes, skip on (catch-up: with the first draft; draft steps: the others)")
        print(record.table(["rows", "draft", "target", "verify", "catch-up", "draft steps", "cycle"], splits))


def _tail(times: dict[str, float], figures: dict[str, Any]) -> Sequence[str]:
    floor = figures["floor_ms"]
    return [f"{times['read_ms']:.2f}", f"{floor:.3f}", f"{100 * floor / times['ahead_ms']:.0f} %"]


def _cells(split_ms: Mapping[str, float]) -> Sequence[str]:
    """Each stage with its share, and the whole."""
    total = sum(split_ms.values())
    return [*(f"{t:.2f} ({100 * t / total:.0f} %)" for t in split_ms.values()), f"{total:.2f}"]
