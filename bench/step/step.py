"""`bench step`: what a decode step and a speculative cycle cost, beside the bytes that they must read.

The production runner, its compiled buckets and the real scheduler run requests whose prompts were really prefilled.
Plain steps and cycles of k drafted tokens (MTP) run in two engines that share the weights. Each row count is measured
alone, and in turn with a second one that uses another bucket, as under a server's load: replaying graphs may cost more
when executables take turns.

- step: wall time of a step in the engine's own loop, where a step's tokens are read while the next one runs (readout
  depth 1, unless `--readout-depth` sets more). Alternating: the same with two row counts in turn; a step's time is that
  from when the step before was read to when it was read itself. Plain loops have 128 steps and cycles 64, so that
  contexts grow as those of `bench step_vllm` do.
- read: plan, dispatch and wait for the tokens of every step (readout depth 0), one step at a time.
- ahead: steps are dispatched one after the other and waited for once: the device's time, or the host's dispatch where
  that is longer.
- dispatch: time of `Runner.dispatch` while the device is busy with earlier steps.
- prefill: prompt tokens a second until all of as many new requests have their first token.
- kernels: of a step, and for each layer that it runs (a cycle's draft layer k times), from a trace on a GPU.
- memory: bytes of weights, state and KV on each device, as declared (`bench plan` computes the same) and as they lie there.
- expected: on H200s in bfloat16, what `bench plan` expects of a step or cycle.

Random weights are drawn on the devices, each one's part there: nothing of them is on a disk or in the host's memory.
With random weights hardly any draft is accepted. The times are those of steps, whether drafts are accepted or not.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bench.harness import models, record
from bench.harness.arguments import numbers
from bench.harness.ceilings import read_bandwidth
from bench.harness.device_bytes import declared_bytes, held_bytes
from bench.harness.models import SHAPES, Weights
from bench.harness.timing import ms
from bench.harness.trace import keep_graphs
from bench.step import predict
from bench.step.engines import build_engine, executables, warm_up
from bench.step.experts import touched_experts
from bench.step.floor import Floor, routed_experts
from bench.step.gates import add_peers, gates, read_peers
from bench.step.load import Kernels, Load, prefill_seconds
from bench.step.prompt_steps import prompt_steps
from bench.step.report import print_tables
from bench.step.sizes import Sizes, choose_sizes
from jaxspec.compat import compiles
from jaxspec.config import EngineConfig, np_dtype, resolve_dtype
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import state_shapes
from jaxspec.errors import ConfigError
from jaxspec.loading.engine import check_fp8_cache, check_fp8_kernels
from jaxspec.loading.mesh import make_mesh
from jaxspec.models.cache import KVCacheDtype, cache_stored_as
from jaxspec.models.mtp import NextN
from jaxspec.models.params import TENSOR_AXIS, count_parameters, num_ranks, schemes_of, with_shardings
from pallas_kernels.backend import REFERENCES, Backends

# Below the number of steps (32) that jax lets a host run ahead of its device: past it, dispatch waits for the device.
BURST = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="demo", help=f"demo, {', '.join(SHAPES)} (random weights), or a model folder"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="K", help="drafted a cycle; 0: no cycles (default: 3 if there is an MTP layer)"
    )
    parser.add_argument(
        "--rows", type=numbers, metavar="N,N,...", help="decode rows (default: 1,4,16,32,64,128; CPU: 1,4)"
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="prompt length (default: 1024; CPU: 128)")
    parser.add_argument(
        "--steps", type=int, default=BURST, metavar="N", help="read and ahead: steps of each, at least 4"
    )
    parser.add_argument(
        "--loop", type=int, metavar="N", help="steps of the engine's loop (default: 128, of cycles 64; CPU: 16)"
    )
    parser.add_argument(
        "--readout-depth", type=int, choices=[1, 2, 3], default=1, help="of the engine's loop: how late steps are read"
    )
    parser.add_argument(
        "--prefill-budget", type=int, metavar="TOKENS", help="max_num_batched_tokens (default: 8192; CPU: 256)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="shrink a random model to N layers")
    add_storage_arguments(parser)
    add_layout_arguments(parser)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument(
        "--lean",
        action="store_true",
        help="compile only what is measured: a bucket for each row count, and one for prompts",
    )
    parser.add_argument("--no-expert-count", action="store_true", help="do not count the experts that steps touch")
    parser.add_argument(
        "--peer", type=Path, nargs="+", default=[], metavar="FILE", help="results of bench step_vllm to compare with"
    )
    record.add_arguments(parser)


def add_storage_arguments(parser: argparse.ArgumentParser) -> None:
    """What a random model's weights and KV are stored as."""
    parser.add_argument(
        "--quantization",
        choices=["bf16", "fp8", "int4"],
        default="bf16",
        help="of a random model, as `jaxspec convert` has it",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=["auto", "bf16", "fp8"], default="auto", help="as `jaxspec serve` has it"
    )


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Over how many devices."""
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="devices that share the model (default: 1)",
    )
    parser.add_argument(
        "--data-parallel-size",
        "-dp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share the rows, and the experts over all devices (default: 1); their floors are not computed",
    )


def load_weights(
    model: str, layers: int | None, mesh: Mesh, dtype: np.dtype, *, quantization: str, kv_cache_dtype: KVCacheDtype
) -> Weights:
    """Raises:

    ConfigError: a folder, whose weights are what they are, is to have other layers or another quantisation.
    """
    models.check_layers(model, layers)
    if model in SHAPES:
        hf = models.random_config(model, layers)
        stored: dict[str, Any] = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
        weights = models.draw(hf, mesh, dtype, **stored)
    elif quantization != "bf16":
        raise ConfigError(
            f"--quantization {quantization} is for random models: convert {model} with "
            "jaxspec convert --quantization, and name the copy"
        )
    else:
        weights = models.load(model, mesh, dtype)
    modules: list[Any] = [weights.model, *(weights.draft[:1] if weights.draft else ())]
    for module in modules:
        cache_stored_as(module, kv_cache_dtype)
    if kv_cache_dtype == "fp8":
        check_fp8_cache(weights.model.cache_specs())
        if jax.devices()[0].platform == "gpu":
            check_fp8_kernels(modules, dtype.name, Backends())
    return weights


def run(arguments: argparse.Namespace) -> int:
    keep_graphs()
    gpu = jax.devices()[0].platform == "gpu"
    mesh = make_mesh(arguments.tensor_parallel_size, arguments.data_parallel_size)
    dtype = resolve_dtype(EngineConfig(dtype=arguments.dtype), on_gpu=gpu)
    bandwidth = read_bandwidth(gpu)
    print(f"{jax.devices()[0].device_kind}: reads {bandwidth / 1e12:.3f} TB/s (sum of a large array)", flush=True)
    began = time.perf_counter()
    weights = load_weights(
        arguments.model,
        arguments.layers,
        mesh,
        np_dtype(dtype),
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    jax.block_until_ready((weights.params, weights.draft and weights.draft[1]))
    load_seconds = time.perf_counter() - began
    print(f"weights on the device in {load_seconds:.1f} s", flush=True)
    sizes = choose_sizes(arguments, gpu=gpu, has_draft=weights.draft is not None)
    peers = read_peers(arguments.peer, tokens=sizes.tokens, context=sizes.context)

    engines = {
        k: build_engine(weights, sizes, k, mesh, dtype=dtype, lean=arguments.lean) for k in sorted({0, sizes.tokens})
    }
    bucket_seconds = warm_up({kind(k): engine for k, engine in engines.items()})
    kernels = {kind(k): {op: sorted(ran) for op, ran in engine.runner.kernels.items()} for k, engine in engines.items()}
    check_quantised_kernels(weights, kernels, gpu=gpu)
    memory = {kind(k): memory_figures(weights, engine, k, mesh) for k, engine in engines.items()}
    prefill = {k: {n: prefill_seconds(engine, n, sizes.context) for n in sizes.rows} for k, engine in engines.items()}
    loads = {
        k: Load(engine, sizes.rows[-1], sizes.context, depth=arguments.readout_depth) for k, engine in engines.items()
    }
    print(f"prefilled after {time.perf_counter() - began:.1f} s", flush=True)

    ranks = num_ranks(mesh)
    floors = Floor(weights, bandwidth, mesh.size) if ranks == 1 else None
    rows: list[dict[str, Any]] = []
    for n in sizes.rows:
        figures = {"rows": n} | _measure(loads[0], sizes, n, floors)
        rows.append(figures | {"prefill_tokens_per_s": round(n * sizes.context / prefill[0][n])})
        if sizes.tokens:
            cycle = _measure_cycle(loads[sizes.tokens], sizes, n, floors)
            rows[-1]["cycle"] = cycle | {"prefill_tokens_per_s": round(n * sizes.context / prefill[sizes.tokens][n])}
        print(f"{n} rows: {figures['step_ms']} ms, cycle {rows[-1].get('cycle', {}).get('step_ms')} ms", flush=True)
    if "H200" in jax.devices()[0].device_kind and dtype == "bfloat16" and ranks == 1:
        add_expected(rows, weights, sizes, mesh.size)
    after_warm_up = compiles.after_warmup
    add_peers(rows, peers)

    result: dict[str, Any] = {
        "benchmark": "step",
        # A folder by its name: where it lies does not matter to a record.
        "model": Path(arguments.model).name,
        "layers": weights.model.config.num_layers,
        "parameters": count_parameters(weights.model),
        "dtype": dtype,
        "quantization": models.quantization_of(weights),
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "tensor_parallel_size": mesh.shape[TENSOR_AXIS],
        "data_parallel_size": ranks,
        "memory_of_a_device": memory,
        "implementations": kernels,
        "context": sizes.context,
        "drafted_tokens": sizes.tokens,
        "steps": sizes.steps,
        "readout_depth": arguments.readout_depth,
        "loop_steps": {kind(k): sizes.loop(k) for k in engines},
        "max_num_batched_tokens": {kind(k): engine.settings.max_num_batched_tokens for k, engine in engines.items()},
        "kv_bytes_per_token": floors.kv_token if floors else None,
        "read_bandwidth_bytes_per_s": bandwidth,
        **executables(engines.values()),
        "load_seconds": round(load_seconds, 1),
        "seconds_until_bucket_was_ready": bucket_seconds,
        "compiles_after_warm_up": after_warm_up,
        "peers": {name: {key: value for key, value in peer.items() if key != "rows"} for name, peer in peers.items()},
        "gates": gates(rows),
        "rows": rows,
    }

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - began, 1)
        record.write(f"step_{models.as_recorded(arguments.model)}", result, arguments)

    if gpu:
        save()  # before tracing, which may crash the process
        for k, load in loads.items():
            for row in rows:
                traced = _kernel_figures(load.kernels(row["rows"]), weights.model.config.num_layers + k)
                (row["cycle"] if k else row).update(traced)
        result["gates"] = gates(rows)
    if routed_experts(weights.model.config) and not arguments.no_expert_count and ranks == 1:
        counts = touched_experts(loads[0], weights, mesh, sizes.rows, sizes.steps)
        for row in rows:
            count = counts[row["rows"]]
            row["experts_touched_measured"] = round(count, 2)
            if floors:
                moved = floors.of_step(row["rows"], sizes.context + (sizes.steps + 1) / 2, count)
                row["floor_of_touched_ms"] = ms(floors.seconds(moved.total))
    vocab_size = weights.model.config.vocab_size
    result["prompt_steps"] = {kind(k): prompt_steps(engine, vocab_size, sizes.context) for k, engine in engines.items()}
    save()
    print_tables(result)
    return 0 if all(gate["met"] for gate in result["gates"]) else 1


def add_expected(rows: Sequence[dict[str, Any]], weights: Weights, sizes: Sizes, devices: int) -> None:
    """Adds to steps, and to cycles of `predict.DRAFTED` tokens, the milliseconds that `bench plan` expects of H200s."""
    expected = predict.steps(weights.model, sizes.rows, sizes.context, devices)
    draft, cycles = weights.draft[0] if weights.draft else None, {}
    if isinstance(draft, NextN) and sizes.tokens == predict.DRAFTED:
        cycles = predict.cycles(weights.model, draft, sizes.rows, sizes.context, devices)
    for row in rows:
        row["expected_ms"] = ms(expected[row["rows"]].seconds)
        if row["rows"] in cycles:
            row["cycle"]["expected_ms"] = ms(cycles[row["rows"]].seconds)


def check_quantised_kernels(weights: Weights, kernels: dict[str, dict[str, list[str]]], *, gpu: bool) -> None:
    """Raises:

    ConfigError: on a GPU a step dequantises weights in plain XLA, which writes them out every time.
    """
    plain = {op for ran in kernels.values() for op in ("moe", "mlp") if {*REFERENCES} & {*ran.get(op, ())}}
    if gpu and schemes_of(weights.model) and plain:
        raise ConfigError(
            f"no kernel here reads the quantised weights of {' and '.join(sorted(plain))}: use --quantization bf16, for a "
            "folder that of jaxspec convert"
        )


def memory_figures(weights: Weights, engine: Engine, k: int, mesh: Mesh) -> dict[str, int]:
    """Bytes on each device, and the most that lie on one: of the weights that an engine's steps read, and of its state."""
    drafts = [weights.draft] if weights.draft and k else []
    modules: list[Any] = [weights.model, *(module for module, _ in drafts)]
    arrays = jax.tree.leaves([weights.params, *(params for _, params in drafts)])
    state = jax.tree.leaves(engine.runner.state)
    return {
        "weights_declared": sum(declared_bytes(with_shardings(module, mesh).values()) for module in modules),
        "weights_held": max(held_bytes(arrays).values()),
        "state_declared": declared_bytes(
            jax.tree.leaves(state_shapes(weights.model, engine.settings, mesh, draft=drafts[0][0] if drafts else None))
        ),
        "state_held": max(held_bytes(state).values()),
    }


def kind(k: int) -> str:
    """What records call an engine that drafts k tokens."""
    return "cycle" if k else "plain"


def _partner(load: Load, sizes: Sizes, n: int) -> int:
    """The nearest row count with another bucket; n itself where there is none."""
    others = [m for m in sizes.rows if load.bucket(m) != load.bucket(n)]
    return min(others, key=lambda m: abs(m - n)) if others else n


def _loops(load: Load, sizes: Sizes, n: int, partner: int) -> dict[str, Any]:
    """Of the engine's own loop."""
    steps = sizes.loop(load.runner.window - 1)
    alone = load.time_loop(n, steps)
    span, host = load.times_alternating((n, partner) if partner != n else (n,), steps)[n]
    return {
        "step_ms": ms(alone.seconds),
        "of_each_run_ms": [ms(t) for t in alone.of_each_run],
        "step_alternating_ms": ms(span),
        "plan_and_dispatch_alternating_ms": ms(host),
        "tokens_a_step": round(alone.tokens, 4),
    }


def _measure(load: Load, sizes: Sizes, n: int, floors: Floor | None) -> dict[str, Any]:
    """The figures of plain steps of one row count; times in milliseconds."""
    partner, steps = _partner(load, sizes, n), sizes.steps
    order = (n, partner) if partner != n else (n,)
    loops = _loops(load, sizes, n, partner)
    reading = load.times_reading(order, steps)[n]
    alone, pair = load.times_ahead((n,), steps), load.times_ahead(order, steps)
    partner_alone = load.times_ahead((partner,), steps) if partner != n else alone
    figures = {
        "bucket": str(load.bucket(n)),
        "partner_rows": partner,
        **loops,
        "step_read_ms": ms(reading),
        "step_ahead_ms": ms(alone.step),
        "step_ahead_alternating_ms": ms(pair.step),
        "step_ahead_same_two_apart_ms": ms((alone.step + partner_alone.step) / 2),
        "dispatch_ms": ms(alone.dispatch),
        "dispatch_alternating_ms": ms(pair.dispatch),
        "plan_ms": ms(pair.plan),
    }
    if floors is None:
        return figures
    moved = floors.of_step(n, sizes.context + (steps + 1) / 2)
    floor = floors.seconds(moved.total)
    return figures | {
        "weight_bytes": moved.weights,
        "kv_bytes": moved.kv,
        "state_bytes": moved.state,
        "experts_touched_expected": round(moved.experts, 2),
        "floor_ms": ms(floor),
        "floor_share_read": round(floor / reading, 4),
        "floor_share_ahead": round(floor / alone.step, 4),
    }


def _measure_cycle(load: Load, sizes: Sizes, n: int, floors: Floor | None) -> dict[str, Any]:
    """The figures of cycles of one row count: fewer than of plain steps."""
    loops = _loops(load, sizes, n, _partner(load, sizes, n))
    ahead = load.times_ahead((n,), sizes.steps)
    figures = {
        "bucket": str(load.bucket(n)),
        **loops,
        "step_ahead_ms": ms(ahead.step),
        "dispatch_ms": ms(ahead.dispatch),
        "plan_ms": ms(ahead.plan),
    }
    if floors is None:
        return figures
    need = floors.of_cycle(n, sizes.tokens, sizes.context + (sizes.loop(sizes.tokens) + 1) / 2)
    floor = floors.seconds(sum(need.values()))
    return figures | {
        "target_bytes": need["target"],
        "draft_bytes": need["draft"],
        "floor_ms": ms(floor),
        "floor_share_step": round(floor / (1e-3 * loops["step_ms"]), 4),
    }


def _kernel_figures(kernels: Kernels, layers: int) -> dict[str, float]:
    """Nothing where the trace is empty: jax leaves out what is larger than 2 GB, as with the steps of a whole server."""
    if not kernels.count:
        print("no kernels in the trace: it may be too large, which --lean prevents", flush=True)
        return {}
    return {
        "kernels": kernels.count,
        "kernels_per_layer": round(kernels.count / layers, 2),
        "launches": kernels.launches,
        "kernels_ms": ms(kernels.seconds),
    }
