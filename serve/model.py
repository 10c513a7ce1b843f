"""What the server needs of a model: an engine, a tokenizer, a name, and how it was loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from jaxspec.grammar.thought import reasoning_parser_name
from serve.parsers.registry import tool_parser_name

if TYPE_CHECKING:
    from jaxspec.config import EngineConfig, Settings
    from jaxspec.engine.engine import EngineStats
    from jaxspec.engine.output import RequestOutput
    from jaxspec.engine.request import Request
    from jaxspec.grammar.compiler import GrammarCompiler
    from jaxspec.text import Tokenizer

Progress = Callable[[int, int, str], None]


class EngineLike(Protocol):
    """The part of `jaxspec.engine.engine.Engine` that the server uses."""

    @property
    def has_work(self) -> bool: ...
    @property
    def max_model_len(self) -> int: ...
    def add(self, *requests: "Request") -> None: ...
    def abort(self, request_id: str) -> None: ...
    def prepare(self) -> bool: ...
    @property
    def steps_in_flight(self) -> int: ...
    def dispatch_ahead(self) -> None: ...
    def read_oldest(self) -> "list[RequestOutput]": ...
    def stats(self) -> "EngineStats": ...


@dataclass(frozen=True)
class ServedModel:
    """Attributes:
    tokenizer: None where the model folder has none: then only token ids are served.
    description: label -> value, for the start-up message.
    compile_counts: compilations since the process started, and those after warm-up.
    synthetic_acceptance_length: the engine's option: where it is set, every answer says so.
    cache_config: of the KV pages, for /metrics, by vLLM's names.
    grammars: compile structured outputs; None: these are refused.
    sampling_defaults: parameters that apply to a request which does not name them.
    """

    engine: EngineLike
    tokenizer: "Tokenizer | None"
    description: Mapping[str, str | int] = field(default_factory=dict)
    compile_counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
    synthetic_acceptance_length: float | None = None
    cache_config: Mapping[str, str] = field(default_factory=dict)
    grammars: "GrammarCompiler | None" = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


def with_chat_template(model: ServedModel, source: str | None) -> ServedModel:
    """The model with another chat template, if one is given.

    Raises:
        ModelFormatError: the template cannot be used.
    """
    if source is None or model.tokenizer is None:
        return model
    return replace(model, tokenizer=model.tokenizer.with_chat_template(source))


def with_formats(model: ServedModel, tools: str | None, reasoning: str | None) -> ServedModel:
    """The model, described with the parsers of its output.

    Args:
        tools, reasoning: chosen names; None: as its template has it.
    """
    template = model.tokenizer.chat_template if model.tokenizer else ""
    names = {"Tool calls": tool_parser_name(tools, template), "Reasoning": reasoning_parser_name(reasoning, template)}
    return replace(model, description={**model.description, **{label: name for label, name in names.items() if name}})


def load_model(
    model: str, config: "EngineConfig", revision: str | None, progress: Progress, **defaults: Any
) -> ServedModel:
    """Loads and warms up. Imports jax, so it runs on the engine thread, long after the port is bound.

    Args:
        defaults: generation_config and override_generation_config of `LLM`.
    """
    from jaxspec.compat import compiles
    from jaxspec.llm import LLM

    # Where no request runs, the engine thread makes more ready for grammars.
    llm = LLM(
        model, config, revision=revision, progress=progress, wait_for_all=False, prepare_grammars=True, **defaults
    )
    return ServedModel(
        llm.engine,
        llm.tokenizer,
        llm.describe(),
        lambda: (compiles.total, compiles.after_warmup),
        config.synthetic_acceptance_length,
        cache_config(llm.engine.settings, config),
        llm.grammars,
        llm.sampling_defaults,
    )


def cache_config(settings: "Settings", config: "EngineConfig") -> dict[str, str]:
    """The KV pages of all ranks by vLLM's names, those for padding left out: pages times their size is what requests have."""
    pages = settings.data_parallel_size * (settings.num_pages - 1)
    tokens = pages * settings.page_size
    return {
        "block_size": str(settings.page_size),
        "num_gpu_blocks": str(pages),
        "num_cpu_blocks": "0",
        "cache_dtype": {"auto": settings.dtype, "bf16": "bfloat16"}.get(config.kv_cache_dtype, config.kv_cache_dtype),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "enable_prefix_caching": str(settings.prefix_caching),
        "kv_cache_size_tokens": str(tokens),
        "kv_cache_max_concurrency": f"{tokens / settings.max_model_len:.2f}",
    }
