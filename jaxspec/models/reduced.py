"""A draft that proposes only the most frequent tokens: its head is a part of a larger one's rows (arXiv 2502.14856).

Reading the head is much of what a draft step costs, and what is never proposed is still emitted: by the target itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.cache import CacheSpec, LayerCache
from jaxspec.models.decoder import CausalLM, Embedding, logits_at
from jaxspec.models.draft import Draft
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.params import Declare


class Reduced(nnx.Module):
    """`inner` with a head of `size` rows, where it would use the target's. A `Draft`.

    Args:
        inner: a draft without a head of its own.
        size: rows of the head. Those of the target's head have its `logit_scale` in them.
        vocab_size, hidden: of the target.
    """

    def __init__(self, inner: Draft, size: int, vocab_size: int, hidden: int, dtype: Any):
        declare = Declare(dtype)
        self.inner: Any = inner
        self.vocab_size = vocab_size
        self.capture = inner.capture
        self.head = Embedding(size, hidden, declare)
        # Target ids of the rows, ascending.
        self.ids = declare((size,), (None,), "zeros", jnp.int32)

    @property
    def cache_spec(self) -> CacheSpec:
        return self.inner.cache_spec

    def features(self, hidden_TH: jax.Array, captured: tuple[jax.Array, ...]) -> jax.Array:
        return self.inner.features(hidden_TH, captured)

    def embed_ids(self, target: CausalLM, ids_T: jax.Array) -> jax.Array:
        return self.inner.embed_ids(target, ids_T)

    def __call__(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, cache: LayerCache, meta: StepMetadata
    ) -> tuple[jax.Array, LayerCache]:
        return self.inner(embedded_TH, hidden_TH, cache, meta)

    def catch_up(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata
    ) -> tuple[jax.Array, LayerCache]:
        return self.inner.catch_up(embedded_TH, hidden_TH, live, cache, meta)

    def write_keys(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, cache: LayerCache, meta: StepMetadata
    ) -> LayerCache:
        return self.inner.write_keys(embedded_TH, hidden_TH, cache, meta)

    def logits(self, target: CausalLM, hidden_RH: jax.Array) -> jax.Array:  # noqa: ARG002
        return self.inner.logits(_Head(self), hidden_RH)


class _Head:
    """Stands in for the target in `Draft.logits`: its head, of which most rows are missing."""

    def __init__(self, reduced: Reduced):
        self._reduced = reduced

    def logits(self, hidden_RH: jax.Array) -> jax.Array:
        logits = self._reduced.head.logits(hidden_RH)
        return logits_at(self._reduced.ids[...], logits, self._reduced.vocab_size)
