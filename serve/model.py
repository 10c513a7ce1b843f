"""What the server needs of a model: an engine, a tokenizer, a name, and how it was loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from jaxspec.config import EngineConfig
    from jaxspec.engine.engine import EngineStats
    from jaxspec.engine.output import RequestOutput
    from jaxspec.engine.request import Request
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
    def step(self) -> "list[RequestOutput]": ...
    def stats(self) -> "EngineStats": ...


@dataclass(frozen=True)
class ServedModel:
    """Attributes:
    tokenizer: None where the model folder has none: then only token ids are served.
    description: label -> value, for the start-up message.
    compile_counts: compilations since the process started, and those after warm-up.
    synthetic_acceptance_length: the engine's option: where it is set, every answer says so.
    """

    engine: EngineLike
    tokenizer: "Tokenizer | None"
    description: Mapping[str, str | int] = field(default_factory=dict)
    compile_counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
    synthetic_acceptance_length: float | None = None


def load_model(model: str, config: "EngineConfig", revision: str | None, progress: Progress) -> ServedModel:
    """Loads and warms up. Imports jax, so it runs on the engine thread, long after the port is bound."""
    from jaxspec.compat import compiles
    from jaxspec.llm import LLM

    llm = LLM(model, config, revision=revision, progress=progress)
    return ServedModel(
        llm.engine,
        llm.tokenizer,
        llm.describe(),
        lambda: (compiles.total, compiles.after_warmup),
        config.synthetic_acceptance_length,
    )
