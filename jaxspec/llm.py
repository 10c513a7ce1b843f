"""`LLM`: a model folder in, text out. Joins loading, tokenizer and engine; the server builds on it too."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxspec.config import DEFAULT_SPECULATIVE_TOKENS, EngineConfig, with_speculative_config
from jaxspec.engine.request import Alternatives, FinishReason, Request
from jaxspec.errors import InvalidRequestError
from jaxspec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.engine.acceptance import Acceptance
    from jaxspec.engine.runner import Progress
    from jaxspec.text import TextStream

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
        from jaxspec.loading.engine import build_engine
        from jaxspec.loading.resolve import DEMO, resolve_model
        from jaxspec.loading.tokenizer_files import load_tokenizer

        if config.num_speculative_tokens is None and (model == DEMO or config.speculative_model is not None):
            config = replace(config, num_speculative_tokens=DEFAULT_SPECULATIVE_TOKENS)
        self.model_name = model
        self.folder = resolve_model(model, revision=revision)
        self.tokenizer = load_tokenizer(self.folder)
        self.engine, description = build_engine(self.folder, config, probe=probe, observer=observer)
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
