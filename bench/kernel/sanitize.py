"""`bench sanitize`: compute-sanitizer over a small GPU test of each kernel.

Each test runs under memcheck (accesses outside of allocations) and racecheck (shared memory), in its own process, and
only the kernel in question is watched. Arrays are allocated one by one and apart, so that memcheck sees an access just
past an argument or result; XLA's temporary arrays share one allocation. XLA's dumps show that the test did compile the
kernel: one that it did not compile would look clean. Triton kernels are packed in the dumps, so their tests ask for them
by name. Kernels with a deliberate fault are run as well: a tool that misses it proves nothing elsewhere.

The sanitizer itself sometimes crashes or hangs, not always with the same kernels, which tells nothing about them: such a
run is repeated unless it had reported something, and the record keeps it apart from findings. A test that hangs prints
where it is.

The record is written whenever a run ends; Ctrl-C and SIGTERM end the others. Exit code 1 unless every kernel is clean
and every fault was found.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import record
from bench.harness.arguments import names_among
from jaxspec.errors import ConfigError

TOOLS = ("memcheck", "racecheck")
ROOT = Path(__file__).parents[2]
# Bytes between arrays: an access past one must not fall into another.
PADDING = 2048
# The share of --timeout after which a test prints its stack.
PRINTS_STACK = 0.8
# Under the sanitizer XLA sometimes compiles forever, threads of its pool spinning: run it without a pool.
NO_POOL = "--xla_gpu_force_compilation_parallelism=1"
# Faults of the sanitizer itself, which do not always occur.
REPEATED = ("crashed", "timed out")
# Characters of the output that a record keeps: the last ones, which hold the stack of a test that hangs; of findings the
# first ones.
OUTPUT = 8000


@dataclass(frozen=True)
class Watched:
    """A kernel and the test that runs it.

    Attributes:
        name: of a Mosaic kernel without its suffix, or of a Triton kernel.
        test: file and id under tests/gpu.
    """

    name: str
    test: str
    triton: bool = False

    @property
    def symbol(self) -> str:
        """A part of the kernel's name on the device that no other kernel's name has."""
        return self.name if self.triton else f"{self.name}_mosaic_gpu"


KERNELS = (
    Watched("norm_linear", "test_norm_linear.py::test_sizes[2048-outs0-0-1]"),
    Watched("add_norm", "test_norm_linear.py::test_sum_and_norm[128-False-2]"),
    Watched("joined_linear", "test_norm_linear.py::test_linear_maps_side_by_side[2048-outs0-128]"),
    Watched("split_linear", "test_norm_linear.py::test_parts_of_a_linear_map[2048-2048-4]"),
    Watched("kv_write", "test_kv_write.py::test_rows[8]"),
    Watched("gated_delta", "test_gated_delta.py::test_windows[Qwen3.5-35B-A3B-5-4-4]"),
    Watched("gated_delta_chunks", "test_gated_delta.py::test_prompts[Qwen3.5-35B-A3B-lengths1-9]"),
    Watched("mla_query", "test_mla_query.py::test_sizes[1-4]"),
    Watched("mla_write_and_query", "test_mla_query.py::test_with_the_latents_in_one_launch[1-4-False]"),
    Watched("split_schedule", "test_split_schedule.py::test_is_that_of_plain_xla[(5, 8, 64, 4, 12, 2)]"),
    Watched("mla_decode", "test_mla_decode.py::test_windows[mosaic-2]"),
    Watched("mla_decode_fp8", "test_fp8_cache.py::test_decoding_with_values[lengths0-1-16]"),
    Watched("mla_decode_merge", "test_mla_decode.py::test_windows[mosaic-3]"),
    Watched("mla_decode_values", "test_mla_decode.py::test_values_in_the_merging_kernel[mosaic-lengths3-2]"),
    Watched("mla_decode_wide_values", "test_mla_decode.py::test_values_in_the_merging_kernel[mosaic-lengths6-4]"),
    Watched("mla_decode_head_values", "test_mla_decode.py::test_values_of_each_head[lengths2-4-16-128]"),
    Watched("mla_decompress", "test_mla_prefill.py::test_decompression[4]"),
    Watched("mla_decode_gathered", "test_dsa.py::test_gathered_in_the_kernel[3-16]"),
    Watched("key_scores", "test_dsa.py::test_scores[64]"),
    Watched("key_places", "test_dsa.py::test_places_of_the_largest[1-2048-normal]"),
    Watched("mla_prefill", "test_mla_prefill.py::test_against_the_reference[99-starts6-chunks6-4]"),
    Watched("gqa_decode", "test_gqa.py::test_decode_windows[mosaic-1]"),
    Watched("gqa_decode_merge", "test_gqa.py::test_decode_windows[mosaic-2]"),
    Watched("gqa_write", "test_gqa_write.py::test_rows[qwen3-30b-a3b-4]"),
    Watched("gqa_prefill", "test_gqa.py::test_prefill[starts0-chunks0-22-1-1-64]"),
    Watched("moe_router", "test_moe.py::test_router_on_tensor_cores[moonlight-2048-2]"),
    Watched("moe_route", "test_moe.py::test_routed_as_the_reference[odd-True-9]"),
    Watched("moe_route_plan", "test_moe.py::test_tables_of_the_routing_launch[moonlight-True-3]"),
    Watched("moe_route_and_plan", "test_moe.py::test_tables_of_blocks_that_wait[odd-True-9-True]"),
    Watched("moe_plan", "test_moe.py::test_dispatch_gives_the_slot_tables_of_the_reference[9-8-2]"),
    Watched("moe_count", "test_moe.py::test_dispatch_gives_the_slot_tables_of_the_reference[2048-8-2]"),
    Watched("moe_place", "test_moe.py::test_dispatch_gives_the_slot_tables_of_the_reference[2048-8-2]"),
    Watched("moe_gather", "test_moe.py::test_gathers_the_rows_of_slots[8]"),
    Watched("moe_up", "test_moe.py::test_balanced_routing[odd-3]"),
    Watched("moe_down", "test_moe.py::test_balanced_routing[odd-3]"),
    Watched("moe_packed_up", "test_moe_packed.py::test_experts[int4_g32-False-9]"),
    Watched("moe_packed_down", "test_moe_packed.py::test_experts[int4_g32-False-9]"),
    Watched("quantise_tokens", "test_moe_fp8.py::test_products[fp8_block-moonlight-5]"),
    Watched("moe_fp8_up", "test_moe_fp8.py::test_experts[fp8_block-8-True]"),
    Watched("moe_fp8_down", "test_moe_fp8.py::test_experts[fp8_block-8-True]"),
    Watched("moe_combine", "test_moe.py::test_routing_and_experts_together[moonlight-8]"),
    Watched("moe_one_token", "test_moe.py::test_one_token[odd-1344-True]"),
    Watched("moe_one_token_int4", "test_moe_packed.py::test_one_token_int4[moonlight-0]"),
    Watched("logits_stats", "test_sampling.py::test_stats[6-1024-bfloat16]"),
    Watched("cutoffs", "test_sampling.py::test_truncation[6-1024-bfloat16]"),
    Watched("logit_rules", "test_logit_rules.py::test_against_plain_xla[3-1-1024-bfloat16]"),
    Watched("likeliest", "test_sampling.py::test_likeliest[6-129280-float32]"),
    Watched("row_write", "test_row_write.py::test_rows[5-1400-bfloat16]"),
    Watched("gumbel_argmax", "test_sampling.py::test_draws[False-1024-bfloat16]"),
    Watched("mla_decode", "test_mla_decode.py::test_windows[triton-2]", triton=True),
    Watched("gqa_decode", "test_gqa.py::test_decode_windows[triton-1]", triton=True),
    Watched("split_kv_merge", "test_mla_decode.py::test_windows[triton-3]", triton=True),
)

# How every line of the sanitizer begins, and the lines that report an access or a race.
PREFIX = "========= "
REPORT = re.compile(rf"^{PREFIX}(?:Invalid |(?:Error|Warning): (?:Race|Potential) )", re.MULTILINE)

# With the tool that must find the fault: a warpgroup that reads before another has written, a row past an array's end.
FAULTY = (
    (Watched("faulty_handover", "faulty_kernels.py::test_handover"), "racecheck"),
    (Watched("faulty_row", "faulty_kernels.py::test_row"), "memcheck"),
    (Watched("faulty_triton_row", "faulty_triton_kernel.py::test_row", triton=True), "memcheck"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = sorted({kernel.name for kernel in KERNELS})
    parser.add_argument("--kernels", type=names_among(known, "kernel"), metavar="NAME,...", help="only these")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="processes at a time (default: 4)")
    parser.add_argument("--timeout", type=float, default=150, metavar="SECONDS", help="of each (default: 150)")
    parser.add_argument(
        "--attempts", type=int, default=3, metavar="N", help="of each that crashes or times out (default: 3)"
    )
    parser.add_argument(
        "--sanitizer", metavar="FILE", help="compute-sanitizer (default: that of $PATH, then of /usr/local/cuda)"
    )
    record.add_arguments(parser)


def find_sanitizer(given: str | None) -> str:
    path = shutil.which(given or "compute-sanitizer") or (
        None if given else shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    )
    if path is None:
        raise ConfigError(
            f"{given or 'compute-sanitizer'} cannot be run: name CUDA's compute-sanitizer with --sanitizer FILE"
        )
    return path


def verdict(output: str, *, compiled: bool) -> str:
    """The outcome of a run: clean, found, crashed, failed (the test did), or not run.

    Args:
        compiled: whether the test compiled the kernel.
    """
    errors = re.search(r"SUMMARY: (\d+) (?:errors?|hazards?)", output)
    passed = re.search(r"\b1 passed\b", output)
    # A report counts even if the process crashed later.
    if REPORT.search(output) or (errors and int(errors[1])):
        return "found"
    if errors is None or not (passed or re.search(r"\b1 (?:failed|error|skipped)\b", output)):
        return "crashed"
    if not passed:
        return "failed"
    return "clean" if compiled else "not run"


class StoppedError(Exception):
    """The process was ended because the whole command ends."""


class Processes:
    """Runs commands from several threads, and ends them together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> tuple[str, bool]:
        """The output, and whether the process ended by itself within `timeout` seconds.

        Raises:
            StoppedError: `stop` was called.
        """
        with self._lock:
            if self._stopped:
                raise StoppedError
            # In a process group: the sanitizer's child would outlive it otherwise.
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                errors="replace", start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
        in_time = True
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            in_time = False
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        with self._lock:
            self._running.remove(process)
            if self._stopped:
                raise StoppedError
        return output, in_time

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                # The group of one that has ended may be gone.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def attempt(
    kernel: Watched, tool: str, sanitizer: str, arguments: argparse.Namespace, processes: Processes
) -> tuple[str, str]:
    """One run of a kernel's test under one tool: the outcome, and the output."""
    with tempfile.TemporaryDirectory() as dump:
        flags = [os.environ.get("XLA_FLAGS", ""), NO_POOL]
        flags += [f"--xla_dump_to={dump}", "--xla_dump_hlo_as_text"]
        environment = os.environ | {
            "JAXSPEC_TEST_GPU": "1",
            # Allocates arrays one by one. So does `platform`, but there memcheck misses accesses past their ends.
            "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_FLAGS": " ".join(flags).strip(),
        }
        command = [sanitizer, "--tool", tool, "--kernel-name", f"kernel_substring={kernel.symbol}"]
        # Without blocking launches racecheck misses races in jax's kernels.
        command += ["--show-backtrace", "no", "--force-blocking-launches"]
        if tool == "memcheck":
            # API calls that the driver refuses, for memory say, are errors of the process and not of the kernel.
            command += ["--padding", str(PADDING), "--report-api-errors", "no"]
        command += [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", f"tests/gpu/{kernel.test}"]
        command += ["-o", f"faulthandler_timeout={PRINTS_STACK * arguments.timeout}"]
        output, in_time = processes.run(command, environment, arguments.timeout)
        if not in_time:
            return "found" if REPORT.search(output) else "timed out", output
        compiled = kernel.triton or any(kernel.symbol in file.read_text() for file in Path(dump).glob("*.txt"))
        return verdict(output, compiled=compiled), output


def watch(
    kernel: Watched, tool: str, sanitizer: str, arguments: argparse.Namespace, processes: Processes
) -> dict[str, Any]:
    """One kernel under one tool: the outcome of the last attempt, and those of the attempts before it."""
    start, before = time.monotonic(), list[str]()
    outcome, output = attempt(kernel, tool, sanitizer, arguments, processes)
    while outcome in REPEATED and len(before) + 1 < arguments.attempts:
        before.append(outcome)
        outcome, output = attempt(kernel, tool, sanitizer, arguments, processes)
    row = {"kernel": kernel.name, "triton": kernel.triton, "tool": tool, "test": kernel.test, "outcome": outcome}
    row["seconds"] = round(time.monotonic() - start, 1)  # of all attempts
    if before:
        row["before"] = before
    print(f"{kernel.symbol}, {tool}: {', then '.join([*before, outcome])}", flush=True)
    if outcome == "found":  # the first report is the kernel's, later failures may follow from it
        row["output"] = "\n".join(line for line in output.splitlines() if line.startswith(PREFIX))[:OUTPUT]
    elif outcome != "clean":
        row["output"] = output.strip()[-OUTPUT:]
    return row


def run(arguments: argparse.Namespace) -> int:
    for option in ("jobs", "attempts"):
        if (value := getattr(arguments, option)) < 1:
            raise ConfigError(f"--{option} {value}: at least one is needed")
    sanitizer = find_sanitizer(arguments.sanitizer)
    # This process only asks for the device's name.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    chosen = [kernel for kernel in KERNELS if arguments.kernels is None or kernel.name in arguments.kernels]
    sound = [(kernel, tool) for kernel in chosen for tool in TOOLS]
    rows: dict[tuple[Watched, str], dict[str, Any]] = {}
    processes, one_at_a_time = Processes(), threading.Lock()

    def watch_and_record(pair: tuple[Watched, str]) -> None:
        row = watch(*pair, sanitizer, arguments, processes)
        with one_at_a_time:
            rows[pair] = row
            summary = Counter(rows[each]["outcome"] if each in rows else "not finished" for each in sound)
            result = {"benchmark": "sanitize", "summary": dict(sorted(summary.items()))}
            result |= {"faulty": [rows[each] for each in FAULTY if each in rows]}
            result |= {"rows": [rows[each] for each in sound if each in rows]}
            record.write("sanitize", result, arguments, announced=len(rows) == len(FAULTY) + len(sound))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            list(pool.map(watch_and_record, [*FAULTY, *sound]))
        except BaseException:  # the pool would wait for the processes
            processes.stop()
            raise
    outcomes = {pair: row["outcome"] for pair, row in rows.items()}
    names = {kernel: f"{kernel.name}, Triton" if kernel.triton else kernel.name for kernel in chosen}
    table = [[name, *(outcomes[kernel, tool] for tool in TOOLS)] for kernel, name in names.items()]
    print(record.table(["kernel", *TOOLS], table))
    missed = [pair for pair in FAULTY if outcomes[pair] != "found"]
    for kernel, tool in missed:
        print(
            f"{tool} missed the fault of {kernel.symbol} ({outcomes[kernel, tool]}): its clean kernels may have faults too"
        )
    return 1 if missed or any(outcomes[pair] != "clean" for pair in sound) else 0
