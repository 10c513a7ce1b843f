"""What `bench kernel` reports of its rows: figures beside peers and ceilings, a summary, and a table."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import record
from bench.kernel.case import Case
from bench.kernel.peers import LIBRARIES

# Columns of the table, where any row has them.
_SIZES = (
    "B", "S", "P", "prefix", "H", "N", "K", "G", "D", "n", "fades", "kernel", "fp8", "Q", "T", "R",
    "V", "columns", "outputs", "draws", "top_k", "top_p", "wanted",
)  # fmt: skip
_TIMES = ("ours_us", "ours_device_us", "flashmla_us", "fa3_us", "ratio")
_RATES = ("GB_per_s", "percent_of_read", "TFLOP_per_s", "percent_of_matmul")


def better_peer(us: Mapping[str, float]) -> str | None:
    """The fastest of what was measured beside ours."""
    return min((name for name in us if name != "ours"), key=lambda name: us[name], default=None)


def figures(
    case: Case, us: Mapping[str, float], device_us: float | None, ceiling: Mapping[str, float]
) -> dict[str, Any]:
    """The times and rates of one row.

    Args:
        us: microseconds a call: "ours", and each variant of the peers.
        ceiling: see `bench.harness.ceilings.ceilings`.
    """
    seconds = 1e-6 * us["ours"]
    out: dict[str, Any] = {"ours_us": round(us["ours"], 3)}
    out["ours_device_us"] = None if device_us is None else round(device_us, 3)
    for name in LIBRARIES:
        variants = {variant: value for variant, value in us.items() if variant.split("_")[0] == name}
        if best := better_peer(variants):
            out |= {f"{name}_us": round(variants[best], 3)}
            if best != name:
                out[f"{name}_variant"] = best
    if peer := better_peer(us):
        out |= {"better_peer": peer, "ratio": round(us["ours"] / us[peer], 4)}
    if case.bytes:
        out["GB_per_s"] = round(1e-9 * case.bytes / seconds, 2)
        out["percent_of_read"] = round(100 * case.bytes / seconds / ceiling["read_bytes_per_s"], 2)
    if case.flops:
        out["TFLOP_per_s"] = round(1e-12 * case.flops / seconds, 3)
        out["percent_of_matmul"] = round(100 * case.flops / seconds / ceiling["matmul_flop_per_s"], 2)
    return out


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts; over the rows with a ratio also the geometric mean, and the worst row of each number of heads."""
    good = [row for row in rows if "error" not in row and not row.get("wrong")]
    out: dict[str, Any] = {
        "rows": len(rows),
        "failed": sum("error" in row for row in rows),
        "wrong": sum(bool(row.get("wrong")) for row in rows),
    }
    compared = [row for row in good if "ratio" in row]
    if compared:
        out["rows_compared"] = len(compared)
        out["geometric_mean_ratio"] = round(statistics.geometric_mean(row["ratio"] for row in compared), 4)
        for heads in sorted({row["H"] for row in compared}):
            worst = max((row for row in compared if row["H"] == heads), key=lambda row: row["ratio"])
            out[f"worst_H{heads}"] = {key: worst[key] for key in ("B", "S", "H", "Q", "ratio")}
    return out


def print_table(result: Mapping[str, Any]) -> None:
    rows = result["rows"]
    columns = [name for name in (*_SIZES, *_TIMES, *_RATES) if any(row.get(name) is not None for row in rows)]

    def cell(row: Mapping[str, Any], name: str) -> str:
        value = row.get(name)
        if value is None:
            return ""
        return f"{value:.2f}" if isinstance(value, float) and value < 100 else f"{value:.0f}"

    def verdict(row: Mapping[str, Any]) -> str:
        wrong = f"WRONG against {', '.join(row['wrong'])}" if row.get("wrong") else ""
        return " ".join(filter(None, [wrong, row.get("error", "")[:60]]))

    header = [name.replace("percent_of_", "% of ").replace("_per_", "/").replace("_", " ") for name in columns]
    print(record.table([*header, ""], [[*(cell(row, name) for name in columns), verdict(row)] for row in rows]))
    for line in result["implementations"]:
        print(line)
    print(f"ceilings: {result['ceilings']}; {result['seconds']} s")
    print(result["summary"])
