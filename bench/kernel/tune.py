"""`bench tune`: which values of the kernels' measured choices (`pallas_kernels/tuning.py`) are fastest on this device.

Choices are made one after the other, the others staying as they are. All candidates run the same cases in turn, so that
a change of the clock meets all of them; a candidate's score is the geometric mean, over the cases, of its time over that
of the present value. A candidate replaces the present value if it is right everywhere and more than 1 % faster.

With `--write` the chosen values go to `pallas_kernels/tuned.json` under this kind of device; not from tiny shapes, whose
times mean nothing. Exit code 1 if a candidate's results were wrong.
"""

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from bench.harness import record
from bench.harness.arguments import names_among
from bench.harness.timing import launches_for, rounds, turn_seconds
from bench.kernel.case import LARGEST_ERROR, Case
from bench.kernel.dense_mlp import DenseMlp
from bench.kernel.gated_delta import GatedDeltaPrompts
from bench.kernel.gqa import GqaDecode
from bench.kernel.gqa_write import GqaWrite
from bench.kernel.loop import Loop
from bench.kernel.mla import MlaDecode, MlaValues
from bench.kernel.moe import Moe, MoeBlock, MoeQuantised, MoeShared
from bench.kernel.norm_linear import AddLinear, JoinedLinear, NormLinear
from bench.kernel.sampling import RULED, Rules, Sampling
from jaxspec.errors import ConfigError
from pallas_kernels import tuning
from pallas_kernels.gated_delta import shapes as gated_delta
from pallas_kernels.gqa_decode.shapes import HEADS as GQA_HEADS
from pallas_kernels.gqa_decode.shapes import Heads
from pallas_kernels.gqa_write.shapes import TOKENS
from pallas_kernels.mla_decode.shapes import CONTEXTS, HEADS, WINDOWS
from pallas_kernels.tuning import Tuning

# A candidate has to be this much faster than the present value. Two equal executables differ by less, but calls of 10 us
# by more (docs/kernels/tuning.md): look at their cases.
MARGIN = 0.01
COMPILE_THREADS = 8


@dataclasses.dataclass(frozen=True)
class Choice:
    """A field of `Tuning`: values to try, and the cases that decide; `tiny` ones are for a CPU."""

    candidates: tuple[Any, ...]
    cases: tuple[Case, ...]
    tiny: tuple[Case, ...]


def slots(
    least: float, narrow: float, middle: float, wide: float, *, between: float | None = None
) -> tuple[tuple[float, int], ...]:
    """Bounds of slots of 8, 16, 32 and 64 rows, and of 24 if there is one."""
    of_24 = () if between is None else ((between, 24),)
    return (least, 8), (narrow, 16), *of_24, (middle, 32), (wide, 64)


# Larger batches fill the device without splits.
MOST_SPLIT_REQUESTS = 64
# Of plain steps; of cycles, windows of 4 tokens of 64 and 128 rows.
CYCLE_BLOCKS = tuple(MoeBlock(T) for T in (256, 512))
MINIMAX = GQA_HEADS["minimax-m2"][:3]
BLOCKS, TINY_BLOCKS = tuple(MoeBlock(T) for T in (4, 32, 128)), (MoeBlock(6, 32, 8, 2, 16, 2, 4),)
CHOICES: dict[str, Choice] = {
    "split_overhead_pages": Choice(
        (2, 3, 5, 8, 12),
        tuple(MlaDecode(B, S, HEADS["moonlight"], Q) for B, S in CONTEXTS if B <= MOST_SPLIT_REQUESTS for Q in WINDOWS),
        (MlaDecode(2, 70, 2, 1, 2),),
    ),
    "slot_rows": Choice(
        # One bound at a time: every candidate holds its own weights on the device.
        (
            *(slots(least, 12.0, 30.0, 64.0) for least in (0.0, 4.0, 6.0)),
            *(slots(4.0, narrow, 30.0, 64.0) for narrow in (8.0, 16.0)),
            *(slots(4.0, 12.0, middle, 64.0) for middle in (24.0, 40.0)),
            *(slots(4.0, 12.0, 30.0, wide) for wide in (48.0, 96.0)),
            *(slots(4.0, narrow, 30.0, 64.0, between=18.0) for narrow in (9.0, 12.0)),
            slots(4.0, 9.0, 30.0, 64.0, between=15.0),
            # At 24 tokens an expert one in 25 needs a second slot of 32 rows.
            ((4.0, 8), (12.0, 16), (18.0, 32), (30.0, 40), (64.0, 64)),
        ),
        tuple(Moe(T) for T in (16, 32, 40, 64, 100, 128, 160, 192, 256, 384, 512, 640, 768, 1024)),
        (Moe(6, 32, 8, 2, 16, 2, 4),),
    ),
    "packed_slot_rows": Choice(
        (
            *(slots(4.0, narrow, 30.0, 64.0) for narrow in (9.0, 12.0, 16.0)),
            *(slots(4.0, narrow, 30.0, 64.0, between=18.0) for narrow in (6.0, 9.0, 12.0)),
            *(slots(4.0, 9.0, 30.0, 64.0, between=between) for between in (12.0, 15.0, 24.0)),
            *(slots(least, 9.0, 30.0, 64.0, between=18.0) for least in (2.0, 6.0)),
        ),
        tuple(MoeQuantised(T) for T in (16, 32, 48, 64, 96, 128, 160, 192, 256)),
        (MoeQuantised(6, 32, 8, 2, 32, 2, 4),),
    ),
    "most_piece_rows": Choice(
        (32, 64, 128), tuple(MoeShared(T) for T in (16, 48, 96, 128)), (MoeShared(6, 32, 8, 2, 16, 2, 4),)
    ),
    "norm_linear_tokens": Choice(
        (0, 1, 2, 4), tuple(NormLinear(T) for T in (1, 2, 4)), (NormLinear(3, 32, (8, 4), 3),)
    ),
    "one_token_experts": Choice((False, True), (Moe(1), MoeShared(1)), (MoeShared(1, 32, 8, 2, 16, 2, 4),)),
    "one_token_fp8": Choice(
        (False, True),
        (MoeQuantised(1, scheme="fp8_block"),),
        (MoeQuantised(1, 32, 8, 2, 32, 2, 4, scheme="fp8_block"),),
    ),
    "one_token_int4": Choice((False, True), (MoeQuantised(1),), (MoeQuantised(1, 32, 8, 2, 32, 2, 4),)),
    "row_kernel_tokens": Choice((0, 512), BLOCKS, TINY_BLOCKS),
    "copying_tokens": Choice((0, 128), BLOCKS, TINY_BLOCKS),
    "route_plan_tokens": Choice((8, 32, 128), BLOCKS, TINY_BLOCKS),
    "router_tokens": Choice((0, 128, 256, 512), (*BLOCKS, *CYCLE_BLOCKS), TINY_BLOCKS),
    "split_linear_tokens": Choice(
        (0, 64, 128, 256), tuple(AddLinear(T) for T in (4, 32, 64, 128, 256)), (AddLinear(3, 32, (2, 8), 3),)
    ),
    "wide_values_tokens": Choice(
        (0, 32, 64, 128, 256, 512),
        (
            *(MlaValues(B, 1024, HEADS["moonlight"], 1) for B in (8, 16, 32, 64, 128)),
            *(MlaValues(B, 1024, HEADS["moonlight"], 4) for B in (64, 128)),
        ),
        (MlaValues(2, 70, 2, 4, 2),),
    ),
    "head_kernel_tokens": Choice(
        (0, 128, 512, 2048, 8192), tuple(GqaWrite(T) for T in TOKENS), (GqaWrite(5, Heads(2, 4, 64), 4, 3),)
    ),
    "mlp_kernel_tokens": Choice(
        (0, 32, 64, 128), tuple(DenseMlp(T) for T in (4, 32, 64, 128)), (DenseMlp(3, 32, 16, 3),)
    ),
    "delta_chunk_kernel": Choice(
        (False, True),
        tuple(GatedDeltaPrompts(*call, heads) for heads in gated_delta.HEADS.values() for call in gated_delta.PROMPTS),
        (GatedDeltaPrompts(2, 70, gated_delta.Heads(1, 2, 16, 64, 1), 2),),
    ),
    "bounded_draws": Choice((False, True), tuple(Sampling(R, R) for R in (8, 32, 128)), (Sampling(3, 2, 40, 2),)),
    "rule_kernel": Choice((False, True), RULED, (Rules(6, 2, 1, 40, 2),)),
    "schedule_kernel": Choice(
        (False, True),
        # One call: XLA joins the schedules of several.
        (
            *(MlaValues(B, 1024, HEADS["moonlight"], 1, calls=1) for B in (1, 8, 32, 128)),
            MlaDecode(32, 4096, HEADS["moonlight"], 4, calls=1),
            *(GqaDecode(B, 1024, *MINIMAX, 1, calls=1) for B in (1, 32)),
        ),
        (MlaDecode(2, 70, 2, 1, 1), GqaDecode(2, 70, 1, 2, 64, 1, calls=1)),
    ),
    "joined_linear_tokens": Choice(
        (0, 16, 32, 64, 128, 256),
        tuple(JoinedLinear(T) for T in (4, 16, 32, 64, 128, 256)),
        (JoinedLinear(3, 32, (8, 4), 3),),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--choices",
        type=names_among(CHOICES, "choice"),
        default=list(CHOICES),
        metavar="NAME,...",
        help=f"some of {', '.join(CHOICES)} (default: all)",
    )
    parser.add_argument(
        "--rows", choices=["all", "tiny"], help="which shapes; tiny is for a CPU (default: all; CPU: tiny)"
    )
    parser.add_argument("--write", action="store_true", help="put the chosen values into pallas_kernels/tuned.json")
    record.add_arguments(parser)


def choose(present: Any, scores: Mapping[Any, float | None]) -> Any:
    """The value with the best score, or the present value (score 1) if none is better by the margin.

    Args:
        scores: each candidate's time over the present value's; None where its results were wrong.
    """
    right = {value: score for value, score in scores.items() if score is not None}
    best = min(right, key=lambda value: right[value], default=present)
    return best if best != present and right[best] < 1 - MARGIN else present


def tune(
    name: str, present: Tuning, cases: Sequence[Case], candidates: Sequence[Any], compare: Callable[..., Any]
) -> dict[str, Any]:
    """The times of one choice's candidates on each case, and which candidate is chosen.

    Args:
        compare: see `compare_executables`.
    """
    now = getattr(present, name)
    values = list(dict.fromkeys((now, *candidates)))
    variants = [dataclasses.replace(present, **{name: value}) for value in values]
    ratios: list[list[float]] = [[] for _ in values]
    wrong: set[Any] = set()
    rows = []
    for case in cases:
        times, errors = compare(case, variants)
        wrong |= {value for value, error in zip(values, errors, strict=True) if not error < LARGEST_ERROR}
        for ratio, seconds in zip(ratios, times, strict=True):
            ratio.append(seconds / times[0])
        rows.append(case.label | {"us": [round(1e6 * seconds, 3) for seconds in times]})
        print(name, " ".join(f"{key}={value}" for key, value in case.label.items()), rows[-1]["us"], flush=True)
    scores = {
        value: None if value in wrong else statistics.geometric_mean(each)
        for value, each in zip(values, ratios, strict=True)
    }
    return {
        "choice": name,
        "present": now,
        "chosen": choose(now, scores),
        "candidates": [
            {"value": value, "score": None if score is None else round(score, 4)} for value, score in scores.items()
        ],
        "wrong": [value for value in values if value in wrong],
        "cases": rows,
    }


def compare_executables(case: Case, variants: Sequence[Tuning]) -> tuple[list[float], list[float]]:
    """Seconds a call under each tuning, and the largest error of its results."""
    with ThreadPoolExecutor(min(COMPILE_THREADS, os.cpu_count() or 1)) as pool:
        compiling = []
        for variant in variants:
            # A call traced under one tuning must not serve another.
            jax.clear_caches()
            with tuning.use(variant):
                compiling.append(pool.submit(case.lower().compile))
        loops = [Loop(case, each.result()) for each in compiling]
    errors = [case.error(loop.inputs, loop.launch_into_poison()) for loop in loops]
    seconds = turn_seconds(jax.devices()[0].platform == "gpu")
    timers = {str(i): (loop.time, launches_for(loop.time, loop.calls, seconds)) for i, loop in enumerate(loops)}
    return list(rounds(timers).values()), errors


def write(file: Path, kind: str, chosen: Tuning) -> None:
    """Puts one kind of device into the data, atomically."""
    data = json.loads(file.read_text()) if file.exists() else {}
    data[kind] = tuning.to_json(chosen)
    lines = [
        f' "{name}": {{\n' + ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in fields.items()) + "\n }"
        for name, fields in sorted(data.items())
    ]
    part = file.with_suffix(".part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    part.replace(file)


def run(arguments: argparse.Namespace) -> int:
    device = jax.devices()[0]
    tiny = (arguments.rows or ("all" if device.platform == "gpu" else "tiny")) == "tiny"
    if arguments.write and tiny:
        raise ConfigError("--write needs the real shapes, which need a GPU: use --rows all, or leave --write out")
    present = tuning.current()
    results = []
    for name in arguments.choices:
        choice = CHOICES[name]
        cases = choice.tiny if tiny else choice.cases
        results.append(tune(name, present, cases, choice.candidates, compare_executables))
    chosen = dataclasses.replace(present, **{result["choice"]: result["chosen"] for result in results})
    if arguments.write:
        write(tuning.FILE, device.device_kind, chosen)
    record.write(
        "tune",
        {"benchmark": "tune", "written": arguments.write, "chosen": tuning.to_json(chosen), "choices": results},
        arguments,
    )
    header = ["choice", "value", "score", ""]
    marks = [
        [
            result["choice"],
            str(each["value"]),
            "wrong" if each["score"] is None else f"{each['score']:.4f}",
            " ".join(word for word in ("present", "chosen") if each["value"] == result[word]),
        ]
        for result in results
        for each in result["candidates"]
    ]
    print(record.table(header, marks))
    return 1 if any(result["wrong"] for result in results) else 0
