"""From a model's folder and options to an engine.

All checks that need no weights run before the weights are read.
"""

import functools
import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jaxspec.compile_cache import FileStore, open_store
from jaxspec.config import (
    PAGE_SIZE,
    EngineConfig,
    Lookup,
    Settings,
    context_length,
    flagged,
    np_dtype,
    resolve,
    resolve_dtype,
)
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.follower import Follower
from jaxspec.engine.leader import Leader
from jaxspec.engine.lookup import HISTORY
from jaxspec.engine.memory import evidently_fits, free_bytes, measure_free_bytes, smallest_pool
from jaxspec.engine.runner import Runner, bind
from jaxspec.engine.state import state_shapes
from jaxspec.engine.step_log import StepLog
from jaxspec.errors import ConfigError
from jaxspec.loading.checkpoint import (
    Checkpoint,
    Params,
    declare_params,
    declare_target,
    load_params,
    open_checkpoint,
    read_model_config,
)
from jaxspec.loading.draft import DraftPlan, plan_draft
from jaxspec.loading.mesh import make_mesh
from jaxspec.models.attention import kernels_missing
from jaxspec.models.cache import CacheSpec, cache_stored_as, page_bytes, slot_bytes
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.gqa import spread_heads
from jaxspec.models.mla import fp8_without_kernels
from jaxspec.models.params import (
    DATA_AXIS,
    TENSOR_AXIS,
    count_parameters,
    declarations,
    device_bytes,
    dotted,
    kernel_obstacles,
    schemes_of,
)
from jaxspec.progress import Progress
from pallas_kernels.backend import REFERENCES, Backends, UnsupportedError, hopper_unsupported_reason, use

logger = logging.getLogger(__name__)

# KV pages on a CPU share memory with everything else on the machine.
_CPU_KV_BYTES = 1 << 30


def build_engine(
    folder: Path,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    probe: bool = False,
    observer: Any = None,
    group: Leader | None = None,
) -> tuple[Engine, dict[str, str | int]]:
    """An engine with loaded weights, before warm-up, and a description for people: label -> value, in order.

    Args:
        folder: of the model, converted or as Hugging Face has it.
        progress: called while the weights load.
        probe, observer: see `Runner` and `Engine`.
        group: of processes that share the devices; all have come.

    Raises:
        ModelFormatError, ConfigError: the folder or the options cannot work.
    """
    plan, runner = _build(folder, config, progress=progress, probe=probe, group=group)
    engine = Engine(
        runner,
        vocab_size=plan.model.vocab_size,
        eos_token_ids=plan.model.eos_token_ids,
        seed=config.seed,
        observer=observer,
        step_log=StepLog(config.log_steps) if config.log_steps else None,
    )
    return engine, _describe(plan, runner)


def build_follower(folder: Path, config: EngineConfig, group: Follower, *, progress: Progress | None = None) -> Runner:
    """What launches the orders of another process, of the same folder and options. See `build_engine`."""
    return _build(folder, config, progress=progress, group=group)[1]


def _build(
    folder: Path,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    probe: bool = False,
    group: Leader | Follower | None = None,
) -> "tuple[Plan, Runner]":
    plan = plan_engine(folder, config)
    free = plan.free_bytes()
    settings = plan.settings(free)
    if probe and settings.data_parallel_size > 1:
        raise ConfigError(f"a probe sees one rank: leave {flagged('data_parallel_size')} out")
    if probe and settings.prefix_caching:
        raise ConfigError(f"a probe sees every token of every prompt: switch {flagged('enable_prefix_caching')} off")
    started = time.monotonic()
    draft = plan.draft.load(plan.mesh) if plan.draft else None  # first: it is small, and its data may be refused
    model, shapes = declare_params(plan.checkpoint, plan.mesh, plan.dtype, context=plan.context)
    for module in (model, *(draft[:1] if draft else ())):
        cache_stored_as(module, config.kv_cache_dtype)

    def make_runner(
        params: Params, settings: Settings, buckets: tuple[Bucket, ...] | None = None, *, compile_ahead: bool = False
    ) -> Runner:
        return Runner(
            model, params, settings, plan.mesh, draft=draft, buckets=buckets, probe=probe, files=plan.files, group=group,
            compile_ahead=compile_ahead,
        )  # fmt: skip

    def load() -> Params:
        params = load_params(plan.checkpoint, plan.mesh, plan.dtype, context=plan.context, progress=progress)[1]
        seconds = time.monotonic() - started
        logger.info("Loading weights took %.2f seconds", seconds)
        logger.info("Model loading took %.2f GiB memory and %.2f seconds", plan.weight_bytes / 2**30, seconds)
        return params

    state = state_shapes(model, settings, plan.mesh, draft=draft[0] if draft else None)
    if plan.on_gpu and group is None and evidently_fits(state, free):
        _log_pool(plan, settings)
        runner = make_runner(shapes, settings, compile_ahead=True)
        try:
            params = load()
        except BaseException:
            runner.stop()
            raise
        runner.use_params((bind(model, params)[1], bind(*draft)[1] if draft else None))
        return plan, runner

    params = load()
    if plan.on_gpu and config.num_gpu_blocks_override is None:
        devices = list(plan.mesh.devices.flat)
        store = ExecutableStore(plan.files, plan.mesh)
        modules = [nnx.graphdef(module) for module in (model, *(draft[:1] if draft else ()))]
        limits = [device.memory_stats()["bytes_limit"] for device in devices]
        key = store.key("memory", modules, smallest_pool(settings), plan.mesh, probe, limits)
        measured = free_bytes(
            lambda: measure_free_bytes(functools.partial(make_runner, params), settings, plan.page_bytes, devices),
            store,
            key,
            devices,
        )
        settings = plan.settings(measured)
    _log_pool(plan, settings)
    return plan, make_runner(params, settings)


@dataclass(frozen=True)
class Plan:
    """What is known before the weights are read.

    Attributes:
        parameters: of the model and its draft; `weight_bytes`: that they take on each device.
        context: tokens at which contexts end.
        caches: of all layers, the draft's included, and of the text where drafts are looked up.
        files: where compiled steps are kept.
    """

    config: EngineConfig
    mesh: Mesh
    on_gpu: bool
    dtype: str
    checkpoint: Checkpoint
    model: ModelConfig
    context: int
    draft: DraftPlan | None
    parameters: int
    weight_bytes: int
    caches: tuple[CacheSpec, ...]
    files: FileStore | None

    @property
    def page_bytes(self) -> int:
        """Of one KV page over all layers, on one device."""
        return page_bytes(self.caches, PAGE_SIZE, self.mesh.shape)

    def free_bytes(self) -> int:
        """An estimate of what KV pages may take on one device; on a GPU, steps are measured later."""
        if not self.on_gpu:
            return _CPU_KV_BYTES
        return self.mesh.local_devices[0].memory_stats()["bytes_limit"] - self.weight_bytes

    def settings(self, free_bytes: int) -> Settings:
        return resolve(
            self.config,
            model_max_position=self.model.max_position,
            index_topk=self.model.index_topk,
            page_bytes=self.page_bytes,
            free_bytes=free_bytes,
            on_gpu=self.on_gpu,
            paged=all(cache.paged for cache in self.caches),
            rejects=all(cache.rejects for cache in self.caches),
        )


def plan_engine(folder: Path, config: EngineConfig) -> Plan:
    """Everything that configurations, headers and devices say.

    Raises:
        ModelFormatError, ConfigError: as `build_engine`, for all that needs no weights.
    """
    tp, dp = config.tensor_parallel_size, config.data_parallel_size
    mesh = make_mesh(tp, dp)
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    several = mesh.is_multi_process
    if several and on_gpu and config.num_gpu_blocks_override is None:
        raise ConfigError(
            f"{flagged('num_gpu_blocks_override')} must be given where several processes share a model (--nnodes): what the "
            "steps leave of the memory is measured by one process alone"
        )
    dtype = resolve_dtype(config, on_gpu=on_gpu)
    model_config = read_model_config(folder)
    checkpoint = open_checkpoint(folder)
    context = context_length(
        config, model_max_position=model_config.max_position, index_topk=model_config.index_topk, on_gpu=on_gpu
    )
    draft = plan_draft(config, checkpoint, model_config, dtype, context=context)
    model = declare_target(checkpoint, dtype, context=context)
    modules: tuple[Any, ...] = (model, *([draft.model] if draft else []))
    if dp > 1:
        check_ranks(model, config)
    if config.expert_load_metrics:
        check_expert_load(model)
    parameters = sum(map(count_parameters, modules))  # as the checkpoints have them
    for module in modules:
        spread_heads(module, tp)
    weight_bytes = sum(device_bytes(module, mesh) for module in modules)  # refuses what the mesh cannot split
    if on_gpu:
        check_kernels(folder, modules, dtype, config)
        topk = model_config.index_topk
        check_attention_kernels(modules, config, dtype, shorter=topk if topk and context > topk else None)
        if mesh.size > 1:
            check_split_kernels(modules, config, dtype)
    for module in modules:
        cache_stored_as(module, config.kv_cache_dtype)
    if config.kv_cache_dtype == "fp8":
        check_fp8_cache(model.cache_specs())
        if on_gpu:
            check_fp8_kernels(modules, dtype, Backends(config.attention_backend))
    return Plan(
        config=config,
        mesh=mesh,
        on_gpu=on_gpu,
        dtype=dtype,
        checkpoint=checkpoint,
        model=model_config,
        context=context,
        draft=draft,
        parameters=parameters,
        weight_bytes=weight_bytes,
        caches=model.cache_specs()
        + ((draft.model.cache_spec,) if draft else ())
        + ((HISTORY,) if config.lookup else ()),
        files=None if several else open_store(config.compilation_cache_dir),
    )


def check_ranks(model: nnx.Module, config: EngineConfig) -> None:
    """Refuses ranks that would share nothing, or no steps: experts and steps are all that ranks have in common.

    Raises:
        ConfigError: naming the way out.
    """
    ranks = f"{flagged('data_parallel_size')} {config.data_parallel_size}"
    if not _has_experts(model):
        raise ConfigError(
            f"{ranks} is for mixtures of experts, and this model has none that ranks could share: run as many servers and "
            f"balance over them (docs/hosts.md), or use {flagged('tensor_parallel_size')}"
        )
    if not config.enable_expert_parallel:
        raise ConfigError(
            f"{ranks} needs {flagged('enable_expert_parallel')}: add it, and ranks share the experts; or run as many servers "
            "and balance over them (docs/hosts.md)"
        )
    if not config.enable_mixed_batch:
        raise ConfigError(
            f"{flagged('enable_mixed_batch')} must be on with {ranks}: where one rank prefills, others decode in the same step"
        )


def check_expert_load(model: CausalLM) -> None:
    """Refuses a model without experts.

    Raises:
        ConfigError: naming the way out.
    """
    if not model.mixtures:
        raise ConfigError(
            f"{flagged('expert_load_metrics')} is for mixtures of experts, and this model has none: leave it out"
        )


def check_kernels(folder: Path, modules: Collection[Any], dtype: Any, config: EngineConfig) -> None:
    """Refuses quantised weights that no kernel reads, unless plain XLA is asked for: it writes them out in every step.

    Args:
        dtype: of activations.

    Raises:
        ConfigError: naming the ways out.
    """
    if config.moe_backend in REFERENCES:
        return
    sizes = {DATA_AXIS: config.data_parallel_size, TENSOR_AXIS: config.tensor_parallel_size}
    for module in modules:
        schemes = schemes_of(module)
        for path, reason in kernel_obstacles(module, dtype, sizes).items():
            names = sorted({str(scheme) for at, scheme in schemes.items() if dotted(at[:-1]) == path})
            raise ConfigError(
                f"weights of {folder} are quantised ({path}: {', '.join(names)}), for which there are no kernels here: "
                f"{reason}; make a copy in bfloat16: jaxspec convert SRC OUT --quantization bf16, or use "
                f"{flagged('moe_backend')} reference, which writes them out in every step and is slow"
            )


def _has_experts(model: nnx.Module) -> bool:
    return any("experts" in variable.get_metadata()["axes"] for variable in declarations(model).values())


def check_split_kernels(modules: Iterable[nnx.Module], config: EngineConfig, dtype: str) -> None:
    """Refuses several GPUs that would run on plain XLA unasked, before the weights are read. What only sizes decide is refused
    when the first step is traced (`Backends.needs_kernels`).

    Raises:
        ConfigError: naming the way out.
    """
    chosen: dict[str, str] = {"attention_backend": config.attention_backend}
    if any(map(_has_experts, modules)):
        chosen["moe_backend"] = config.moe_backend
    unasked = [option for option, backend in chosen.items() if backend not in REFERENCES]
    if unasked and (reason := hopper_unsupported_reason(np_dtype(dtype))):
        raise ConfigError(
            f"several GPUs would run this model on plain XLA: {reason}; ask for it, which is slow, with reference for "
            f"{' and '.join(map(flagged, unasked))}, or use one GPU"
        )


def check_attention_kernels(
    modules: Iterable[nnx.Module], config: EngineConfig, dtype: str, *, shorter: int | None = None
) -> None:
    """Refuses attention that needs kernels (see `NeedsKernels`) and has none on this GPU, unless plain XLA is asked for.

    Args:
        shorter: contexts of so many tokens would do without.

    Raises:
        ConfigError: naming the ways out.
    """
    if config.attention_backend == "reference":
        return
    if missing := next(filter(None, (kernels_missing(module, np_dtype(dtype)) for module in modules)), None):
        way = f"{flagged('max_model_len')} of at most {shorter}, where it attends to all tokens, or " if shorter else ""
        raise ConfigError(
            f"this model's {missing}; use {way}{flagged('attention_backend')} reference, which is slow, or run it on a CPU"
        )


def check_fp8_cache(caches: Iterable[CacheSpec]) -> None:
    """Refuses a model with layers that have no FP8 cache, where they were declared with one.

    Raises:
        ConfigError: naming the way out.
    """
    if not all(cache.in_fp8 for cache in caches):
        raise ConfigError(
            f"{flagged('kv_cache_dtype')} fp8 is for latents, and this model has grouped-query or linear attention: "
            "use --kv-cache-dtype bf16, or auto"
        )


def check_fp8_kernels(models: Iterable[nnx.Module], dtype: str, backends: Backends) -> None:
    """Refuses FP8 latents that no kernel reads and writes: plain XLA would dequantise the pages of a step in memory.

    Raises:
        ConfigError: naming the way out.
    """
    try:
        with use(backends):
            missing = set().union(*(fp8_without_kernels(model, np_dtype(dtype)) for model in models))
    except UnsupportedError as error:
        missing = {str(error)}
    if missing:
        raise ConfigError(
            f"{flagged('kv_cache_dtype')} fp8 has no kernel for this model, dtype and device ({', '.join(sorted(missing))}): "
            "use --kv-cache-dtype bf16, or auto"
        )


def _log_pool(plan: Plan, settings: Settings) -> None:
    """In vLLM's words, which people and their tools look for."""
    tokens = settings.data_parallel_size * (settings.num_pages - 1) * settings.page_size
    logger.info("Available KV cache memory: %.2f GiB", settings.num_pages * plan.page_bytes / 2**30)
    logger.info("%s KV cache size: %s tokens", "GPU" if plan.on_gpu else "CPU", f"{tokens:,}")
    length = settings.max_model_len
    if plan.config.max_model_len is None and length == plan.model.index_topk and length < plan.model.max_position:
        logger.warning(
            "Contexts end at %d tokens (index_topk), up to which this model attends to all of them. Longer ones, up to its %d, "
            "have to be asked for, with %s",
            length,
            plan.model.max_position,
            flagged("max_model_len"),
        )
    logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{length:,}", tokens / length)


def _describe(plan: Plan, runner: Runner) -> dict[str, str | int]:
    settings, device = runner.settings, plan.mesh.devices.flat[0]
    ranks, tokens = settings.data_parallel_size, (settings.num_pages - 1) * settings.page_size
    pool = f"{settings.num_pages - 1} pages, {tokens:,} tokens, {settings.num_pages * plan.page_bytes / 2**20:.0f} MiB"
    if ranks > 1:
        pool += f", on each of {ranks} ranks"
    most = f"{'up to ' * settings.adaptive_drafts}{settings.num_speculative_tokens} tokens a step"
    names = [*([_lookup_words(settings.lookup)] if settings.lookup else []), *([plan.draft.name] if plan.draft else [])]
    drafts = f"{', else '.join(names)}, {most}" if names else "off"
    out: dict[str, str | int] = {
        "Architecture": plan.model.architecture,
        "Parameters": f"{plan.parameters:,}",
        "Dtype": plan.dtype,
        "Device": f"{plan.mesh.size} x {device.device_kind} ({device.platform})",
        "Speculation": drafts,
    }
    if settings.synthetic_acceptance_length is not None:
        length = f"{settings.synthetic_acceptance_length:g}"
        out["Synthetic acceptance"] = f"{length} tokens a window; the text is worthless"
    if plan.config.kv_cache_dtype != "auto":
        out["KV cache dtype"] = plan.config.kv_cache_dtype
    if state := slot_bytes(plan.caches, settings.window, plan.mesh.shape):
        out["State bytes per request"] = state
    if kept := settings.state_snapshots:
        size = kept * slot_bytes(plan.caches, 0, plan.mesh.shape)  # without windows
        out["Kept states"] = f"{kept}, {size / 2**20:.0f} MiB"
    return out | {
        "Context length": settings.max_model_len,
        "KV cache bytes per token": plan.page_bytes // PAGE_SIZE,
        "KV cache": pool,
        "Maximum concurrency": f"{ranks * tokens / settings.max_model_len:.2f}x at {settings.max_model_len} tokens a request",
        "Buckets": "; ".join(bucket.words for bucket in runner.executables),
    }


def _lookup_words(lookup: Lookup) -> str:
    return f"looked up in the request's text by its last {lookup.least} to {lookup.most} tokens"
