"""`LLM`: a model folder in, text out. Joins conversion, loading, tokenizer and engine; the server builds on it too."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec import compile_cache
from jaxspec.config import (
    DEFAULT_SPECULATIVE_TOKENS,
    PAGE_SIZE,
    EngineConfig,
    Settings,
    np_dtype,
    resolve,
    resolve_dtype,
    with_speculative_config,
)
from jaxspec.engine.request import Alternatives, FinishReason, Request
from jaxspec.errors import ConfigError, InvalidRequestError
from jaxspec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.engine.acceptance import Acceptance
    from jaxspec.engine.buckets import Bucket
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.runner import Progress
    from jaxspec.text import TextStream, Tokenizer

# KV pages on a CPU share memory with everything else on the machine.
_CPU_KV_BYTES = 1 << 30

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """The result for one prompt.

    Attributes:
        text: None where the model has no tokenizer.
        logprobs: of each id under the model's raw distribution, where the request asked for them.
        top_logprobs: of each position the likeliest (id, log-probability) pairs, where the request asked for N > 0.
        error: what went wrong, where finish_reason is "error".
        accepted: of each id, whether it is a draft that the target agreed with (and not the target's own choice).
        acceptance: how many drafts were accepted in how many windows; None without speculation.
        synthetic_acceptance_length: the option, where it is set: then the ids are not the model's.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    logprobs: tuple[float, ...] | None
    error: str | None = None
    top_logprobs: tuple[Alternatives, ...] | None = None
    accepted: tuple[bool, ...] = ()
    acceptance: "Acceptance | None" = None
    synthetic_acceptance_length: float | None = None


class LLM:
    """A model, loaded and warmed up.

    Args:
        model: "demo" (the embedded one), a converted folder, a Hugging Face folder or a hub id.
        config: engine options; single options may be given by name instead, as in `LLM("demo", max_num_seqs=4)`.
        speculative_config: speculation as vLLM has it: see `with_speculative_config`.
        revision: hub revision, for hub ids.
        progress: called with (done, total, what) while buckets compile.
        probe, observer: see `Runner` and `Engine`; for `compare`.

    Raises:
        ModelFormatError, ConfigError: the folder or the options cannot work.
    """

    def __init__(
        self,
        model: str = "demo",
        config: EngineConfig | None = None,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        revision: str | None = None,
        progress: "Progress | None" = None,
        probe: bool = False,
        observer: Any = None,
        **options: Any,
    ):
        config = replace(config or EngineConfig(), **options)
        if speculative_config is not None:
            config = with_speculative_config(config, speculative_config)
        # The allocator reads this when jax first touches the GPU, and takes that part of its memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(config.gpu_memory_utilization))
        from convert.convert import DEMO, resolve_model

        if config.num_speculative_tokens is None and (model == DEMO or config.speculative_model is not None):
            config = replace(config, num_speculative_tokens=DEFAULT_SPECULATIVE_TOKENS)
        self.model_name = model
        self.folder = resolve_model(model, revision=revision)
        self.tokenizer = _load_tokenizer(self.folder)
        self.engine, description = _build_engine(self.folder, config, probe=probe, observer=observer)
        self._counter = itertools.count()
        self.engine.warm_up(progress)
        kernels = (f"{name} {'/'.join(sorted(ran))}" for name, ran in sorted(self.engine.runner.kernels.items()))
        self._description = {"Model": f"{model} ({self.folder})", **description, "Kernels": ", ".join(kernels)}

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completions of one or many prompts (texts or token ids), in their order.

        Raises:
            InvalidRequestError: a prompt or parameter that cannot be served; then nothing is generated.
        """
        batch = _as_batch(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise InvalidRequestError(f"{len(batch)} prompts but {len(each)} sampling parameters", param="params")
        requests = [self.make_request(prompt, p) for prompt, p in zip(batch, each, strict=True)]
        for request in requests:
            self.engine.validate(request)
        return self.run(requests)

    def make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("the model has no tokenizer: give the prompt as token ids", param="prompt")
            if not prompt:  # the tokenizer may still put a begin token there
                raise InvalidRequestError("the prompt is empty", param="prompt")
            prompt = self.tokenizer.encode(prompt)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer: stop strings need one", param="stop")
        stream = self._text_stream(prompt, params)
        return Request(f"generate-{next(self._counter)}", prompt, params, stop_rule=stream)

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Runs requests to their end; none is left behind if it is interrupted."""
        logprobs: dict[str, list[float]] = {r.id: [] for r in requests}
        tops: dict[str, list[Alternatives]] = {r.id: [] for r in requests}
        accepted: dict[str, list[bool]] = {r.id: [] for r in requests}
        ends: dict[str, tuple[FinishReason, str | None]] = {}
        try:
            for request in requests:
                self.engine.add(request)
            while len(ends) < len(requests):
                for out in self.engine.step():
                    logprobs[out.request_id] += out.new_logprobs
                    tops[out.request_id] += out.new_top_logprobs
                    accepted[out.request_id] += [i < out.num_accepted for i in range(len(out.new_ids))]
                    if out.finish_reason:
                        ends[out.request_id] = (out.finish_reason, out.error)
        finally:
            for request in requests:
                self.engine.abort(request.id)
        return [self._completion(r, *ends[r.id], logprobs[r.id], tops[r.id], accepted[r.id]) for r in requests]

    def describe(self) -> dict[str, str | int]:
        """What was loaded and how it runs, for people: label -> value, in order."""
        return self._description

    def _text_stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> "TextStream | None":
        if self.tokenizer is None:
            return None
        from jaxspec.text import TextStream

        return TextStream(self.tokenizer, prompt_ids, params)

    def _completion(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None,
        logprobs: list[float],
        tops: list[Alternatives],
        accepted: list[bool],
    ) -> Completion:
        stream: Any = request.stop_rule
        return Completion(
            prompt_ids=tuple(request.tokens[: request.prompt_len]),
            ids=tuple(request.tokens[request.prompt_len :]),
            text=None if stream is None else stream.text,
            finish_reason=reason.value,
            logprobs=None if request.params.logprobs is None else tuple(logprobs),
            error=error,
            top_logprobs=tuple(tops) if request.params.logprobs else None,
            accepted=tuple(accepted),
            acceptance=request.acceptance,
            synthetic_acceptance_length=self.engine.settings.synthetic_acceptance_length,
        )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch: list[Any] = list(prompts)
    return [batch] if batch and all(isinstance(p, int) for p in batch) else batch


def _load_tokenizer(folder: Path) -> "Tokenizer | None":
    from jaxspec.text import Tokenizer

    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None


def _build_engine(
    folder: Path, config: EngineConfig, *, probe: bool, observer: Any
) -> tuple["Engine", dict[str, str | int]]:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from convert.convert import resolve_model
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.memory import measure_free_bytes
    from jaxspec.engine.runner import Runner
    from jaxspec.engine.state import kv_page_bytes
    from jaxspec.engine.step_log import StepLog
    from jaxspec.loading.checkpoint import load_params, read_model_config
    from jaxspec.loading.draft import plan_draft
    from jaxspec.models.decoder import CausalLM
    from jaxspec.models.params import TENSOR_AXIS, count_parameters

    devices = jax.devices()
    tp = config.tensor_parallel_size
    if tp > len(devices):
        raise ConfigError(f"tensor_parallel_size {tp} needs {tp} devices, but there are {len(devices)}")
    mesh = Mesh(np.array(devices[:tp]), (TENSOR_AXIS,))
    on_gpu = devices[0].platform == "gpu"
    if on_gpu:
        # On a CPU, jaxlib has crashed while it wrote one executable and compiled another.
        compile_cache.enable(config.compilation_cache_dir)
    elif config.compilation_cache_dir not in (None, compile_cache.OFF):
        raise ConfigError("compilation_cache_dir is for GPUs: nothing is kept on a CPU, leave it out")
    dtype = resolve_dtype(config, on_gpu=on_gpu)
    model_config = read_model_config(folder)

    # Everything that can be refused is refused before the weights are read.
    plan = plan_draft(config, folder, model_config, dtype, resolve_model)
    model = CausalLM(model_config, dtype)
    parameters = count_parameters(model) + (count_parameters(plan.model) if plan else 0)
    page_bytes = kv_page_bytes(model, dtype, PAGE_SIZE, tp, draft=plan.model if plan else None)

    def settings_for(free_bytes: int) -> Settings:
        return resolve(
            config,
            model_max_position=model_config.max_position,
            page_bytes=page_bytes,
            free_bytes=free_bytes,
            on_gpu=on_gpu,
        )

    weight_bytes = parameters * np_dtype(dtype).itemsize // tp
    settings = settings_for(devices[0].memory_stats()["bytes_limit"] - weight_bytes if on_gpu else _CPU_KV_BYTES)
    draft = plan.load(mesh) if plan else None  # small, and its data may be refused
    model, params = load_params(folder, mesh, dtype)
    if probe and settings.prefix_caching:
        raise ConfigError("a probe sees every token of every prompt: switch enable_prefix_caching off")
    step_log = StepLog(config.log_steps) if config.log_steps else None

    def make_runner(settings: Settings, buckets: "tuple[Bucket, ...] | None" = None) -> Runner:
        return Runner(model, params, settings, mesh, draft=draft, buckets=buckets, probe=probe)

    if on_gpu and config.num_gpu_blocks_override is None:
        settings = settings_for(measure_free_bytes(make_runner, settings, page_bytes, mesh.devices.flat))
    runner = make_runner(settings)
    engine = Engine(
        runner,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        seed=config.seed,
        observer=observer,
        step_log=step_log,
    )
    tokens = (settings.num_pages - 1) * settings.page_size
    description: dict[str, str | int] = {
        "Architecture": model_config.architecture,
        "Parameters": f"{parameters:,}",
        "Dtype": dtype,
        "Device": f"{tp} x {devices[0].device_kind} ({devices[0].platform})",
        "Speculation": f"{plan.name}, {settings.num_speculative_tokens} tokens a step" if plan else "off",
        **_synthetic(settings.synthetic_acceptance_length),
        "Context length": settings.max_model_len,
        "KV cache bytes per token": page_bytes // PAGE_SIZE,
        "KV cache": f"{settings.num_pages - 1} pages, {tokens:,} tokens, {settings.num_pages * page_bytes / 2**20:.0f} MiB",
        "Maximum concurrency": f"{tokens / settings.max_model_len:.2f}x at {settings.max_model_len} tokens a request",
        "Buckets": "; ".join(map(str, runner.buckets)),
    }
    return engine, description


def _synthetic(length: float | None) -> dict[str, str | int]:
    return {} if length is None else {"Synthetic acceptance": f"{length:g} tokens a window; the text is worthless"}
