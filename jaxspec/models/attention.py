"""The interface of an attention module. The decoder and the drafts depend on it, not on a kind of attention."""

from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx

from jaxspec.models.cache import CacheSpec, LayerCache
from jaxspec.models.layers import Attended, RMSNorm
from jaxspec.models.metadata import LiveRows, StepMetadata


class Attention(Protocol):
    """An nnx module with its own cache. `rope` holds the tables of its spec's rotary embedding, or None."""

    @property
    def cache_spec(self) -> CacheSpec:
        """The layer's cache."""
        ...

    def __call__(
        self,
        x_TH: jax.Array,
        cache: LayerCache,
        meta: StepMetadata,
        rope: Any,
        norm: RMSNorm | None = None,
    ) -> tuple[Attended, LayerCache]:
        """Writes the cache of all T tokens, then attends: [T, input_dim], `norm` of it if given, -> [T, H].

        The result, and that of `catch_up`, may be in parts, and of one device: see `Attended`.
        """
        ...

    def catch_up(
        self, x_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata, rope: Any
    ) -> tuple[Attended, LayerCache]:
        """Writes the cache of all T tokens but attends for the R live ones only, each like a decode window of one.

        [T, input_dim], normed -> [R, H].
        """
        ...

    def write_keys(self, x_TH: jax.Array, cache: LayerCache, meta: StepMetadata, rope: Any) -> LayerCache:
        """Writes the cache of all T tokens, [T, input_dim], normed, and attends for none."""
        ...


@runtime_checkable
class NeedsKernels(Protocol):
    """An `Attention` that is plain XLA on a GPU only where that is asked for: there it takes many times as long."""

    def kernels_missing(self, dtype: Any) -> str | None:
        """What of it no kernel runs on this GPU, and why; None if kernels run it. `dtype`: of activations."""
        ...


def kernels_missing(model: nnx.Module, dtype: Any) -> str | None:
    """Of the first layer that needs kernels and has not all of them; None if no layer is so."""
    layers = (module for _, module in nnx.iter_modules(model) if isinstance(module, NeedsKernels))
    return next((missing for layer in layers if (missing := layer.kernels_missing(dtype))), None)
