"""`LLM`: a model folder in, text out. Joins loading, tokenizer and engine; the server builds on it too."""

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxspec.config import DEFAULT_SPECULATIVE_TOKENS, EngineConfig, with_options
from jaxspec.engine.output import Alternatives, FinishReason, RequestOutput
from jaxspec.engine.request import Request
from jaxspec.errors import InvalidRequestError
from jaxspec.grammar.thought import NO_PREFACE, Preface, answer_preface, prompt_end, reasoning_parser
from jaxspec.progress import COMPILING, Progress, PromptsBar, StartBar, wants_bar
from jaxspec.sampling.params import SamplingParams
from jaxspec.speculative_config import with_speculative_config

if TYPE_CHECKING:
    from jaxspec.engine.acceptance import Acceptance
    from jaxspec.engine.follower import Follower
    from jaxspec.engine.leader import Leader

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Completion:
    """The result for one prompt.

    Attributes:
        text: None where the model has no tokenizer.
        text_offsets: of each id, the number of characters of the text before it; empty where there is no text.
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
    text_offsets: tuple[int, ...] = ()
    accepted: tuple[bool, ...] = ()
    acceptance: "Acceptance | None" = None
    synthetic_acceptance_length: float | None = None


def _prepare_allocator(config: EngineConfig) -> None:
    """The allocator reads this when jax first touches the GPU, and takes that part of its memory."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(config.gpu_memory_utilization))


def _open_device(config: EngineConfig) -> None:
    """Begins to open the device, on a thread: a GPU takes seconds, in which the rest is imported.

    The first array makes the allocator take its part of the memory, which the driver clears: seconds too. What fails fails
    again where the device is needed. The process waits for the thread if it ends before. Several devices are opened later,
    after `switch_multicast_off`.
    """

    def open_device() -> None:
        with contextlib.suppress(RuntimeError):
            jax.device_put(0, jax.devices()[0]).block_until_ready()

    if config.tensor_parallel_size * config.data_parallel_size == 1:
        import jax

        threading.Thread(target=open_device, name="open device").start()


def with_default_drafts(config: EngineConfig, model: str) -> EngineConfig:
    """The configuration with the number of drafts that it leaves open, where something drafts."""
    from jaxspec.loading.resolve import DEMO

    drafts = config.speculative_model is not None or config.speculative_method is not None
    if config.num_speculative_tokens is None and (model == DEMO or drafts):
        return replace(config, num_speculative_tokens=DEFAULT_SPECULATIVE_TOKENS)
    return config


def follow(
    model: str,
    config: EngineConfig,
    group: "Follower",
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Loads a model as `LLM` does, and launches what rank 0 of the group orders until that ends as it should.

    Raises:
        ModelFormatError, ConfigError: as `LLM`. GroupError: the group has ended otherwise.
    """
    _prepare_allocator(config)
    from jaxspec.compat import compiles
    from jaxspec.engine import following
    from jaxspec.loading.engine import build_follower
    from jaxspec.loading.join import join
    from jaxspec.loading.resolve import resolve_model

    config = with_default_drafts(config, model)
    folder = resolve_model(model, revision=revision)
    join(group, folder, config, progress)
    runner = build_follower(folder, config, group, progress=progress)
    compiling = _Compiling(progress)
    runner.warm_up(compiling.finished, announce=compiling.begins)
    compiles.mark_warm()
    following.follow(runner.launcher, group)


class LLM:
    """A model, loaded and warmed up.

    Attributes:
        sampling_defaults: parameters that apply to a request which does not name them, by name.

    Args:
        model: "demo" (the embedded one), a converted folder, a Hugging Face folder or a hub id.
        config: engine options; single options may be given by name instead, as in `LLM("demo", max_num_seqs=4)`.
        speculative_config: speculation as vLLM has it: see `with_speculative_config`.
        revision: hub revision, for hub ids.
        generation_config: where the sampling parameters of `get_default_sampling_params` come from: "auto" (the model's own
            generation_config.json), "none" or "vllm" (nowhere), or a folder with such a file.
        override_generation_config: single values of these, as in `{"temperature": 0.6}`; None takes one away.
        progress: called with (done, total, what) while weights load and steps compile; see `jaxspec.progress`.
        use_tqdm: show bars meanwhile, on standard error (default: if that is a terminal, and `progress` is not given).
        wait_for_all: False: on a GPU some buckets may still compile when this returns, and larger ones serve until then.
        prepare_grammars: True: structured outputs are made ready too, so that the first one need not wait a second or two.
        probe, observer: see `Runner` and `Engine`; for `compare`.
        group: of processes that load and serve this model together, of which this is rank 0.

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
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        use_tqdm: bool | None = None,
        wait_for_all: bool = True,
        prepare_grammars: bool = False,
        probe: bool = False,
        observer: Any = None,
        group: "Leader | None" = None,
        **options: Any,
    ):
        config = with_options(config or EngineConfig(), options)
        if speculative_config is not None:
            config = with_speculative_config(config, speculative_config)
        _prepare_allocator(config)
        if group is None:
            _open_device(config)
        from jaxspec.grammar.compiler import GrammarCompiler
        from jaxspec.loading.engine import build_engine
        from jaxspec.loading.generation_config import sampling_defaults
        from jaxspec.loading.join import join
        from jaxspec.loading.resolve import resolve_model
        from jaxspec.loading.tokenizer_files import load_tokenizer

        config = with_default_drafts(config, model)
        self.model_name = model
        self.folder = resolve_model(model, revision=revision)
        # Beside the weights: transformers alone takes a second to import.
        thread = ThreadPoolExecutor(1, "tokenizer")
        tokenizer = thread.submit(load_tokenizer, self.folder)
        thread.shutdown(wait=False)
        defaults = sampling_defaults(self.folder, str(generation_config), override_generation_config)
        self.sampling_defaults: Mapping[str, float] = defaults.values
        self._counter = itertools.count()
        if progress is None and wants_bar(use_tqdm):
            progress = StartBar()
        started = time.monotonic()
        if group is not None:
            join(group, self.folder, config, progress)
        self.engine, description = build_engine(
            self.folder, config, progress=progress, probe=probe, observer=observer, group=group
        )
        try:
            self.tokenizer = tokenizer.result()
        except BaseException:
            self.engine.runner.stop()
            raise
        self.grammars = GrammarCompiler(self.tokenizer, self.engine.vocab_size, self.engine.eos_token_ids)
        compiling = _Compiling(progress)
        with ThreadPoolExecutor(1, "vocabulary") as thread:
            # Beside the steps, which wait for the device more than for Python.
            prepared = thread.submit(self.grammars.prepare) if prepare_grammars else None
            self.engine.warm_up(compiling.finished, announce=compiling.begins, wait_for_all=wait_for_all)
        if prepared is not None:
            prepared.result()
        seconds = time.monotonic() - started
        logger.info("init engine (load weights, create kv cache, warmup model) took %.2f seconds", seconds)
        kernels = (f"{name} {'/'.join(sorted(ran))}" for name, ran in sorted(self.engine.runner.kernels.items()))
        self._description = {
            "Model": f"{model} ({self.folder})",
            **description,
            "Kernels": ", ".join(kernels),
            "Sampling defaults": str(defaults),
        }
        logger.info("Default sampling parameters of requests: %s", defaults)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of `generate` and `chat` where none are given: the model's own (`generation_config`)."""
        defaults: dict[str, Any] = dict(self.sampling_defaults)
        return SamplingParams(**defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[Completion]:
        """Completions of one or many prompts (texts or token ids), in their order; where n > 1, n of each, side by side.

        Args:
            params: by default `get_default_sampling_params()`; nothing is added to those that are given.
            use_tqdm: show a bar of the prompts that are done (default: if standard error is a terminal).

        Raises:
            InvalidRequestError: a prompt or parameter that cannot be served; then nothing is generated.
        """
        batch = _as_batch(prompts)
        return self._run_choices(batch, params, [NO_PREFACE] * len(batch), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[Completion]:
        """Answers to one conversation or to many, through the model's chat template; otherwise as `generate`.

        Structured outputs are for the answer: where the model thinks, they begin after its thought, which the text has too.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first, both texts.
            add_generation_prompt: the template opens the assistant's answer.
            chat_template_kwargs: other variables of the template, such as `enable_thinking`.

        Raises:
            InvalidRequestError: as `generate`; also messages that are none, and a model without a chat template.
        """
        prompts = [
            self.chat_prompt(
                each, add_generation_prompt=add_generation_prompt, chat_template_kwargs=chat_template_kwargs
            )
            for each in _as_chats(messages)
        ]
        prefaces = [self.chat_preface(ids, chat_template_kwargs) for ids in prompts]
        return self._run_choices(prompts, params, prefaces, use_tqdm)

    def chat_prompt(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a conversation, for `generate` and `stream`.

        Raises:
            InvalidRequestError: see `chat`.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer, so it cannot chat: use generate", param="messages")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise InvalidRequestError(f"messages[{index}] must have role and content", param="messages")
            for name in ("role", "content"):
                if not isinstance(message.get(name), str):
                    raise InvalidRequestError(f"messages[{index}].{name} must be a text", param="messages")
        return self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            limit=self.engine.max_model_len,
            variables=chat_template_kwargs,
        )

    def chat_preface(self, prompt_ids: Sequence[int], chat_template_kwargs: Mapping[str, Any] | None = None) -> Preface:
        """What may come before an answer's structured output, for `stream` and `make_request`: as `chat` has it.

        Args:
            prompt_ids: of `chat_prompt`, with the same `chat_template_kwargs`.
        """
        if self.tokenizer is None:
            return NO_PREFACE
        thoughts = reasoning_parser(None, self.tokenizer.chat_template)
        return answer_preface(thoughts, prompt_end(self.tokenizer, prompt_ids), chat_template_kwargs or {})

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, preface: Preface = NO_PREFACE
    ) -> Iterator[RequestOutput]:
        """The outputs for one prompt, one a step, as they come. Who stops reading aborts the request.

        Args:
            preface: as in `make_request`.

        Raises:
            InvalidRequestError: as `generate`, and for n > 1.
        """
        params = params or self.get_default_sampling_params()
        if params.n != 1:
            raise InvalidRequestError("a stream has one output: use generate", param="n")
        request = self.make_request(prompt, params, preface)
        request_id = request.id
        self.engine.add(request)
        try:
            while True:
                for output in self.engine.step():
                    if output.request_id == request_id:
                        yield output
                        if output.finish_reason is not None:
                            return
        finally:
            self.engine.abort(request_id)

    def make_request(self, prompt: Prompt, params: SamplingParams, preface: Preface = NO_PREFACE) -> Request:
        """A request for `run`.

        Args:
            preface: what may come before what `params.structured_outputs` asks for.

        Raises:
            InvalidRequestError: it needs a tokenizer and the model has none, or the prompt is an empty text.
        """
        from jaxspec.grammar.rule import output_rule

        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("the model has no tokenizer: give the prompt as token ids", param="prompt")
            if not prompt:  # the tokenizer may still put a begin token there
                raise InvalidRequestError("the prompt is empty", param="prompt")
            prompt = self.tokenizer.encode(prompt)
        asked = params.structured_outputs
        rule = output_rule(self.tokenizer, prompt, params, self.grammars.compile(asked, preface) if asked else None)
        return Request(f"generate-{next(self._counter)}", prompt, params, rule)

    def run(self, requests: Sequence[Request], bar: PromptsBar | None = None) -> list[Completion]:
        """Runs requests to their end; aborts them all if it is interrupted.

        Args:
            bar: shows how many have ended.

        Raises:
            InvalidRequestError: the engine cannot serve one of them; then none has run.
        """
        runs = {r.id: _Run(tuple(r.prompt_ids), r.params, has_text=r.rule is not None) for r in requests}
        self.engine.add(*requests)
        try:
            while any(run.finish_reason is None for run in runs.values()):
                for output in self.engine.step():
                    if output.request_id not in runs:  # aborted before
                        continue
                    run = runs[output.request_id]
                    run.outputs.append(output)
                    if bar:
                        finished = output.finish_reason is not None
                        bar.add(len(run.prompt_ids), len(output.new_ids), finished=finished)
        finally:
            for request_id in runs:
                self.engine.abort(request_id)
        synthetic = self.engine.settings.synthetic_acceptance_length
        return [run.completion(synthetic) for run in runs.values()]

    def _run_choices(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        prefaces: Sequence[Preface],
        use_tqdm: bool | None,
    ) -> list[Completion]:
        """See `generate`. `prefaces`: of each prompt."""
        each = (
            list(params)
            if isinstance(params, Sequence)
            else [params or self.get_default_sampling_params()] * len(prompts)
        )
        if len(each) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts but {len(each)} sampling parameters", param="params")
        requests = [
            self.make_request(prompt, one, preface)
            for prompt, p, preface in zip(prompts, each, prefaces, strict=True)
            for one in p.choices()
        ]
        if not wants_bar(use_tqdm):
            return self.run(requests)
        with contextlib.closing(PromptsBar(len(requests))) as bar:
            return self.run(requests, bar)

    def describe(self) -> dict[str, str | int]:
        """What was loaded and how it runs, for people: label -> value, in order."""
        return self._description


class _Compiling:
    """Tells a `Progress` in words how far the compilation of the steps is."""

    def __init__(self, progress: Progress | None):
        self._progress = progress
        self._done = 0

    def begins(self, number: int, total: int, what: str) -> None:
        if self._progress:
            self._progress(self._done, total, f"{COMPILING} {number} of {total}: {what}")

    def finished(self, done: int, total: int, what: str) -> None:
        self._done = done
        if self._progress:
            self._progress(done, total, f"Compiled {done} of {total} after {what.rpartition(': ')[2]}")


@dataclass
class _Run:
    """What was asked of the engine with one request, and its outputs so far."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    has_text: bool
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    def completion(self, synthetic_acceptance_length: float | None) -> Completion:
        """Of a run that has ended."""
        outputs, last = self.outputs, self.outputs[-1]
        assert last.finish_reason is not None
        assert last.stats is not None
        return Completion(
            prompt_ids=self.prompt_ids,
            ids=tuple(i for o in outputs for i in o.new_ids),
            text="".join(o.new_text for o in outputs) if self.has_text else None,
            finish_reason=last.finish_reason.value,
            logprobs=None if self.params.logprobs is None else tuple(p for o in outputs for p in o.new_logprobs),
            error=last.error,
            top_logprobs=tuple(a for o in outputs for a in o.new_alternatives) if self.params.logprobs else None,
            text_offsets=tuple(offset for o in outputs for offset in o.new_text_offsets),
            accepted=tuple(i < o.num_accepted for o in outputs for i in range(len(o.new_ids))),
            acceptance=last.stats.acceptance,
            synthetic_acceptance_length=synthetic_acceptance_length,
        )


def _as_chats(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    chats: list[Any] = list(messages)
    return [chats] if not chats or isinstance(chats[0], Mapping) else chats


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch: list[Any] = list(prompts)
    return [batch] if batch and all(isinstance(p, int) for p in batch) else batch
