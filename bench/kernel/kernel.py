"""`bench kernel`: each kernel by itself, beside what the device can do and, for MLA decode, beside the best peers.

Every row is one executable of several calls, launched again and again with its results going back in, so that the
device always has work and graphs stay as recorded. `us` is wall time a call, in turns of a tenth of a second that follow
as much again uncounted; `device us` is the time of the call's kernels in a trace, taken after all timing. With `--peers`
FlashMLA and FlashAttention-3 run on the same arrays in turn with ours, as recorded graphs of as many calls; `ratio` is
ours (wall) over the better of them (time between events). Such a run has no device times, which no ratio needs: they
would take as long as all the rest.

A sample of each row's results, computed into poison, is compared with float64, and all of them with the peers'. What
cannot run is that row's error. Exit code 1 for a row that failed or was wrong.
"""

import argparse
import logging
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from bench.harness import record
from bench.harness.timing import TRACE_FLAG, Loop, ceilings, device_seconds, launches_for, rounds, turn_seconds
from bench.kernel.case import LARGEST_ERROR, Case
from bench.kernel.gqa import GQA_DECODE, GQA_PREFILL
from bench.kernel.layers import KV_WRITE, MLA_QUERY, MOE, NORM_LINEAR
from bench.kernel.mla import DECODE, PREFILL, MlaDecode
from bench.kernel.peers import LIBRARIES, PeerError, Peers
from bench.kernel.sampling import SAMPLING
from pallas_kernels import backend

OPERATIONS: dict[str, dict[str, list[Case]]] = {
    "mla_decode": DECODE,
    "mla_prefill": PREFILL,
    "gqa_decode": GQA_DECODE,
    "gqa_prefill": GQA_PREFILL,
    "kv_write": KV_WRITE,
    "mla_query": MLA_QUERY,
    "norm_linear": NORM_LINEAR,
    "moe": MOE,
    "sampling": SAMPLING,
}
COMPILE_THREADS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def peers(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(LIBRARIES):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
        return names

    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument(
        "--rows", choices=["all", "quick", "tiny"], help="which shapes; tiny is for a CPU (default: all; CPU: tiny)"
    )
    parser.add_argument("--backend", choices=backend.BACKENDS, default="auto", help="of our kernel (default: auto)")
    parser.add_argument("--peers", type=peers, default=[], metavar="NAME,...", help="flashmla,fa3: beside mla_decode")
    parser.add_argument(
        "--peer-libs", type=Path, metavar="FOLDER", help="site-packages folder with vLLM 0.24.0's binaries"
    )
    record.add_arguments(parser)


def better_peer(us: Mapping[str, float]) -> str | None:
    """The fastest of what was measured beside ours."""
    return min((name for name in us if name != "ours"), key=lambda name: us[name], default=None)


def figures(
    case: Case, us: Mapping[str, float], device_us: float | None, ceiling: Mapping[str, float]
) -> dict[str, Any]:
    """What one row tells beside its shape.

    Args:
        us: microseconds a call: "ours", and each variant of the peers.
        ceiling: as `kernel_timing.ceilings` tells it.
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
    """Counts; and over the rows with a ratio the geometric mean, and the worst row of each number of heads."""
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


def compile_all(cases: Sequence[Case], chosen: str) -> list[Future]:
    """Executables, or what each compilation raised; all are done, so that no compiler disturbs the timing."""

    def compile_one(case: Case) -> Any:
        with backend.use(backend.Backends(attention=chosen, moe=chosen)):
            return case.lower().compile()

    with ThreadPoolExecutor(min(COMPILE_THREADS, os.cpu_count() or 1)) as pool:
        return [pool.submit(compile_one, case) for case in cases]


def measure(case: Case, executable: Any, peers: Peers, ceiling: Mapping[str, float]) -> dict[str, Any]:
    """Checks and times one row."""
    gpu = jax.devices()[0].platform == "gpu"
    peers.release()
    loop = Loop(case, executable)
    results = loop.launch_into_poison()
    errors = {"float64": case.error(loop.inputs, results)}
    if not loop.finite():
        errors["float64"] = float("nan")
    failures = []
    timers = {"ours": (loop.time, launches_for(loop.time, loop.calls, turn_seconds(gpu)))}
    outputs: dict[str, Any] = {}
    for name in peers.names:
        assert isinstance(case, MlaDecode)
        try:
            for variant, graph in peers.record(name, case, loop.inputs).items():
                timers[variant] = (graph.time, launches_for(graph.time, graph.calls, turn_seconds(gpu)))
                # Before the next one is timed, while the results are those of the poisoned launch or ones like them.
                errors[variant] = peers.error(loop.results, graph.outputs)
                for other, theirs in outputs.items():
                    errors[f"{variant} to {other}"] = peers.error(graph.outputs, theirs)
                outputs[variant] = graph.outputs
        except Exception as e:
            failures.append(f"{name}: {one_line(e)}")
    us = {name: 1e6 * seconds for name, seconds in rounds(timers).items()}
    # NaN is not below the bound either.
    wrong = [name for name, error in errors.items() if not error <= LARGEST_ERROR]
    row = case.label | {"calls": case.calls} | figures(case, us, None, ceiling)
    row["errors"] = {name: round(error, 6) if math.isfinite(error) else str(error) for name, error in errors.items()}
    if wrong:
        row["wrong"] = wrong
    if failures:
        row["error"] = "; ".join(failures)
    return row


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Messages(logging.Handler):
    """Collects which implementation ran each operation, and why."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, message: logging.LogRecord) -> None:
        self.lines.append(message.getMessage())


def run(arguments: argparse.Namespace) -> int:
    if arguments.peers and arguments.operation != "mla_decode":
        raise PeerError(f"--peers are for mla_decode, not for {arguments.operation}")
    started = time.perf_counter()
    # Both read when jax first starts a device. PyTorch allocates on the same one.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if TRACE_FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {TRACE_FLAG}".strip()
    gpu = jax.devices()[0].platform == "gpu"
    peers = Peers(arguments.peers, arguments.peer_libs)
    if peers.names and not gpu:
        raise PeerError("--peers needs an NVIDIA GPU")
    chosen = arguments.rows or ("all" if gpu else "tiny")
    cases = OPERATIONS[arguments.operation][chosen]
    messages = Messages()
    backend.logger.addHandler(messages)
    backend.logger.setLevel(logging.INFO)

    compiled = compile_all(cases, arguments.backend)
    compile_seconds = time.perf_counter() - started
    ceiling = ceilings(gpu)
    rows = []
    for case, future in zip(cases, compiled, strict=True):
        try:
            rows.append(measure(case, future.result(), peers, ceiling))
        except Exception as e:  # one shape too many must not cost the others
            rows.append(case.label | {"error": one_line(e)})
        print(rows[-1], flush=True)

    def save() -> dict[str, Any]:
        result = {
            "benchmark": f"kernel {arguments.operation}",
            "backend": arguments.backend,
            "implementations": sorted(set(messages.lines)),
            "rows_chosen": chosen,
            "ceilings": {
                "read_TB_per_s": round(1e-12 * ceiling["read_bytes_per_s"], 3),
                "matmul_TFLOP_per_s": round(1e-12 * ceiling["matmul_flop_per_s"], 2),
            },
            "largest_error_allowed": LARGEST_ERROR,
            "summary": summary(rows),
            "start_and_compile_seconds": round(compile_seconds, 1),
            "seconds": round(time.perf_counter() - started, 1),
            "rows": rows,
        }
        record.write(f"kernel_{arguments.operation}", result, arguments)
        return result

    if gpu and not peers.names:
        save()  # a tracer that takes the process with it shall not take the times
        trace(cases, compiled, rows)
    result = save()
    print_table(result)
    return 1 if result["summary"]["failed"] or result["summary"]["wrong"] else 0


def trace(cases: Sequence[Case], compiled: Sequence[Future], rows: Sequence[dict[str, Any]]) -> None:
    """Adds device times. Last, because a device that has been traced need not be as fast as before."""
    for case, future, row in zip(cases, compiled, rows, strict=True):
        if "ours_us" not in row:
            continue
        try:
            seconds = device_seconds(Loop(case, future.result()))
        except Exception as e:
            row["error"] = "; ".join([*filter(None, [row.get("error")]), f"trace: {one_line(e)}"])
            continue
        row["ours_device_us"] = None if seconds is None else round(1e6 * seconds, 3)


def print_table(result: Mapping[str, Any]) -> None:
    rows = result["rows"]
    order = [
        "B",
        "S",
        "P",
        "prefix",
        "H",
        "K",
        "G",
        "D",
        "Q",
        "T",
        "ours_us",
        "ours_device_us",
        "flashmla_us",
        "fa3_us",
        "ratio",
    ]
    order += ["GB_per_s", "percent_of_read", "TFLOP_per_s", "percent_of_matmul"]
    columns = [name for name in order if any(row.get(name) is not None for row in rows)]

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
