"""`bench cycle`: what one speculative cycle costs, by draft, with the catch-up's dead-position skip on and off.

A cycle is one decode step of the engine's own step function with k drafted tokens: the target over a window of k + 1
tokens a row, verification, the draft's catch-up over the window, k - 1 further draft steps. Weights are random and the
caches are filled with random numbers, so nearly every draft is refused: the times are those of cycles, whatever a
trained draft would have accepted. Every row has the same context; pages are given out beforehand. The drafts have the
sizes that published ones have for such a target (bench/step/cycle_steps.py).

- ahead: steps are dispatched one behind the other and waited for once: milliseconds a step, the device's or the host's
  dispatch where that is longer. Median of repeats, between which the variants of a row count take turns; each starts
  from the same state.
- read: every step's output is read before the next step, skip on. Median of all steps.
- floor: bytes of the weights that the cycle's passes touch, each pass reading its own again, and of the KV that they
  attend to, over the read bandwidth measured in the same run.
- `--split`: the same cycle ended after its stages, each an executable of its own; a stage's time is the difference of
  two medians. Where the host's dispatch sets the time these are times of dispatch.

Before anything is timed, both settings of the skip run one step from the same state: outputs must be finite, and the
share of equal drafts is reported. The skip changes shapes and so rounding: in bfloat16, near-ties fall either way.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.harness import record
from bench.step.cycle_steps import (
    DRAFTS,
    Lane,
    Stage,
    Variant,
    compile_all,
    declare_draft,
    draw_draft,
    make_lane,
    make_settings,
)
from bench.step.floor import cycle_bytes, traffic
from bench.step.step import SHAPES, mesh_of_one, ms, read_bandwidth
from jaxspec.compat import compiles
from jaxspec.config import EngineConfig, resolve_dtype
from jaxspec.engine.runner import WARMUP_RUNS, bind
from jaxspec.models.cache import page_bytes
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import TENSOR_AXIS, count_parameters, random_params
from jaxspec.models.registry import read_config

# Steps that are not counted at the start of each measurement.
WARMUP_STEPS = 1
READ_REPEATS = 2
STAGES = (Stage.TARGET, Stage.VERIFY, Stage.CATCH_UP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def numbers(text: str) -> list[int]:
        return sorted({int(part) for part in text.split(",")})

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in DRAFTS]:
            raise argparse.ArgumentTypeError(f"unknown draft {unknown[0]}; there are {', '.join(DRAFTS)}")
        return chosen

    parser.add_argument("--model", choices=list(SHAPES), default="moonlight", help="target, with random weights")
    parser.add_argument("--drafts", type=names, default=list(DRAFTS), metavar="NAME,...", help=", ".join(DRAFTS))
    parser.add_argument("--rows", type=numbers, metavar="N,N,...", help="decode rows (default: 1,8,32,128; CPU: 1,2)")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="of every row (default: 1024; CPU: 128)")
    parser.add_argument("--tokens", type=int, default=3, metavar="K", help="drafted a cycle (default: 3)")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="steps of each measurement (default: 6)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each time (default: 5)")
    parser.add_argument("--layers", type=int, metavar="N", help="shrink the target to N layers")
    parser.add_argument("--split", action="store_true", help="also time the stages of a cycle")
    record.add_arguments(parser)


def check(on: Variant, off: Variant) -> dict[str, Any]:
    """One step from the same state with the skip on and off: finite outputs, and how alike the drafts are.

    Returns:
        Shares of rows with the same emitted token, of equal first drafts and of all equal drafts; of the differing
        first drafts of rows with the same emitted token the largest gap in log q, and how far apart log q is.
    """
    ids, drafts, log_q = zip(*(_one_step(variant) for variant in (on, off)), strict=True)
    same_token = ids[0][:, 0] == ids[1][:, 0]
    equal = drafts[0] == drafts[1]
    # -inf on both sides, where a reduced vocabulary has no token, is no difference.
    apart = jnp.where(jnp.isfinite(log_q[0]), jnp.abs(log_q[0] - log_q[1]), 0.0).max(axis=1)
    rows = np.arange(len(equal))
    gaps = np.asarray(log_q[0][rows, drafts[0][:, 0]] - log_q[0][rows, drafts[1][:, 0]])
    return {
        "same_emitted": float(same_token.mean()),
        "same_first_draft": float(equal[:, 0].mean()),
        "same_drafts": float(equal.mean()),
        "largest_gap_of_differing": float(gaps[same_token].max(initial=0.0)),
        "largest_log_q_difference": float(np.asarray(apart)[same_token].max(initial=0.0)),
    }


def _one_step(variant: Variant) -> tuple[np.ndarray, np.ndarray, jax.Array]:
    """Emitted ids [rows, n], drafts [rows, k] and log q of the first draft [rows, V] of a step from the start.

    Requests sample, as those of which a step writes log q, and draft greedily, as in all that is timed.
    """
    lane, rows = variant.lane, variant.rows
    lane.rewind()
    with lane.sampling():
        packed = np.asarray(variant.dispatch())
    n = lane.window
    state = lane.carry[0]
    log_q = state.draft_log_q[1 : rows + 1]
    finite = np.isfinite(packed[:, 2 + n :].view(np.float32)).all() and bool(jnp.isfinite(log_q.max(axis=2)).all())
    ended = (packed[:, 0] == 0).any() or packed[:, 1].astype(np.uint8).any()
    if ended or not finite or bool(jnp.isnan(log_q).any()):
        raise RuntimeError(f"{variant.name}: a row emits nothing, has ended or is not finite")
    return packed[:, 2 : 2 + n], np.asarray(state.drafts)[1 : rows + 1], log_q[:, 0]


def time_ahead(variant: Variant, steps: int) -> float:
    """Seconds a step of `steps` steps that nobody reads."""
    variant.lane.rewind()
    for _ in range(WARMUP_STEPS):
        variant.dispatch()
    jax.block_until_ready(variant.lane.carry)
    started = time.perf_counter()
    for _ in range(steps):
        variant.dispatch()
    jax.block_until_ready(variant.lane.carry)
    return (time.perf_counter() - started) / steps


def times_read(variant: Variant, steps: int) -> tuple[list[float], float]:
    """Seconds of each of `steps` steps, read one by one, and accepted drafts a window."""
    variant.lane.rewind()
    times, accepted = [], []
    for step in range(WARMUP_STEPS + steps):
        started = time.perf_counter()
        packed = np.asarray(variant.dispatch())
        if step >= WARMUP_STEPS:
            times.append(time.perf_counter() - started)
            accepted.append(float((packed[:, 1] >> 8).mean()))
    return times, statistics.mean(accepted)


def measure(variants: Sequence[Variant], steps: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each variant of one row count, by its name."""
    ahead: dict[str, list[float]] = {v.name: [] for v in variants}
    for repeat in range(repeats):
        # Another order each time: nobody always follows the same neighbour.
        shift = repeat * len(variants) // repeats
        for variant in [*variants[shift:], *variants[:shift]]:
            ahead[variant.name].append(time_ahead(variant, steps))
    out = {name: {"ahead_ms": ms(statistics.median(t)), "spread_ms": ms(max(t) - min(t))} for name, t in ahead.items()}
    for name, times in out.items():
        print(f"{name}: {times['ahead_ms']:.3f} ms ahead", flush=True)
    for variant in variants:
        if variant.stage is Stage.WHOLE and variant.skip_dead:
            read = [times_read(variant, steps) for _ in range(READ_REPEATS)]
            out[variant.name]["read_ms"] = ms(statistics.median(t for times, _ in read for t in times))
            out[variant.name]["accepted"] = round(statistics.mean(a for _, a in read), 4)
    return out


def build_lanes(
    arguments: argparse.Namespace, rows: int, context: int, dtype: str
) -> tuple[CausalLM, list[Lane], dict[str, Any]]:
    """The target, drawn once, and a lane without a draft and one for each draft."""
    gpu = jax.devices()[0].platform == "gpu"
    mesh = mesh_of_one()
    hf = dict(SHAPES[arguments.model])
    if arguments.layers:
        hf["num_hidden_layers"] = arguments.layers
    np_dtype = np.dtype(jnp.dtype(dtype))
    model = CausalLM(read_config(hf), np_dtype)
    target = (model, *bind(model, random_params(model, mesh)))
    # Room for the case that every draft is accepted, so that no row meets its end.
    longest = context + (arguments.steps + WARMUP_STEPS + WARMUP_RUNS + 2) * (arguments.tokens + 1)
    common: dict[str, Any] = {"rows": rows, "context": context, "longest": longest, "dtype": dtype, "on_gpu": gpu}
    lane: dict[str, Any] = {"context": context, "split": arguments.split}
    lanes = [make_lane("plain", None, target, make_settings(k=0, **common), mesh, **lane)]
    for i, kind in enumerate(arguments.drafts):
        draft = declare_draft(kind, hf, model, np_dtype)
        params = draw_draft(draft, mesh, i + 1)
        lanes.append(
            make_lane(kind, (draft, params), target, make_settings(k=arguments.tokens, **common), mesh, **lane)
        )
    jax.block_until_ready([(lane.params, lane.carry) for lane in lanes])
    sizes = {lane.name: count_parameters(lane.draft) for lane in lanes if lane.draft is not None}
    return model, lanes, {"parameters": count_parameters(model), "draft_parameters": sizes}


def variants_of(lanes: Sequence[Lane], rows: int, split: bool) -> list[Variant]:
    """The plain step, whole cycles with the skip on and off, and cycles that end early.

    Up to the end of verification all drafts do the same, so the first one's lane stands for all.
    """
    plain, *drafting = lanes
    out = [Variant(plain, rows)]
    if split:
        out += [Variant(drafting[0], rows, stage=stage) for stage in (Stage.TARGET, Stage.VERIFY)]
    for lane in drafting:
        out += [Variant(lane, rows, skip_dead=skip) for skip in (True, False)]
        if split:
            out.append(Variant(lane, rows, stage=Stage.CATCH_UP))
    return out


def run(arguments: argparse.Namespace) -> int:
    gpu = jax.devices()[0].platform == "gpu"
    rows = arguments.rows or ([1, 8, 32, 128] if gpu else [1, 2])
    context = arguments.context or (1024 if gpu else 128)
    dtype = resolve_dtype(EngineConfig(), on_gpu=gpu)
    began = time.perf_counter()
    bandwidth = read_bandwidth(gpu)
    print(f"{jax.devices()[0].device_kind}: reads {bandwidth / 1e12:.3f} TB/s (sum of a large array)", flush=True)
    model, lanes, sizes = build_lanes(arguments, rows[-1], context, dtype)
    print(f"weights and caches drawn after {time.perf_counter() - began:.1f} s", flush=True)
    by_rows = {n: variants_of(lanes, n, arguments.split) for n in rows}
    everything = [variant for group in by_rows.values() for variant in group]
    compile_seconds = compile_all(everything, min(16, os.cpu_count() or 1))
    for variant in everything:
        variant.lane.rewind()
        for _ in range(WARMUP_RUNS):
            variant.dispatch()
        jax.block_until_ready(variant.lane.carry)
    print(f"compiled and warm after {time.perf_counter() - began:.1f} s", flush=True)

    page = lanes[0].settings.page_size
    kv_token_bytes = page_bytes(model.cache_specs(), page, {TENSOR_AXIS: 1}) / page
    figures = []
    for n, group in by_rows.items():
        figures.append(_row(model, lanes, group, n, context, kv_token_bytes, bandwidth, arguments))
        print(f"{n} rows measured after {time.perf_counter() - began:.1f} s", flush=True)
    result = {
        "benchmark": "cycle",
        "model": arguments.model,
        "layers": model.config.num_layers,
        **sizes,
        "dtype": dtype,
        "context": context,
        "drafted_tokens": arguments.tokens,
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "kv_bytes_per_token": kv_token_bytes,
        "read_bandwidth_bytes_per_s": bandwidth,
        "executables": len(everything),
        "compile_seconds": round(compile_seconds, 1),
        "seconds": round(time.perf_counter() - began, 1),
        "rows": figures,
    }
    print_tables(result)
    record.write(f"cycle_{arguments.model}", result, arguments)
    return 0


def _row(
    model: CausalLM,
    lanes: Sequence[Lane],
    variants: Sequence[Variant],
    n: int,
    context: int,
    kv_token_bytes: float,
    bandwidth: float,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """All figures of one row count; times in milliseconds."""
    find = {(v.lane.name, v.stage, v.skip_dead): v for v in variants}
    checks = {
        lane.name: check(find[lane.name, Stage.WHOLE, True], find[lane.name, Stage.WHOLE, False]) for lane in lanes[1:]
    }
    compiles.mark_warm()
    times = measure(variants, arguments.steps, arguments.repeats)
    after = compiles.after_warmup

    def of(lane: Lane, stage: Stage = Stage.WHOLE, skip: bool = True) -> dict[str, float]:
        return times[find[lane.name, stage, skip].name]

    plain = of(lanes[0])
    moved = traffic(model, n, context, kv_token_bytes).total
    out: dict[str, Any] = {
        "rows": n,
        "compiles_while_measuring": after,
        "plain": plain | {"floor_ms": ms(moved / bandwidth), "bytes": moved},
        "drafts": {},
    }
    page = lanes[0].settings.page_size
    for lane in lanes[1:]:
        draft: Any = lane.draft
        draft_token_bytes = page_bytes([draft.cache_spec], page, {TENSOR_AXIS: 1}) / page
        need = cycle_bytes(model, draft, n, arguments.tokens, context, kv_token_bytes, draft_token_bytes)
        on, off = of(lane), of(lane, skip=False)
        figures: dict[str, Any] = {
            "skip_on": on,
            "skip_off": off,
            "saved_ms": round(off["ahead_ms"] - on["ahead_ms"], 4),
            "times_plain": round(on["ahead_ms"] / plain["ahead_ms"], 3),
            "floor_ms": ms(sum(need.values()) / bandwidth),
            "target_bytes": need["target"],
            "draft_bytes": need["draft"],
            "check": checks[lane.name],
        }
        if arguments.split:
            ends = [of(lanes[1], Stage.TARGET), of(lanes[1], Stage.VERIFY), of(lane, Stage.CATCH_UP), on]
            figures["split_ms"] = split([end["ahead_ms"] for end in ends])
            figures["ends"] = dict(zip([s.value for s in STAGES], ends, strict=False))
        out["drafts"][lane.name] = figures
    return out


def split(ends: Sequence[float]) -> dict[str, float]:
    """Times of the stages from the times at their ends."""
    names = ("target", "verify", "catch_up", "draft_steps")
    starts = [0.0, *ends[:-1]]
    return {name: round(end - start, 4) for name, start, end in zip(names, starts, ends, strict=True)}


def print_tables(result: dict[str, Any]) -> None:
    print(
        f"{result['model']}, {result['layers']} layers, {result['dtype']}, {result['context']} tokens of context, "
        f"{result['drafted_tokens']} drafts a cycle; {result['executables']} executables in "
        f"{result['compile_seconds']} s; ms a step"
    )
    header = ["rows", "draft", "ahead", "skip off", "saved", "x plain", "read", "floor", "of ahead", "same drafts"]
    lines = []
    for row in result["rows"]:
        plain = row["plain"]
        lines.append([str(row["rows"]), "none", f"{plain['ahead_ms']:.2f}", "", "", "", *_tail(plain, plain), ""])
        for name, f in row["drafts"].items():
            lines.append(
                [
                    str(row["rows"]),
                    name,
                    f"{f['skip_on']['ahead_ms']:.2f}",
                    f"{f['skip_off']['ahead_ms']:.2f}",
                    f"{f['saved_ms']:.2f}",
                    f"{f['times_plain']:.2f}",
                    *_tail(f["skip_on"], f),
                    f"{100 * f['check']['same_drafts']:.1f} %",
                ]
            )
    print(record.table(header, lines))
    split_lines = []
    for row in result["rows"]:
        for name, f in row["drafts"].items():
            if "split_ms" in f:
                total = sum(f["split_ms"].values())
                cells = [f"{t:.2f} ({100 * t / total:.0f} %)" for t in f["split_ms"].values()]
                split_lines.append([str(row["rows"]), name, *cells, f"{total:.2f}"])
    if split_lines:
        print("where a cycle goes, skip on (catch-up: with the first draft; draft steps: the others)")
        print(record.table(["rows", "draft", "target", "verify", "catch-up", "draft steps", "cycle"], split_lines))


def _tail(times: dict[str, float], figures: dict[str, Any]) -> list[str]:
    floor = figures["floor_ms"]
    return [f"{times['read_ms']:.2f}", f"{floor:.3f}", f"{100 * floor / times['ahead_ms']:.0f} %"]
