"""The interface of a draft. The step, the runner and the loader depend on it, not on a kind of draft.

A draft reads, for each token of the target's step, the pair (embedding of the next token, something of the target's
hidden states at this one), and goes on from its own hidden state: token p + 1 pairs with hidden state p, at position p.
"""

from typing import Protocol

import jax

from jaxspec.models.cache import CacheSpec, LayerCache
from jaxspec.models.decoder import CausalLM
from jaxspec.models.metadata import LiveRows, StepMetadata


class Draft(Protocol):
    """One draft layer with a paged cache of its own, under the target's page ids. An nnx module.

    Attributes:
        capture: ascending ids of the target's residual streams that `features` reads; see `CausalLM.__call__`.
        cache_spec: of its layer.
    """

    capture: tuple[int, ...]

    @property
    def cache_spec(self) -> CacheSpec: ...

    def features(self, hidden_TH: jax.Array, captured: tuple[jax.Array, ...]) -> jax.Array:
        """The draft's input from the target, [T, H]: of its final-normed hidden states and the captured streams."""
        ...

    def embed_ids(self, target: CausalLM, ids_T: jax.Array) -> jax.Array:
        """[T, H] of ids int32 [T]."""
        ...

    def __call__(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, cache: LayerCache, meta: StepMetadata
    ) -> tuple[jax.Array, LayerCache]:
        """Hidden states [T, H] for `logits` and for the next draft step's `hidden_TH`, and the written cache."""
        ...

    def catch_up(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata
    ) -> tuple[jax.Array, LayerCache]:
        """As a call over all T tokens, but hidden states [R, H] of the live tokens alone; see `Block.catch_up`."""
        ...

    def write_keys(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, cache: LayerCache, meta: StepMetadata
    ) -> LayerCache:
        """The written cache of a call over all T tokens and nothing else: what a step needs that proposes no drafts.

        With it a later step can draft: it goes on from its own target's hidden states and needs none of this step's.
        """
        ...

    def logits(self, target: CausalLM, hidden_RH: jax.Array) -> jax.Array:
        """[R, V] over the target's vocabulary, in its columns; -inf for tokens that the draft cannot propose."""
        ...
