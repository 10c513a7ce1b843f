"""`bench kernel`: each kernel by itself, beside what the device can do and, for MLA decode, beside the best peers.

Every row is one executable of several calls, launched again and again with its results passed back in, so that the
device always has work and recorded graphs stay valid. `us` is wall time a call, measured in turns of a tenth of a
second, each after as long a warm-up; `device us` is the time of the call's kernels in a trace, taken after all timing,
and the record has each kernel's part of it (`device_us_by_kernel`).
With `--peers` FlashMLA and FlashAttention-3 run on the same arrays in turn with ours, as recorded graphs of as many
calls; `ratio` is ours (wall) over the better of them (time between events). Such a run has no device times: the ratio
does not need them, and tracing would double its length. `sparse_mla` has rows of dense attention too, and its summary says
from which context on sparse attention is the faster one.

A sample of each row's results, computed into poison, is compared with float64, and all of them with the peers'. A row
that cannot run records its error. Exit code 1 if a row failed or was wrong.
"""

import argparse
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from bench.harness import record
from bench.harness.arguments import names_among
from bench.harness.ceilings import ceilings
from bench.harness.timing import launches_for, rounds, turn_seconds
from bench.harness.trace import keep_graphs
from bench.kernel import gqa, mla
from bench.kernel.case import LARGEST_ERROR, Case
from bench.kernel.dense_mlp import DENSE_MLP
from bench.kernel.gated_delta import GATED_DELTA, GATED_DELTA_PROMPTS
from bench.kernel.gqa_write import GQA_WRITE
from bench.kernel.kv_write import KV_WRITE
from bench.kernel.loop import Loop, device_seconds
from bench.kernel.mla_query import MLA_QUERY
from bench.kernel.moe import MOE, MOE_BLOCK, MOE_QUANTISED
from bench.kernel.norm_linear import ADD_LINEAR, JOINED_LINEAR, NORM_LINEAR
from bench.kernel.peers import LIBRARIES, PeerError, Peers
from bench.kernel.report import figures, print_table, summary
from bench.kernel.row_write import ROW_WRITE
from bench.kernel.sampling import SAMPLING
from bench.kernel.sparse import SPARSE_MLA, crossover
from pallas_kernels import backend

OPERATIONS: dict[str, dict[str, list[Case]]] = {
    "mla_decode": mla.DECODE,
    "mla_decode_fp8": mla.DECODE_FP8,
    "mla_values": mla.VALUES,
    "mla_prefill": mla.PREFILL,
    "sparse_mla": SPARSE_MLA,
    "gqa_decode": gqa.DECODE,
    "gqa_prefill": gqa.PREFILL,
    "gqa_write": GQA_WRITE,
    "gated_delta": GATED_DELTA,
    "gated_delta_prompts": GATED_DELTA_PROMPTS,
    "kv_write": KV_WRITE,
    "mla_query": MLA_QUERY,
    "norm_linear": NORM_LINEAR,
    "add_linear": ADD_LINEAR,
    "joined_linear": JOINED_LINEAR,
    "dense_mlp": DENSE_MLP,
    "moe": MOE,
    **MOE_QUANTISED,
    "moe_block": MOE_BLOCK,
    "row_write": ROW_WRITE,
    "sampling": SAMPLING,
}
COMPILE_THREADS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument(
        "--rows", choices=["all", "quick", "tiny"], help="which shapes; tiny is for a CPU (default: all; CPU: tiny)"
    )
    parser.add_argument("--backend", choices=backend.BACKENDS, default="auto", help="of our kernel (default: auto)")
    parser.add_argument(
        "--peers",
        type=names_among(LIBRARIES, "peer"),
        default=[],
        metavar="NAME,...",
        help="flashmla,fa3: beside mla_decode",
    )
    parser.add_argument(
        "--peer-libs", type=Path, metavar="FOLDER", help="site-packages folder with vLLM 0.24.0's binaries"
    )
    record.add_arguments(parser)


def compile_all(cases: Sequence[Case], chosen: str) -> list[Future]:
    """Each executable, or the exception of its compilation; all are finished, so that no compiler disturbs the timing."""

    def compile_one(case: Case) -> Any:
        with backend.use(backend.Backends(attention=chosen, moe=chosen)):
            return case.lower().compile()

    with ThreadPoolExecutor(min(COMPILE_THREADS, os.cpu_count() or 1)) as pool:
        return [pool.submit(compile_one, case) for case in cases]


def measure(case: Case, executable: Any, peers: Peers, ceiling: Mapping[str, float]) -> dict[str, Any]:
    """Checks and times one row."""
    seconds = turn_seconds(jax.devices()[0].platform == "gpu")
    peers.release()
    loop = Loop(case, executable)
    results = loop.launch_into_poison()
    errors = {"float64": case.error(loop.inputs, results) if loop.finite() else math.nan}
    failures = []
    timers = {"ours": (loop.time, launches_for(loop.time, loop.calls, seconds))}
    outputs: dict[str, Any] = {}
    for name in peers.names:
        assert isinstance(case, mla.MlaDecode)
        try:
            for variant, graph in peers.record(name, case, loop.inputs).items():
                timers[variant] = (graph.time, launches_for(graph.time, graph.calls, seconds))
                # Before the next one is timed, while our results are still those of equal inputs.
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
    # Read when jax first starts a device, as are the flags. PyTorch allocates on the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    keep_graphs()
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
        except Exception as e:  # one shape that fails must not cost the others
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
            "summary": summary(rows) | (crossover(rows) if arguments.operation == "sparse_mla" else {}),
            "start_and_compile_seconds": round(compile_seconds, 1),
            "seconds": round(time.perf_counter() - started, 1),
            "rows": rows,
        }
        record.write(f"kernel_{arguments.operation}", result, arguments)
        return result

    if gpu and not peers.names:
        save()  # before tracing, which may crash the process
        trace(cases, compiled, rows)
    result = save()
    print_table(result)
    return 1 if result["summary"]["failed"] or result["summary"]["wrong"] else 0


def trace(cases: Sequence[Case], compiled: Sequence[Future], rows: Sequence[dict[str, Any]]) -> None:
    """Adds device times. Last, because a device that has been traced may be slower than before."""
    for case, future, row in zip(cases, compiled, rows, strict=True):
        if "ours_us" not in row:
            continue
        try:
            seconds = device_seconds(Loop(case, future.result()))
        except Exception as e:
            row["error"] = "; ".join([*filter(None, [row.get("error")]), f"trace: {one_line(e)}"])
            continue
        if not seconds:
            continue
        row["ours_device_us"] = round(1e6 * sum(seconds.values()), 3)
        longest_first = sorted(seconds.items(), key=lambda each: -each[1])
        row["device_us_by_kernel"] = {name: round(1e6 * each, 3) for name, each in longest_first}
