"""The tables that `bench step` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import record


def print_tables(result: dict[str, Any]) -> None:
    print(
        f"{result['model']}, {result['layers']} layers, {result['dtype']}, {result['context']} tokens of context; "
        f"{result['executables']} executables ({result['executables_of_earlier_runs']} kept by earlier runs), "
        f"{result['compiles_after_warm_up']} compiles after warm-up; times in ms"
    )
    header = ["rows", "read", "ahead", "turns", "apart", "dispatch", "turns", "GB", "floor", "of read", "of ahead"]
    lines = [
        [
            str(r["rows"]),
            *(f"{r[k]:.2f}" for k in ("step_read_ms", "step_ahead_ms", "step_ahead_alternating_ms")),
            *(f"{r[k]:.2f}" for k in ("step_ahead_same_two_apart_ms", "dispatch_ms", "dispatch_alternating_ms")),
            *_floor_cells(r),
        ]
        for r in result["rows"]
    ]
    print(record.table(header, lines))
    print(f"the engine's loop, at a readout depth of {result['readout_depth']}:")
    print(record.table(*loop_table(result["rows"])))
    print("steps that read prompts while rows decode:")
    print(record.table(*prompt_table(result["prompt_steps"])))
    for gate in result["gates"]:
        bound = f"{gate['worst']:g} at {gate['at_rows']} rows, bound {gate['bound']:g}, goal {gate['goal']:g}"
        print(f"{'met' if gate['met'] else 'NOT met'}: {gate['gate']} ({bound}, {gate['row_counts']} row counts)")


def prompt_table(steps: Mapping[str, Sequence[dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of what `prompt_steps` gives, by kind."""
    header = ["", "prompt tokens", "rows", "step", "prompt tokens/s"]
    lines = [
        [kind, str(f["prompt_tokens"]), str(f["decode_rows"]), f"{f['step_ms']:.2f}", str(f["prompt_tokens_per_s"])]
        for kind, figures in steps.items()
        for f in figures
    ]
    return header, lines


def _floor_cells(row: dict[str, Any]) -> list[str]:
    if "floor_ms" not in row:
        return [""] * 4
    shares = (f"{100 * row[k]:.0f} %" for k in ("floor_share_read", "floor_share_ahead"))
    return [f"{(row['weight_bytes'] + row['kv_bytes']) / 1e9:.2f}", f"{row['floor_ms']:.3f}", *shares]


def loop_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: the figures of plain steps, then of cycles, beside the peer's where there is one."""
    header = ["rows", "", "step", "turns", "dispatch", "floor", "tokens", "kernels", "a layer", "prefill/s"]
    header += ["peer", "ratio", "turns", "prefill/s", "ratio"]

    def cell(figures: dict[str, Any], key: str, digits: int = 2) -> str:
        return f"{figures[key]:.{digits}f}" if key in figures else ""

    def line(rows: int, name: str, f: dict[str, Any]) -> list[str]:
        peer = f.get("peer", {})
        return [
            str(rows), name, *(cell(f, key) for key in ("step_ms", "step_alternating_ms", "dispatch_ms")),
            cell(f, "floor_ms", 3), cell(f, "tokens_a_step", 3), cell(f, "kernels", 0), cell(f, "kernels_per_layer", 1),
            cell(f, "prefill_tokens_per_s", 0), *(cell(peer, key) for key in ("step_ms", "ratio", "ratio_alternating")),
            cell(peer, "prefill_tokens_per_s", 0), cell(peer, "prefill_ratio"),
        ]  # fmt: skip

    kinds = {"plain": [(r["rows"], r) for r in rows], "cycle": [(r["rows"], r["cycle"]) for r in rows if "cycle" in r]}
    return header, [line(n, name, figures) for name, each in kinds.items() for n, figures in each]
