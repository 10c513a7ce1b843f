"""`bench cycle`: what one speculative cycle costs, by draft, with the catch-up's dead-position skip on and off.

A cycle is one decode step of the engine with k drafted tokens: the target over a window of k + 1 tokens a row,
verification, the draft's catch-up over the window, k - 1 further draft steps. Weights are random and hardly any draft is
accepted: the times are those of cycles and do not depend on acceptance. Requests are prefilled by engines of the
production runner, one for plain steps and two for each draft (skip on and off), and all have the same context. The
drafts have the sizes that published ones have for such a target (bench/step/cycle_drafts.py).

- ahead: steps are dispatched one after the other and waited for once: milliseconds a step, the device's or the host's
  dispatch where that is longer. Median of repeats, between which the variants of a row count take turns; each starts
  from the same state.
- read: each step's output is read before the next step, skip on. Median of all steps.
- floor: bytes of the weights that the cycle's passes touch, each pass reading its own again, and of the KV that they
  attend to, over the read bandwidth measured in the same run.
- `--split`: where a cycle's time goes: the shares of its stages in the device time of a trace, of the time ahead.

Before anything is timed, sampling requests run one step from the same state with the skip on and off: outputs must be
finite, and the share of equal drafts is reported. The skip changes shapes and so rounding: in bfloat16, near-ties fall
either way.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.harness import models, record
from bench.harness.arguments import names_among, numbers
from bench.harness.ceilings import read_bandwidth
from bench.harness.models import SHAPES, Weights, mesh_of_one
from bench.harness.timing import ms
from bench.step.cycle_drafts import DRAFTS, declare_draft, drafts_for, draw_draft
from bench.step.cycle_report import print_tables
from bench.step.engines import build_engine, executables, warm_up
from bench.step.floor import Floor
from bench.step.load import Load
from bench.step.sizes import Sizes, default_budget
from bench.step.stages import split, stage_shares
from jaxspec.compat import compiles
from jaxspec.config import EngineConfig, np_dtype, resolve_dtype
from jaxspec.engine.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.models.params import count_parameters
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.rejection import log_probability

READ_REPEATS = 2
PLAIN = "plain"
# The steps of sampling requests write q, and greedy drafts are compared more sharply than drawn ones.
SAMPLING = SamplingParams(temperature=1, greedy_drafts=True, max_tokens=None, ignore_eos=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="moonlight", help="target, with random weights")
    parser.add_argument(
        "--drafts",
        type=names_among(DRAFTS, "draft"),
        metavar="NAME,...",
        help=f"{', '.join(DRAFTS)} (default: those that the target may have)",
    )
    parser.add_argument("--rows", type=numbers, metavar="N,N,...", help="decode rows (default: 1,8,32,128; CPU: 1,2)")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="of every row (default: 1024; CPU: 128)")
    parser.add_argument("--tokens", type=int, default=3, metavar="K", help="drafted a cycle (default: 3)")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="steps of each measurement (default: 6)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each time (default: 5)")
    parser.add_argument("--layers", type=int, metavar="N", help="shrink the target to N layers")
    parser.add_argument("--split", action="store_true", help="also tell where a cycle's time goes")
    record.add_arguments(parser)


@dataclass(frozen=True)
class Variant:
    """Plain steps, or the cycles of a draft with the skip on or off."""

    draft: str
    skip_dead: bool = True

    @property
    def name(self) -> str:
        how = "" if self.draft == PLAIN else ", skip on" if self.skip_dead else ", skip off"
        return f"{self.draft}{how}"


def draw_weights(arguments: argparse.Namespace, dtype: np.dtype) -> dict[str, Weights]:
    """The target, drawn once, without a draft and with each."""
    mesh = mesh_of_one()
    hf = models.random_config(arguments.model, arguments.layers)
    plain = dataclasses.replace(models.draw(hf, mesh, dtype), draft=None)
    out = {PLAIN: plain}
    for i, kind in enumerate(arguments.drafts):
        draft = declare_draft(kind, hf, plain.model, dtype)
        out[kind] = dataclasses.replace(plain, draft=(draft, draw_draft(draft, mesh, i + 1)))
    jax.block_until_ready([(each.params, each.draft and each.draft[1]) for each in out.values()])
    return out


def build_engines(weights: Mapping[str, Weights], sizes: Sizes, dtype: str) -> dict[Variant, Engine]:
    """Of plain steps, and of each draft with the skip on and off; nothing is compiled yet."""
    mesh = mesh_of_one()
    variants = [Variant(PLAIN), *(Variant(draft, on) for draft in weights if draft != PLAIN for on in (True, False))]
    return {
        v: build_engine(
            weights[v.draft], sizes, 0 if v.draft == PLAIN else sizes.tokens, mesh, dtype=dtype, lean=True,
            skip_dead=v.skip_dead,
        )
        for v in variants
    }  # fmt: skip


def check(on: Load, off: Load, rows: int) -> dict[str, Any]:
    """One step from the same state with the skip on and off: finite outputs, and how alike the drafts are.

    Returns:
        Shares of rows with the same emitted token, of equal first drafts and of all equal drafts; of the differing
        first drafts of rows with the same emitted token the largest gap in log q, and how far apart log q is.
    """
    ids, drafts, log_q = zip(*(_one_step(load, rows) for load in (on, off)), strict=True)
    same_token = ids[0] == ids[1]
    equal = drafts[0] == drafts[1]
    # -inf on both sides, where a reduced vocabulary has no token, is no difference.
    apart = jnp.where(jnp.isfinite(log_q[0]), jnp.abs(log_q[0] - log_q[1]), 0.0).max(axis=1)
    each = np.arange(rows)
    gaps = np.asarray(log_q[0][each, drafts[0][:, 0]] - log_q[0][each, drafts[1][:, 0]])
    return {
        "same_emitted": float(same_token.mean()),
        "same_first_draft": float(equal[:, 0].mean()),
        "same_drafts": float(equal.mean()),
        "largest_gap_of_differing": float(gaps[same_token].max(initial=0.0)),
        "largest_log_q_difference": float(np.asarray(apart)[same_token].max(initial=0.0)),
    }


def _one_step(load: Load, rows: int) -> tuple[np.ndarray, np.ndarray, jax.Array]:
    """First emitted ids [rows], drafts [rows, k] and log q of the first draft [rows, V] of a step from the start."""
    load.rewind()
    load.select(rows)
    outputs = {out.request_id: out for out in load.step()}
    told = [outputs[request.id] for request in load.requests[:rows]]
    slots = jnp.array(load.slots[:rows])
    state = load.runner.state
    log_q = log_probability(state.draft_logits[slots], SAMPLING.temperature, state.draft_log_z[slots][..., None])
    finite = all(np.isfinite(out.new_logprobs).all() for out in told) and bool(jnp.isfinite(log_q.max(axis=2)).all())
    if not finite or bool(jnp.isnan(log_q).any()):
        raise RuntimeError("an output is not finite")
    return (
        np.array([out.new_ids[0] for out in told]),
        np.asarray(load.runner.state.drafts)[load.slots[:rows]],
        log_q[:, 0],
    )


def check_all(engines: Mapping[Variant, Engine], sizes: Sizes) -> dict[tuple[str, int], dict[str, Any]]:
    """The check of each draft and row count, with sampling requests, which are ended again."""
    checks = {}
    for draft in dict.fromkeys(v.draft for v in engines if v.draft != PLAIN):
        on, off = (
            Load(engines[Variant(draft, skip)], sizes.rows[-1], sizes.context, params=SAMPLING)
            for skip in (True, False)
        )
        for rows in sizes.rows:
            checks[draft, rows] = check(on, off, rows)
        on.close()
        off.close()
    return checks


def measure(loads: Mapping[Variant, Load], rows: int, steps: int, repeats: int) -> dict[Variant, dict[str, float]]:
    """Milliseconds of each variant at one row count."""
    ahead: dict[Variant, list[float]] = {variant: [] for variant in loads}
    variants = list(loads)
    for variant in variants:
        loads[variant].time_ahead((rows,), 1)  # warm
    for repeat in range(repeats):
        # Another order each time, so that none always follows the same neighbour.
        shift = repeat * len(variants) // repeats
        for variant in [*variants[shift:], *variants[:shift]]:
            ahead[variant].append(loads[variant].time_ahead((rows,), steps).step)
    out = {v: {"ahead_ms": ms(statistics.median(t)), "spread_ms": ms(max(t) - min(t))} for v, t in ahead.items()}
    for variant, times in out.items():
        print(f"{variant.name}, {rows} rows: {times['ahead_ms']:.3f} ms ahead", flush=True)
    for variant, load in loads.items():
        if variant.skip_dead:
            out[variant] |= read_times(load, rows, steps)
    return out


def read_times(load: Load, rows: int, steps: int) -> dict[str, float]:
    """Milliseconds of steps that are read one by one, and accepted drafts a window."""
    before = load.engine.stats().acceptance
    seconds = statistics.median(load.times_reading((rows,), steps)[rows] for _ in range(READ_REPEATS))
    after = load.engine.stats().acceptance
    accepted = 0.0
    if before and after:
        windows = after.num_steps - before.num_steps
        accepted = (sum(after.accepted_per_position) - sum(before.accepted_per_position)) / windows
    return {"read_ms": ms(seconds), "accepted": round(accepted, 4)}


def row_figures(
    times: Mapping[Variant, dict[str, float]],
    floors: Mapping[str, Floor],
    checks: Mapping[str, Any],
    sizes: Sizes,
    n: int,
) -> dict[str, Any]:
    """All figures of one row count but those of a trace; times in milliseconds."""
    plain, floor = times[Variant(PLAIN)], floors[PLAIN]
    moved = floor.of_step(n, sizes.context).total
    drafts = {}
    for name, check_of_draft in checks.items():
        on, off = times[Variant(name)], times[Variant(name, skip_dead=False)]
        need = floors[name].of_cycle(n, sizes.tokens, sizes.context)
        drafts[name] = {
            "skip_on": on,
            "skip_off": off,
            "saved_ms": round(off["ahead_ms"] - on["ahead_ms"], 4),
            "times_plain": round(on["ahead_ms"] / plain["ahead_ms"], 3),
            "floor_ms": ms(floors[name].seconds(sum(need.values()))),
            "target_bytes": need["target"],
            "draft_bytes": need["draft"],
            "check": check_of_draft,
        }
    return {"plain": plain | {"floor_ms": ms(floor.seconds(moved)), "bytes": moved}, "drafts": drafts}


def run(arguments: argparse.Namespace) -> int:
    gpu = jax.devices()[0].platform == "gpu"
    dtype = resolve_dtype(EngineConfig(), on_gpu=gpu)
    able = drafts_for(models.random_config(arguments.model))
    if not able:
        raise ConfigError(f"--model {arguments.model}: no sizes of a draft are known for it")
    arguments.drafts = arguments.drafts or able
    if unable := [kind for kind in arguments.drafts if kind not in able]:
        raise ConfigError(f"--drafts {unable[0]}: {arguments.model} may have {', '.join(able)}")
    began = time.perf_counter()

    def told(what: str) -> None:
        print(f"{what} after {time.perf_counter() - began:.1f} s", flush=True)

    bandwidth = read_bandwidth(gpu)
    print(f"{jax.devices()[0].device_kind}: reads {bandwidth / 1e12:.3f} TB/s (sum of a large array)", flush=True)
    sizes = Sizes(
        rows=tuple(arguments.rows or ([1, 8, 32, 128] if gpu else [1, 2])),
        context=arguments.context or (1024 if gpu else 128),
        steps=arguments.steps,
        loops=(1, 1),
        budget=default_budget(gpu),
        tokens=arguments.tokens,
    )
    weights = draw_weights(arguments, np_dtype(dtype))
    told("weights drawn")
    engines = build_engines(weights, sizes, dtype)
    compiling = time.perf_counter()
    warm_up({variant.name: engine for variant, engine in engines.items()})
    compile_seconds = time.perf_counter() - compiling
    checks = check_all(engines, sizes)
    loads = {variant: Load(engine, sizes.rows[-1], sizes.context) for variant, engine in engines.items()}
    told("compiled, checked and prefilled")

    floors = {name: Floor(each, bandwidth) for name, each in weights.items()}
    rows = []
    for n in sizes.rows:
        compiles.mark_warm()
        times = measure(loads, n, arguments.steps, arguments.repeats)
        after = compiles.after_warmup
        of_drafts = {name: checks[name, n] for name in arguments.drafts}
        rows.append({"rows": n, "compiles_while_measuring": after} | row_figures(times, floors, of_drafts, sizes, n))
        told(f"{n} rows measured")
    result: dict[str, Any] = {
        "benchmark": "cycle",
        "model": arguments.model,
        "layers": weights[PLAIN].model.config.num_layers,
        "parameters": count_parameters(weights[PLAIN].model),
        "draft_parameters": {name: count_parameters(each.draft[0]) for name, each in weights.items() if each.draft},
        "dtype": dtype,
        "context": sizes.context,
        "drafted_tokens": sizes.tokens,
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "kv_bytes_per_token": floors[PLAIN].kv_token,
        "read_bandwidth_bytes_per_s": bandwidth,
        **executables(engines.values()),
        "compile_seconds": round(compile_seconds, 1),
        "rows": rows,
    }

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - began, 1)
        record.write(f"cycle_{arguments.model}", result, arguments)

    if arguments.split:
        save()  # before tracing, which may crash the process
        add_splits(rows, loads)
    save()
    print_tables(result)
    return 0


def add_splits(rows: Iterable[dict[str, Any]], loads: Mapping[Variant, Load]) -> None:
    """Adds to each draft's figures the time of its stages, skip on. Traces: after all timing."""
    for row in rows:
        for name, figures in row["drafts"].items():
            parts = stage_shares(loads[Variant(name)], row["rows"])
            figures["split_ms"] = split(figures["skip_on"]["ahead_ms"], parts)
