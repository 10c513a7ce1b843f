"""`bench step`: what a decode step costs, beside the bytes that it must read.

The production runner, its compiled buckets and the real scheduler run requests whose prompts were really prefilled.
Every row count is measured in turn with a second one that uses another bucket, as a server's load makes it do: graph
replay may cost more when executables take turns.

- read: plan, dispatch and wait for the tokens of every step (readout depth 0), one step at a time.
- ahead: steps are dispatched one behind the other and waited for once, so this is the device's time, or the host's
  dispatch where that is longer.
- dispatch: time of `Runner.dispatch` while the device is busy with earlier steps.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bench import record
from jaxspec.compat import compiles
from jaxspec.config import PAGE_SIZE, EngineConfig, Settings, pages_for, resolve, resolve_dtype
from jaxspec.engine.buckets import Bucket, choose_bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.runner import Runner
from jaxspec.engine.state import kv_page_bytes
from jaxspec.models import moe
from jaxspec.models.config import ModelConfig, read_config
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import TENSOR_AXIS, count_parameters, declarations, random_params
from jaxspec.sampling.params import SamplingParams
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
    },
    "tiny": {
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": None,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 10000.0,
    },
}  # fmt: skip

# Steps that are not counted at the start of each measurement.
WARMUP_STEPS = 3
# Below the number of steps (32) that jax lets a host run ahead of its device: past it, dispatch waits for the device.
BURST = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def numbers(text: str) -> list[int]:
        return sorted({int(part) for part in text.split(",")})

    parser.add_argument("--model", default="demo", help="demo, moonlight, tiny (random weights), or a model folder")
    parser.add_argument(
        "--rows", type=numbers, metavar="N,N,...", help="decode rows (default: 1,4,16,32,64,128; CPU: 1,4)"
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="prompt length (default: 1024; CPU: 128)")
    parser.add_argument("--steps", type=int, default=BURST, metavar="N", help="steps of each measurement, at least 4")
    parser.add_argument("--layers", type=int, metavar="N", help="shrink a random model to N layers")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument(
        "--lean", action="store_true", help="compile only the lean buckets (full ones are not measured)"
    )
    parser.add_argument(
        "--no-expert-count", action="store_true", help="do not count the experts that steps really touch"
    )
    record.add_arguments(parser)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one decode step of `rows` rows has to read at least."""

    weights: float
    kv: float
    experts: float  # expected number of routed experts touched in a layer

    @property
    def total(self) -> float:
        return self.weights + self.kv


def traffic(model: CausalLM, rows: int, context: float, kv_token_bytes: float, *, tokens: int | None = None) -> Traffic:
    """What a step of `rows` rows and, in windows, `tokens` tokens (default: one a row) reads."""
    tokens = tokens or rows
    weights = weight_bytes(model, model.config, tokens)
    moe = model.config.moe
    experts = touched_share(model.config, tokens) * moe.num_experts if moe else 0.0
    return Traffic(weights, rows * context * kv_token_bytes, experts)


def touched_share(config: ModelConfig, tokens: int) -> float:
    """Expected part of a layer's routed experts that a step touches: tokens choose k of E independently."""
    return 1 - (1 - config.moe.top_k / config.moe.num_experts) ** tokens if config.moe else 0.0


def weight_bytes(module: Any, config: ModelConfig, tokens: int) -> float:
    """Bytes of a module's weights that a pass over `tokens` tokens reads.

    Counts each weight once, of the embedding the tokens' own lines, and of the routed experts those that are touched.
    """
    total = 0.0
    for path, variable in declarations(module).items():
        value = variable.get_value()
        size = float(np.prod(value.shape)) * value.dtype.itemsize
        if "experts" in variable.get_metadata()["axes"]:
            size *= touched_share(config, tokens)
        if path[0] == "embed" and not config.tie_embeddings:
            size *= tokens / config.vocab_size
        total += size
    return total


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


class Load:
    """An engine whose requests have been prefilled and decode; any number of them can be made to run.

    Measurements start from the same state: `rewind` takes back what the last one generated.
    """

    def __init__(self, engine: Engine, rows: int, context: int, seed: int = 0):
        self.engine, self.runner = engine, engine.runner
        self._scheduler = engine._scheduler
        rng = np.random.default_rng(seed)
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        self.requests = [
            Request(f"r{i}", rng.integers(0, engine.vocab_size, context).tolist(), params, arrival_time=float(i))
            for i in range(rows)
        ]
        started = time.perf_counter()
        for request in self.requests:
            engine.add(request)
        self.prefill_steps = 0
        while any(r.state is not RequestState.DECODE for r in self.requests):
            self.step()
            self.prefill_steps += 1
        self.prefill_seconds = time.perf_counter() - started
        state = self.runner.state
        slots = [r.slot for r in self.requests]
        self._seq_len, self._last_token = np.zeros_like(state.seq_len), np.zeros_like(state.last_token)
        self._seq_len[slots] = context
        self._last_token[slots] = [r.tokens[context] for r in self.requests]

    def rewind(self) -> None:
        """Every request back to its prompt and first token. Pages stay: what they hold is written again."""
        for request in self.requests:
            del request.tokens[request.prompt_len + 1 :]
            request.computed = request.prompt_len
        state = self.runner.state
        sharding = state.seq_len.sharding
        self.runner.state = state._replace(
            seq_len=jax.device_put(self._seq_len, sharding), last_token=jax.device_put(self._last_token, sharding)
        )

    def select(self, rows: int) -> None:
        """The first `rows` requests run, the others stand still with their pages."""
        self._scheduler.running = self.requests[:rows]

    def step(self) -> None:
        """One engine step at depth 0."""
        for out in self.engine.step():
            if out.finish_reason:
                raise RuntimeError(f"request {out.request_id} ended in the middle of a measurement: {out}")

    def bucket(self, rows: int) -> Bucket:
        return choose_bucket(self.runner.buckets, prefill_tokens=0, prefill_rows=0, decode_rows=rows, full=False)

    def times_reading(self, order: Sequence[int], rounds: int) -> dict[int, float]:
        """Median seconds of a step by row count, the row counts taking turns, each step read before the next."""
        self.rewind()
        times: dict[int, list[float]] = {rows: [] for rows in order}
        for _ in range(WARMUP_STEPS + rounds):
            for rows in order:
                self.select(rows)
                started = time.perf_counter()
                self.step()
                times[rows].append(time.perf_counter() - started)
        return {rows: statistics.median(t[WARMUP_STEPS:]) for rows, t in times.items()}

    def times_ahead(self, order: Sequence[int], steps: int) -> tuple[float, float, float]:
        """Dispatches without reading: seconds a step, median seconds of `Runner.dispatch`, of `Scheduler.plan`."""
        self.rewind()
        self._dispatch(order, WARMUP_STEPS * len(order))
        self._drain()
        totals, dispatches, plans = [], [], []
        for _ in range(3):
            self.rewind()
            jax.block_until_ready(self.runner.state)
            started = time.perf_counter()
            planned, dispatched = self._dispatch(order, steps)
            jax.block_until_ready(self.runner.state)
            totals.append((time.perf_counter() - started) / steps)
            self._drain()
            plans += planned
            dispatches += dispatched
        return statistics.median(totals), statistics.median(dispatches), statistics.median(plans)

    def _dispatch(self, order: Sequence[int], steps: int) -> tuple[list[float], list[float]]:
        plans, dispatches = [], []
        for i in range(steps):
            self.select(order[i % len(order)])
            started = time.perf_counter()
            plan = self._scheduler.plan()
            planned = time.perf_counter()
            assert plan is not None
            self.runner.dispatch(plan)
            plans.append(planned - started)
            dispatches.append(time.perf_counter() - planned)
            for request in plan.decode:
                # The device knows the token; the host only has to know that there is one more.
                request.tokens.append(0)
        return plans, dispatches

    def _drain(self) -> None:
        while self.runner.in_flight:
            if self.runner.read().flags.any():
                raise RuntimeError("a request ended in the middle of a measurement")


def touched_experts(load: Load, params: dict, model: CausalLM, rows: Sequence[int]) -> dict[int, float]:
    """Distinct experts that a step's live rows really reach, mean over the layers.

    Counted in an executable of its own, whose router also reports to the host, from the load's state (used up).
    """
    seen: list[np.ndarray] = []
    routed_experts = moe.routed_experts

    def reporting(
        x: Any, gate_up: Any, down: Any, logits: Any, bias: Any, live: Any, shared: Any = None, **routing: Any
    ) -> Any:
        route = route_softmax(logits, **routing) if bias is None else route_sigmoid(logits, bias, **routing)
        jax.debug.callback(lambda got: seen.append(np.asarray(got)), route[1])
        return routed_experts(x, gate_up, down, logits, bias, live, shared, **routing)

    load.rewind()
    runner = Runner(model, params, load.engine.settings, load.runner._mesh)
    runner.buckets = (load.bucket(max(rows)),)
    moe.routed_experts = reporting  # type: ignore[attr-defined]
    try:
        runner.warm_up()
    finally:
        moe.routed_experts = routed_experts  # type: ignore[attr-defined]
    runner.state = load.runner.state
    counts = {}
    for n in rows:
        load.select(n)
        plan = load._scheduler.plan()
        assert plan is not None
        jax.effects_barrier()
        seen.clear()
        runner.dispatch(plan)
        for request, token in zip(plan.decode, runner.read().ids[:, 0], strict=True):
            request.tokens.append(int(token))
        jax.effects_barrier()
        counts[n] = statistics.mean(len(np.unique(ids[:n])) for ids in seen)
    return counts


@dataclass(frozen=True)
class Built:
    model: CausalLM
    params: dict
    config: ModelConfig
    engine: Engine
    bucket_seconds: dict[str, float]


def mesh_of_one() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))


def build(arguments: argparse.Namespace, rows: int, context: int, steps: int) -> Built:
    """The engine as `LLM` makes it, with a pool for exactly this load; every bucket compiled and run."""
    gpu = jax.devices()[0].platform == "gpu"
    mesh = mesh_of_one()
    options = EngineConfig(dtype=arguments.dtype)
    dtype = resolve_dtype(options, on_gpu=gpu)
    if arguments.model in SHAPES:
        hf = dict(SHAPES[arguments.model])
        if arguments.layers:
            hf["num_hidden_layers"] = arguments.layers
        model = CausalLM(read_config(hf), np.dtype(jnp.dtype(dtype)))
        params = random_params(model, mesh)
    else:
        from convert.checkpoint import load_params
        from convert.convert import resolve_model

        model, params = load_params(resolve_model(arguments.model), mesh, np.dtype(jnp.dtype(dtype)))
    config = model.config
    # The first requests decode while the last ones prefill, and measurements take turns with two row counts.
    budget = 2048 if gpu else 256
    length = context + -(-rows * context // budget) + rows + 2 * (steps + 2 * WARMUP_STEPS) + PAGE_SIZE
    settings: Settings = resolve(
        EngineConfig(
            dtype=arguments.dtype,
            max_model_len=length,
            max_num_seqs=rows,
            max_num_batched_tokens=max(budget, rows),
            num_gpu_blocks_override=rows * pages_for(length) + 1,
            readout_depth=0,
            enable_prefix_caching=False,  # measurements start again from the same tokens
        ),
        model_max_position=config.max_position,
        page_bytes=0,
        free_bytes=0,
        on_gpu=gpu,
    )
    runner = Runner(model, params, settings, mesh)
    if arguments.lean:
        runner.buckets = tuple(b for b in runner.buckets if b.variant == "lean") or runner.buckets
    engine = Engine(runner, vocab_size=config.vocab_size)
    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def progress(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[what.rsplit(":", 1)[0]] = round(now - last, 2)
        last = now
        print(f"compiled {done}/{total} {what}", flush=True)

    engine.warm_up(progress)
    return Built(model, params, config, engine, seconds)


def run(arguments: argparse.Namespace) -> int:
    gpu = jax.devices()[0].platform == "gpu"
    rows = arguments.rows or ([1, 4, 16, 32, 64, 128] if gpu else [1, 4])
    context = arguments.context or (1024 if gpu else 128)
    steps = max(arguments.steps, 4)
    bandwidth = read_bandwidth(gpu)
    print(f"{jax.devices()[0].device_kind}: reads {bandwidth / 1e12:.3f} TB/s (sum of a large array)", flush=True)
    built = build(arguments, rows[-1], context, steps)
    settings = built.engine.settings
    kv_token_bytes = kv_page_bytes(built.model, settings.dtype, settings.page_size, 1) / settings.page_size

    load = Load(built.engine, rows[-1], context)
    prefill_rate = rows[-1] * context / load.prefill_seconds
    print(
        f"prefilled {rows[-1]} x {context} tokens in {load.prefill_seconds:.1f} s ({prefill_rate:.0f} tok/s)",
        flush=True,
    )
    load.rewind()
    compiles.mark_warm()
    measured = [_measure(load, built.model, n, rows, context, steps, kv_token_bytes, bandwidth) for n in rows]
    after_warm_up = compiles.after_warmup
    if built.config.moe and not arguments.no_expert_count:
        for n, count in touched_experts(load, built.params, built.model, rows).items():
            measured[rows.index(n)]["experts_touched_measured"] = round(count, 2)

    result = {
        "benchmark": "step",
        "model": arguments.model,
        "layers": built.config.num_layers,
        "parameters": count_parameters(built.model),
        "dtype": settings.dtype,
        "context": context,
        "steps": steps,
        "kv_bytes_per_token": kv_token_bytes,
        "read_bandwidth_bytes_per_s": bandwidth,
        "prefill_tokens_per_s": prefill_rate,
        "prefill_steps": load.prefill_steps,
        "executables": len(built.engine.runner.buckets),
        "bucket_compile_and_warm_up_seconds": built.bucket_seconds,
        "compiles_after_warm_up": after_warm_up,
        "rows": measured,
    }
    print_table(result)
    suffix = "" if arguments.model in (*SHAPES, "demo") else "_folder"
    record.write(f"step{suffix or '_' + arguments.model}", result, arguments)
    return 0


def _measure(
    load: Load,
    model: CausalLM,
    n: int,
    rows: Sequence[int],
    context: int,
    steps: int,
    kv_token_bytes: float,
    bandwidth: float,
) -> dict[str, Any]:
    """All figures of one row count; times in milliseconds."""
    others = [m for m in rows if load.bucket(m) != load.bucket(n)]
    partner = min(others, key=lambda m: abs(m - n)) if others else n
    order = (n, partner) if partner != n else (n,)
    reading = load.times_reading(order, steps)[n]
    alone, dispatch_alone, _ = load.times_ahead((n,), steps)
    pair, dispatch, plan = load.times_ahead(order, steps)
    partner_alone = load.times_ahead((partner,), steps)[0] if partner != n else alone
    moved = traffic(model, n, context + (steps + 1) / 2, kv_token_bytes)
    floor = moved.total / bandwidth
    print(f"{n} rows: {ms(reading)} ms reading, {ms(alone)} ms ahead", flush=True)
    return {
        "rows": n,
        "bucket": str(load.bucket(n)),
        "partner_rows": partner,
        "step_read_ms": ms(reading),
        "step_ahead_ms": ms(alone),
        "step_ahead_alternating_ms": ms(pair),
        "step_ahead_same_two_apart_ms": ms((alone + partner_alone) / 2),
        "dispatch_ms": ms(dispatch_alone),
        "dispatch_alternating_ms": ms(dispatch),
        "plan_ms": ms(plan),
        "weight_bytes": moved.weights,
        "kv_bytes": moved.kv,
        "experts_touched_expected": round(moved.experts, 2),
        "floor_ms": ms(floor),
        "floor_share_read": round(floor / reading, 4),
        "floor_share_ahead": round(floor / alone, 4),
    }


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def print_table(result: dict[str, Any]) -> None:
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
