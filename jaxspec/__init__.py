"""jaxspec: a JAX inference engine for multi-head latent attention models, built for speculative decoding."""

from typing import TYPE_CHECKING, Any

from jaxspec import log_filters
from jaxspec.config import EngineConfig
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxspec.llm import LLM, Completion

log_filters.install()

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "EngineConfig", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import jaxspec` (and the CLI's --help) does not import jax.
    if name in ("LLM", "Completion"):
        from jaxspec import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
