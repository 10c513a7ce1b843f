"""`bench step`: what a decode step and a speculative cycle cost, beside the bytes that they must read.

The production runner, its compiled buckets and the real scheduler run requests whose prompts were really prefilled.
Plain steps and cycles of k drafted tokens (MTP) run in two engines that share the weights. Every row count is measured
alone and in turn with a second one that uses another bucket, as a server's load makes it do: graph replay may cost more
when executables take turns.

- step: the engine's own loop, in which a step's tokens are read while the next one runs (readout depth 1, unless
  `--readout-depth` says more): wall time of a step. Alternating: the same with two row counts in turn; a step's time is
  what passes between the moments at which the step before was read and at which it was. Plain loops have 128 steps and
  cycles 64, so that contexts grow as those do that `bench step_vllm` measures.
- read: plan, dispatch and wait for the tokens of every step (readout depth 0), one step at a time.
- ahead: steps are dispatched one behind the other and waited for once, so this is the device's time, or the host's
  dispatch where that is longer.
- dispatch: time of `Runner.dispatch` while the device is busy with earlier steps.
- prefill: prompt tokens a second until every one of as many new requests has its first token.
- kernels: of a step, and for each layer that it runs (a cycle's draft layer k times), from a trace on a GPU.

With random weights next to no draft is accepted. Times are those of steps, whatever was.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bench.harness import record
from bench.harness.trace import keep_graphs
from bench.step import weights as step_weights
from bench.step.floor import Traffic, cycle_bytes, routed_experts, traffic
from bench.step.gates import add_peers, gates, read_peers
from bench.step.load import WARMUP_STEPS, Kernels, Load, prefill_seconds
from bench.step.step_vllm import CONTEXT, DRAFTED, OUTPUT_TOKENS, ROWS
from bench.step.weights import Weights
from jaxspec.compat import compiles
from jaxspec.config import PAGE_SIZE, EngineConfig, Settings, np_dtype, pages_for, resolve, resolve_dtype
from jaxspec.engine.buckets import Bucket, bucket_table, choose_bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.runner import Runner
from jaxspec.errors import ConfigError
from jaxspec.models import moe
from jaxspec.models.cache import page_bytes
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import TENSOR_AXIS, count_parameters
from pallas_kernels.moe.api import route_sigmoid, route_softmax

SHAPES: dict[str, dict[str, Any]] = {
    # Moonlight-16B-A3B, from its config.json.
    "moonlight": {
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163840, "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "intermediate_size": 11264, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 50000.0,
        "num_nextn_predict_layers": 1,
    },
    "tiny": {
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": None,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 10000.0,
        "num_nextn_predict_layers": 1,
    },
}  # fmt: skip

DEFAULT_TOKENS = DRAFTED["mtp"]
# Below the number of steps (32) that jax lets a host run ahead of its device: past it, dispatch waits for the device.
BURST = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def numbers(text: str) -> list[int]:
        return sorted({int(part) for part in text.split(",")})

    parser.add_argument("--model", default="demo", help="demo, moonlight, tiny (random weights), or a model folder")
    parser.add_argument(
        "--tokens", type=int, metavar="K", help="drafted a cycle; 0: no cycles (default: 3 where there is a MTP layer)"
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
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument(
        "--lean",
        action="store_true",
        help="compile only what is measured: a lean bucket a row count, and one for prompts",
    )
    parser.add_argument(
        "--no-expert-count", action="store_true", help="do not count the experts that steps really touch"
    )
    parser.add_argument(
        "--peer", type=Path, nargs="+", default=[], metavar="FILE", help="results of bench step_vllm to stand beside"
    )
    record.add_arguments(parser)


def read_bandwidth(gpu: bool) -> float:
    """Bytes a second of a sum over an array much larger than any cache."""
    count = 2**30 if gpu else 2**25
    array = jax.jit(lambda: jnp.arange(count, dtype=jnp.float32))()
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(8):
            out = total(array)
        out.block_until_ready()
        times.append((time.perf_counter() - started) / 8)
    return array.nbytes / statistics.median(times)


def touched_experts(load: Load, params: dict, model: CausalLM, rows: Sequence[int]) -> dict[int, float]:
    """Distinct experts that a step's live rows really reach, mean over the layers.

    Counted in an executable of its own, whose router also reports to the host, from the load's state (used up).
    """
    seen: list[np.ndarray] = []
    routed_experts = moe.routed_experts

    def reporting(
        x: Any, gate_up: Any, down: Any, logits: Any, bias: Any, live: Any, *more: Any, **routing: Any
    ) -> Any:
        route = route_softmax(logits, **routing) if bias is None else route_sigmoid(logits, bias, **routing)
        jax.debug.callback(lambda got: seen.append(np.asarray(got)), route[1])
        return routed_experts(x, gate_up, down, logits, bias, live, *more, **routing)

    load.rewind()
    runner = Runner(model, params, load.engine.settings, load.runner._mesh, buckets=(load.bucket(max(rows)),))
    moe.routed_experts = reporting  # type: ignore[attr-defined]
    try:
        runner.warm_up()
    finally:
        moe.routed_experts = routed_experts  # type: ignore[attr-defined]
    runner.state = load.runner.state
    counts = {}
    for n in rows:
        load.select(n)
        plan = load.scheduler.plan()
        assert plan is not None
        jax.effects_barrier()
        seen.clear()
        runner.dispatch(plan)
        for request, token in zip(plan.decode, runner.read().ids[:, 0], strict=True):
            request.tokens.append(int(token))
        jax.effects_barrier()
        counts[n] = statistics.mean(len(np.unique(ids[:n])) for ids in seen)
    return counts


def mesh_of_one() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run.

    Attributes:
        rows: ascending row counts; context: tokens of each prompt.
        steps: of `read` and `ahead`; loops: of the engine's own loop, of plain steps and of cycles.
        budget: tokens of a step.
        tokens: drafted a cycle; 0 for none.
    """

    rows: tuple[int, ...]
    context: int
    steps: int
    loops: tuple[int, int]
    budget: int
    tokens: int

    def loop(self, k: int) -> int:
        return self.loops[k > 0]

    def longest(self, k: int, budget: int) -> int:
        """Most tokens that a request may come to have, if every draft were accepted."""
        most_rows = self.rows[-1]
        # The first requests decode while the last ones prefill; measurements start again from the prompts.
        filling = -(-most_rows * self.context // (budget - most_rows * (k + 1))) + most_rows
        decoding = max(2 * (self.steps + WARMUP_STEPS), self.loop(k) + 2 * WARMUP_STEPS)
        return self.context + (max(filling, decoding) + 2) * (k + 1) + PAGE_SIZE


def choose_sizes(arguments: argparse.Namespace, *, gpu: bool, has_draft: bool) -> Sizes:
    tokens = arguments.tokens
    if tokens is None:
        tokens = DEFAULT_TOKENS if has_draft else 0
    if tokens and not has_draft:
        raise ConfigError(f"--tokens {tokens}: {arguments.model} has no MTP layer that could draft; use --tokens 0")
    loops = (OUTPUT_TOKENS["plain"], OUTPUT_TOKENS["mtp"]) if gpu else (16, 16)
    return Sizes(
        rows=tuple(arguments.rows or (ROWS if gpu else (1, 4))),
        context=arguments.context or (CONTEXT if gpu else 128),
        steps=max(arguments.steps, 4),
        loops=(arguments.loop, arguments.loop) if arguments.loop else loops,
        budget=arguments.prefill_budget or (8192 if gpu else 256),
        tokens=tokens,
    )


def load_weights(arguments: argparse.Namespace, mesh: Mesh, dtype: np.dtype) -> Weights:
    if arguments.model not in SHAPES:
        return step_weights.load(arguments.model, mesh, dtype)
    hf = dict(SHAPES[arguments.model])
    if arguments.layers:
        hf["num_hidden_layers"] = arguments.layers
    return step_weights.draw(hf, mesh, dtype)


def build_engine(weights: Weights, sizes: Sizes, k: int, mesh: Mesh, *, dtype: str, lean: bool) -> Engine:
    """The engine as `LLM` makes it, with a pool for exactly this load; nothing is compiled yet."""
    gpu = jax.devices()[0].platform == "gpu"
    most_rows = sizes.rows[-1]
    budget = max(sizes.budget, 2 * most_rows * (k + 1))
    length = sizes.longest(k, budget)
    settings: Settings = resolve(
        EngineConfig(
            dtype=dtype,
            max_model_len=length,
            max_num_seqs=most_rows,
            max_num_batched_tokens=budget,
            num_gpu_blocks_override=most_rows * pages_for(length) + 1,
            num_speculative_tokens=k,
            readout_depth=0,
            enable_prefix_caching=False,  # measurements start again from the same tokens
        ),
        model_max_position=weights.model.config.max_position,
        page_bytes=0,
        free_bytes=0,
        on_gpu=gpu,
    )
    table = bucket_table(settings)
    runner = Runner(
        weights.model,
        weights.params,
        settings,
        mesh,
        draft=weights.draft if k else None,
        buckets=measured_buckets(table, sizes.rows) if lean else table,
    )
    return Engine(runner, vocab_size=weights.model.config.vocab_size)


def measured_buckets(table: tuple[Bucket, ...], rows: Sequence[int]) -> tuple[Bucket, ...]:
    """The bucket of each row count's decode steps, and the largest one for prompts."""
    decode = {choose_bucket(table, prefill_tokens=0, prefill_rows=0, decode_rows=n, full=False) for n in rows}
    prompts = max((b for b in table if b.prefill_tokens), key=lambda b: (b.prefill_tokens, b.variant == "lean"))
    return tuple(sorted({*decode, prompts}))


def warm_up(engines: dict[int, Engine]) -> dict[str, float]:
    """Compiles for all engines at once; seconds from the start until each bucket was ready."""
    started = time.perf_counter()
    seconds: dict[str, float] = {}

    def warm(k: int) -> None:
        def progress(done: int, total: int, what: str) -> None:
            name = f"{kind(k)}, {what.rsplit(':', 1)[0]}"
            seconds[name] = round(time.perf_counter() - started, 2)
            print(f"compiled {done}/{total} {name}: {seconds[name]} s", flush=True)

        engines[k].warm_up(progress)

    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(warm, engines))
    compiles.mark_warm()
    return seconds


def run(arguments: argparse.Namespace) -> int:
    keep_graphs()
    gpu = jax.devices()[0].platform == "gpu"
    mesh = mesh_of_one()
    dtype = resolve_dtype(EngineConfig(dtype=arguments.dtype), on_gpu=gpu)
    bandwidth = read_bandwidth(gpu)
    print(f"{jax.devices()[0].device_kind}: reads {bandwidth / 1e12:.3f} TB/s (sum of a large array)", flush=True)
    began = time.perf_counter()
    weights = load_weights(arguments, mesh, np_dtype(dtype))
    jax.block_until_ready((weights.params, weights.draft and weights.draft[1]))
    load_seconds = time.perf_counter() - began
    print(f"weights on the device in {load_seconds:.1f} s", flush=True)
    sizes = choose_sizes(arguments, gpu=gpu, has_draft=weights.draft is not None)
    peers = read_peers(arguments.peer, tokens=sizes.tokens, context=sizes.context)

    engines = {
        k: build_engine(weights, sizes, k, mesh, dtype=dtype, lean=arguments.lean) for k in sorted({0, sizes.tokens})
    }
    bucket_seconds = warm_up(engines)
    prefill = {k: {n: prefill_seconds(engine, n, sizes.context) for n in sizes.rows} for k, engine in engines.items()}
    loads = {
        k: Load(engine, sizes.rows[-1], sizes.context, depth=arguments.readout_depth) for k, engine in engines.items()
    }
    print(f"prefilled after {time.perf_counter() - began:.1f} s", flush=True)

    floors = Floor(weights, bandwidth)
    rows: list[dict[str, Any]] = []
    for n in sizes.rows:
        figures = {"rows": n} | _measure(loads[0], sizes, n, floors)
        rows.append(figures | {"prefill_tokens_per_s": round(n * sizes.context / prefill[0][n])})
        if sizes.tokens:
            cycle = _measure_cycle(loads[sizes.tokens], sizes, n, floors)
            rows[-1]["cycle"] = cycle | {"prefill_tokens_per_s": round(n * sizes.context / prefill[sizes.tokens][n])}
        print(f"{n} rows: {figures['step_ms']} ms, cycle {rows[-1].get('cycle', {}).get('step_ms')} ms", flush=True)
    after_warm_up = compiles.after_warmup
    add_peers(rows, peers)

    result: dict[str, Any] = {
        "benchmark": "step",
        # A folder by its name: where it lies is of no interest to a record.
        "model": Path(arguments.model).name,
        "layers": weights.model.config.num_layers,
        "parameters": count_parameters(weights.model),
        "dtype": dtype,
        "context": sizes.context,
        "drafted_tokens": sizes.tokens,
        "steps": sizes.steps,
        "readout_depth": arguments.readout_depth,
        "loop_steps": {kind(k): sizes.loop(k) for k in engines},
        "max_num_batched_tokens": {kind(k): engine.settings.max_num_batched_tokens for k, engine in engines.items()},
        "kv_bytes_per_token": floors.kv_token,
        "read_bandwidth_bytes_per_s": bandwidth,
        "executables": sum(len(engine.runner.buckets) for engine in engines.values()),
        "load_seconds": round(load_seconds, 1),
        "seconds_until_bucket_was_ready": bucket_seconds,
        "compiles_after_warm_up": after_warm_up,
        "peers": {name: {key: value for key, value in peer.items() if key != "rows"} for name, peer in peers.items()},
        "gates": gates(rows),
        "rows": rows,
    }

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - began, 1)
        suffix = "" if arguments.model in (*SHAPES, "demo") else "_folder"
        record.write(f"step{suffix or '_' + arguments.model}", result, arguments)

    if gpu:
        save()  # a tracer that takes the process with it shall not take the times
        for k, load in loads.items():
            for row in rows:
                traced = _kernel_figures(load.kernels(row["rows"]), weights.model.config.num_layers + k)
                (row["cycle"] if k else row).update(traced)
    if routed_experts(weights.model.config) and not arguments.no_expert_count:
        for n, count in touched_experts(loads[0], weights.params, weights.model, sizes.rows).items():
            rows[sizes.rows.index(n)]["experts_touched_measured"] = round(count, 2)
    save()
    print_tables(result)
    return 0


def kind(k: int) -> str:
    """Of an engine that drafts k tokens."""
    return "cycle" if k else "plain"


class Floor:
    """Bytes that a step or a cycle has to read, and the time of that.

    Attributes:
        kv_token, draft_token: bytes of a token's KV, of all the target's layers and of the draft's.
    """

    def __init__(self, weights: Weights, bandwidth: float):
        self._weights, self._bandwidth = weights, bandwidth
        one = {TENSOR_AXIS: 1}
        self.kv_token = page_bytes(weights.model.cache_specs(), PAGE_SIZE, one) / PAGE_SIZE
        draft = [weights.draft[0].cache_spec] if weights.draft else []
        self.draft_token = page_bytes(draft, PAGE_SIZE, one) / PAGE_SIZE

    def of_step(self, rows: int, context: float) -> Traffic:
        return traffic(self._weights.model, rows, context, self.kv_token)

    def of_cycle(self, rows: int, k: int, context: float) -> dict[str, float]:
        assert self._weights.draft is not None
        return cycle_bytes(
            self._weights.model, self._weights.draft[0], rows, k, context, self.kv_token, self.draft_token
        )

    def seconds(self, size: float) -> float:
        return size / self._bandwidth


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


def _measure(load: Load, sizes: Sizes, n: int, floors: Floor) -> dict[str, Any]:
    """All figures of plain steps of one row count; times in milliseconds."""
    partner, steps = _partner(load, sizes, n), sizes.steps
    order = (n, partner) if partner != n else (n,)
    loops = _loops(load, sizes, n, partner)
    reading = load.times_reading(order, steps)[n]
    alone, dispatch_alone, _ = load.times_ahead((n,), steps)
    pair, dispatch, planning = load.times_ahead(order, steps)
    partner_alone = load.times_ahead((partner,), steps)[0] if partner != n else alone
    moved = floors.of_step(n, sizes.context + (steps + 1) / 2)
    floor = floors.seconds(moved.total)
    return {
        "bucket": str(load.bucket(n)),
        "partner_rows": partner,
        **loops,
        "step_read_ms": ms(reading),
        "step_ahead_ms": ms(alone),
        "step_ahead_alternating_ms": ms(pair),
        "step_ahead_same_two_apart_ms": ms((alone + partner_alone) / 2),
        "dispatch_ms": ms(dispatch_alone),
        "dispatch_alternating_ms": ms(dispatch),
        "plan_ms": ms(planning),
        "weight_bytes": moved.weights,
        "kv_bytes": moved.kv,
        "experts_touched_expected": round(moved.experts, 2),
        "floor_ms": ms(floor),
        "floor_share_read": round(floor / reading, 4),
        "floor_share_ahead": round(floor / alone, 4),
    }


def _measure_cycle(load: Load, sizes: Sizes, n: int, floors: Floor) -> dict[str, Any]:
    """Of cycles: as of plain steps, without what only says more of the same."""
    loops = _loops(load, sizes, n, _partner(load, sizes, n))
    ahead, dispatch, planning = load.times_ahead((n,), sizes.steps)
    need = floors.of_cycle(n, sizes.tokens, sizes.context + (sizes.loop(sizes.tokens) + 1) / 2)
    floor = floors.seconds(sum(need.values()))
    return {
        "bucket": str(load.bucket(n)),
        **loops,
        "step_ahead_ms": ms(ahead),
        "dispatch_ms": ms(dispatch),
        "plan_ms": ms(planning),
        "target_bytes": need["target"],
        "draft_bytes": need["draft"],
        "floor_ms": ms(floor),
        "floor_share_step": round(floor / (1e-3 * loops["step_ms"]), 4),
    }


def _kernel_figures(kernels: Kernels, layers: int) -> dict[str, float]:
    return {
        "kernels": kernels.count,
        "kernels_per_layer": round(kernels.count / layers, 2),
        "launches": kernels.launches,
        "kernels_ms": ms(kernels.seconds),
    }


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def print_tables(result: dict[str, Any]) -> None:
    print(
        f"{result['model']}, {result['layers']} layers, {result['dtype']}, {result['context']} tokens of context; "
        f"{result['executables']} executables, {result['compiles_after_warm_up']} compiles after warm-up; times in ms"
    )
    header = ["rows", "read", "ahead", "turns", "apart", "dispatch", "turns", "GB", "floor", "of read", "of ahead"]
    lines = [
        [
            str(r["rows"]),
            *(f"{r[k]:.2f}" for k in ("step_read_ms", "step_ahead_ms", "step_ahead_alternating_ms")),
            *(f"{r[k]:.2f}" for k in ("step_ahead_same_two_apart_ms", "dispatch_ms", "dispatch_alternating_ms")),
            f"{(r['weight_bytes'] + r['kv_bytes']) / 1e9:.2f}",
            f"{r['floor_ms']:.3f}",
            *(f"{100 * r[k]:.0f} %" for k in ("floor_share_read", "floor_share_ahead")),
        ]
        for r in result["rows"]
    ]
    print(record.table(header, lines))
    print(f"the engine's loop, at a readout depth of {result['readout_depth']}:")
    print(record.table(*loop_table(result["rows"])))
    for gate in result["gates"]:
        bound = f"{gate['worst']:g} at {gate['at_rows']} rows, bound {gate['bound']:g}"
        print(f"{'met' if gate['met'] else 'NOT met'}: {gate['gate']} ({bound}, {gate['row_counts']} row counts)")


def loop_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: of plain steps, then of cycles, what each cost, beside the peer's where there is one."""
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
