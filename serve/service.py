"""What all endpoints share: the engine thread, the model's names, the tokenising pool, and admission."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jaxspec.errors import InvalidRequestError
from jaxspec.grammar.rule import CompiledGrammar, output_rule
from jaxspec.grammar.thought import NO_PREFACE, Preface
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.structured import StructuredOutputsParams
from jaxspec.text import Tokenizer
from serve.admission import Admission
from serve.byte_budget import ByteBudget
from serve.connection_table import ConnectionLimits, ConnectionTable
from serve.cors import Cors
from serve.deadlines import NO_DEADLINES, Deadlines
from serve.engine_thread import EngineThread, Phase
from serve.errors import ApiError, quoted, unavailable
from serve.generation import Choice, Submission
from serve.limits import ENGINE_TIMEOUT
from serve.metrics import Metrics
from serve.model import Progress, ServedModel
from serve.request_info import request_info
from serve.request_metrics import PromptGroup
from serve.speculation import AcceptanceLog
from serve.text_pool import TextPool, text_bytes
from serve.throughput import LOG_SECONDS, ThroughputLog, write_every
from serve.tls import Tls

T = TypeVar("T")

# Bodies that are being read: what each holds beyond a share that every connection may have.
MAX_ALL_BODY_BYTES = 64 * 2**20
# How long a device step may take to end once the server stops.
ENGINE_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class ServerSettings:
    """
    Attributes:
        model: what to serve, as the user named it.
        served_model_names: names that clients may use; by default the last part of `model`.
        api_keys: any of them opens all paths; none means that no key is needed.
        metrics_prefix: in front of all Prometheus names.
        max_num_queued_requests: most choices that may wait for their first step.
        root_path: where a proxy has the server, without a slash at its end.
        log_stats: log throughput and acceptance every few seconds.
        tls: None for plain HTTP.
        deadlines: of each request.
        engine_timeout: seconds that a step may take; None: no limit.
        connections: how many, and how slow they may be.
        tool_call_parser, reasoning_parser: names of `serve.parsers.registry` and of `jaxspec.grammar.thought`; None: as the
            model's template has it.
    """

    model: str
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    metrics_prefix: str = "jaxspec"
    max_num_queued_requests: int = 1024
    root_path: str = ""
    log_stats: bool = True
    tls: Tls | None = None
    cors: Cors = field(default_factory=Cors)
    deadlines: Deadlines = NO_DEADLINES
    engine_timeout: float | None = ENGINE_TIMEOUT
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_names or (Path(self.model).name or self.model,)


class Service:
    """
    Attributes:
        draining: the server is about to end and accepts no new requests.
        in_flight: HTTP requests being answered, the health checks not counted.
        engine_stop_seconds: how long `close` waits for the step that runs.
        connections: all open ones.
        body_bytes: what bodies that are being read hold in memory.
        texts: the threads that tokenise.
    """

    def __init__(
        self,
        settings: ServerSettings,
        load: Callable[[Progress], ServedModel],
        *,
        on_phase: Callable[[Phase], None] = lambda _phase: None,
        log_seconds: float = LOG_SECONDS,
        **engine_options: Any,
    ):
        self.settings = settings
        self.metrics = Metrics(settings.names[0], settings.metrics_prefix)
        self.admission = Admission(
            settings.max_num_queued_requests, lambda: self.engine_thread.num_queued, self.metrics
        )
        self.engine_thread = EngineThread(
            load,
            self.metrics,
            on_phase=on_phase,
            on_started=self.admission.started,
            deadlines=settings.deadlines,
            engine_timeout=settings.engine_timeout,
            **engine_options,
        )
        self.connections = ConnectionTable(settings.connections)
        self.body_bytes = ByteBudget(MAX_ALL_BODY_BYTES)
        self.texts = TextPool()
        self._log_seconds = log_seconds
        self._log_task: asyncio.Task[None] | None = None
        self.created = int(time.time())
        self.draining = False
        self.in_flight = 0
        self.engine_stop_seconds = ENGINE_STOP_SECONDS

    def start(self) -> None:
        """On the event loop: starts the engine thread, which loads the model."""
        if self.settings.log_stats:
            logs = [kind(lambda: self.metrics.snapshot) for kind in (ThroughputLog, AcceptanceLog)]
            self._log_task = asyncio.get_running_loop().create_task(write_every(self._log_seconds, *logs))
        self.engine_thread.start()

    async def close(self) -> None:
        if self._log_task is not None:
            self._log_task.cancel()
        self.texts.close()
        # A model that is still loading cannot be interrupted.
        loading = self.engine_thread.phase is Phase.LOADING
        await self.engine_thread.stop(0.0 if loading else self.engine_stop_seconds)

    def model(self) -> ServedModel:
        """The model, for a request that wants to use it now.

        Raises:
            ApiError: 503 while it loads, when it is stuck or has failed, and while the server drains.
        """
        if self.draining:
            raise unavailable("the server is shutting down")
        phase, model = self.engine_thread.phase, self.engine_thread.model
        if phase is Phase.LOADING or model is None:
            raise unavailable("the model is loading")
        if phase is not Phase.READY:
            raise unavailable("the engine has stopped")
        if not self.engine_thread.healthy:
            raise unavailable("an engine step takes unusually long")
        return model

    def resolve_name(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: 404 for a name that is not served.
        """
        if name is None:
            return self.settings.names[0]
        if name not in self.settings.names:
            served = ", ".join(self.settings.names)
            raise ApiError(
                404,
                f"the model {quoted(name)} does not exist (served: {served})",
                param="model",
                code="model_not_found",
            )
        return name

    def tokenizer(self) -> Tokenizer:
        """
        Raises:
            InvalidRequestError: the model has none.
        """
        tokenizer = self.model().tokenizer
        if tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer: send the prompt as token ids", param="prompt")
        return tokenizer

    def reject_too_long(self, texts: Iterable[str], param: str) -> None:
        """Rejects texts that cannot fit the context without encoding them.

        Raises:
            InvalidRequestError: they cannot.
        """
        limit = self.model().engine.max_model_len
        least = sum(map(self.tokenizer().least_tokens, texts))
        if least >= limit:
            raise InvalidRequestError(
                f"the prompt has at least {least} tokens, but the maximum context length is {limit} tokens",
                param=param,
                code="context_length_exceeded",
            )

    async def in_pool(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs what may take long on a long text off the event loop, within the request's deadlines.

        Raises:
            ApiError: 429: too much text is in work; 504: a deadline has passed.
        """
        work = self.texts.run(partial(function, *args, **kwargs), text_bytes([*args, *kwargs.values()]))
        return await self.settings.deadlines.bound_waiting(work, request_info().arrival)

    async def compiled_grammar(
        self, asked: StructuredOutputsParams | None, preface: Preface = NO_PREFACE, *, param: str | None = None
    ) -> CompiledGrammar | None:
        """What is asked, compiled off the event loop; None where nothing is.

        Args:
            preface: what comes in front of it.
            param: the field that errors name, where the grammar is not what the client wrote.

        Raises:
            InvalidRequestError: it cannot be compiled, or this model serves none.
        """
        if asked is None:
            return None
        grammars = self.model().grammars
        if grammars is None:
            raise InvalidRequestError("this model serves no structured outputs", param="structured_outputs")
        try:
            return await self.in_pool(lambda _source: grammars.compile(asked, preface), asked.source)
        except InvalidRequestError as error:
            if param is None:
                raise
            reason = str(error).partition(": ")[2]
            raise InvalidRequestError(
                f"the schemas of these {param} cannot be held to: {reason}", param=param
            ) from error

    def make_choices(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        priority: int,
        cache_salt: str,
        arrival_time: float,
        grammar: CompiledGrammar | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> list[Choice]:
        """One choice for each prompt and each of `params`, prompts first, as OpenAI numbers them.

        Args:
            grammar: what `compiled_grammar` gave.
            shown: special tokens that the text has even where it leaves the others out.

        Raises:
            InvalidRequestError: stop strings, where the model has no tokenizer.
        """
        tokenizer = self.model().tokenizer
        prefix = uuid.uuid4().hex
        groups = [PromptGroup(len(params)) for _ in prompts]
        asked = [(*prompt, each) for prompt in zip(prompts, groups, strict=True) for each in params]
        return [
            Choice(
                index,
                Submission(
                    f"{prefix}-{index}",
                    prompt_ids,
                    each,
                    output_rule(tokenizer, prompt_ids, each, grammar, shown=shown),
                    priority=priority,
                    cache_salt=cache_salt,
                    arrival_time=arrival_time,
                    group=group,
                ),
            )
            for index, (prompt_ids, group, each) in enumerate(asked)
        ]
