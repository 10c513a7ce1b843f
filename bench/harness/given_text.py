"""Models whose texts are given: they compute all that they would, then their logits say what the text does.

So acceptance and text are a benchmark's choice while a step's work is the real one, with no host in between. The id to say
travels behind a hidden state's columns, in digits that bfloat16 holds exactly, and its logit is raised above all others.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.cache import CacheSpec, LayerCache
from jaxspec.models.decoder import Cache, ModelOutput
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.params import Declare

# Above every logit of a model, and finite in bfloat16.
_CERTAIN = 2.0**14
_BITS, _DIGITS = 8, 3


def slots_of(meta: StepMetadata) -> jax.Array:
    """The slot of each of the step's tokens, int32 [T]; 0 for padding."""
    prompts_P = jnp.pad(meta.prefill_slots, (0, 1))[meta.prefill_rows]
    return jnp.concatenate([prompts_P, jnp.repeat(meta.decode_slots, meta.decode_bounds.shape[1])])


def _with_ids(hidden_TH: jax.Array, texts_SL: jax.Array, slots_T: jax.Array, places_T: jax.Array) -> jax.Array:
    """Hidden states [T, H + digits] that also say the token at these places of these slots' texts."""
    ids_T = texts_SL[slots_T, jnp.minimum(places_T, texts_SL.shape[1] - 1)]
    shifts_D = jnp.arange(_DIGITS) * _BITS
    digits_TD = ids_T[:, None] >> shifts_D & (1 << _BITS) - 1
    return jnp.concatenate([hidden_TH, digits_TD.astype(hidden_TH.dtype)], axis=1)


def _say(logits_RV: jax.Array, digits_RD: jax.Array) -> jax.Array:
    """Logits whose argmax is the id that the digits say."""
    ids_R = (digits_RD.astype(jnp.int32) << jnp.arange(_DIGITS) * _BITS).sum(axis=1)
    return logits_RV.at[jnp.arange(len(ids_R)), ids_R].set(_CERTAIN)


class GivenText(nnx.Module):
    """A target that greedily writes the given texts, in place of a `CausalLM`. On one device.

    Args:
        inner: the `CausalLM` that computes.
        slots, length: of `texts`, int32 [slots, length]: the text of each slot's request from its prompt on.
    """

    def __init__(self, inner: Any, slots: int, length: int):
        self.inner = inner
        self.config = inner.config
        self.texts = Declare(jnp.int32)((slots, length), (None, None), "zeros")

    @property
    def layers(self) -> Any:
        return self.inner.layers

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return self.inner.cache_specs()

    def embed_ids(self, ids_T: jax.Array) -> jax.Array:
        return self.inner.embed_ids(ids_T)

    def __call__(self, ids_T: jax.Array, cache: Cache, meta: StepMetadata, **options: Any) -> ModelOutput:
        output = self.inner(ids_T, cache, meta, **options)
        hidden = _with_ids(output.hidden, self.texts[...], slots_of(meta), meta.positions + 1)
        return output._replace(hidden=hidden)

    def logits(self, hidden_RH: jax.Array) -> jax.Array:
        width = self.config.hidden_size
        return _say(self.inner.logits(hidden_RH[:, :width]), hidden_RH[:, width:])


class GivenDrafts(nnx.Module):
    """A `Draft` for a `GivenText`. It proposes what it computes, or the given texts instead.

    Args:
        inner: the draft that computes. hidden: of the target.
        shape: of `proposals`, int32 [slots, length]: what it proposes for each position of each slot; None: its own.
    """

    def __init__(self, inner: Any, hidden: int, shape: tuple[int, int] | None):
        self.inner = inner
        self.width = hidden
        self.capture = inner.capture
        self.is_given = shape is not None
        if shape is not None:
            self.proposals = Declare(jnp.int32)(shape, (None, None), "zeros")

    @property
    def cache_spec(self) -> CacheSpec:
        return self.inner.cache_spec

    def features(self, hidden_TH: jax.Array, captured: tuple[jax.Array, ...]) -> jax.Array:
        return self.inner.features(hidden_TH[:, : self.width], captured)

    def embed_ids(self, target: GivenText, ids_T: jax.Array) -> jax.Array:
        return self.inner.embed_ids(target.inner, ids_T)

    def __call__(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, cache: LayerCache, meta: StepMetadata
    ) -> tuple[jax.Array, LayerCache]:
        hidden_TH, cache = self.inner(embedded_TH, hidden_TH[:, : self.width], cache, meta)
        return self._with_proposals(hidden_TH, slots_of(meta), meta.positions), cache

    def catch_up(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata
    ) -> tuple[jax.Array, LayerCache]:
        hidden_RH, cache = self.inner.catch_up(embedded_TH, hidden_TH, live, cache, meta)
        return self._with_proposals(hidden_RH, slots_of(meta)[live.tokens], meta.positions[live.tokens]), cache

    def write_keys(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, cache: LayerCache, meta: StepMetadata
    ) -> LayerCache:
        return self.inner.write_keys(embedded_TH, hidden_TH, cache, meta)

    def logits(self, target: GivenText, hidden_RH: jax.Array) -> jax.Array:
        logits_RV = self.inner.logits(target.inner, hidden_RH[:, : self.width])
        return _say(logits_RV, hidden_RH[:, self.width :]) if self.is_given else logits_RV

    def _with_proposals(self, hidden_RH: jax.Array, slots_R: jax.Array, positions_R: jax.Array) -> jax.Array:
        """The pair of token p + 1 with hidden state p, at position p, predicts token p + 2."""
        if not self.is_given:
            return hidden_RH
        return _with_ids(hidden_RH, self.proposals[...], slots_R, positions_R + 2)
