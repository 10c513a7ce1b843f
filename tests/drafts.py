"""Drafts whose proposals a test decides, behind the real `Draft` interface.

Random models agree on almost nothing, so a random draft never exercises acceptance. These drafts know the texts: their
paged cache holds at position p the id of the token that follows p, exactly where a draft's KV would lie, and a row's
whole history is read back through the page table it is given. A cache entry that was not rewritten after a rejection,
or that another row has overwritten, matches no text, and acceptance falls.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.cache import CacheArray, CacheSpec, LayerCache
from jaxspec.models.decoder import CausalLM
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.params import Declare

ALWAYS = 256
NO_TEXT = -1
# Large enough that a draft is nearly certain, finite so that q is a distribution and not a point.
_CONFIDENCE = 8.0


class PatternDraft(nnx.Module):
    """Proposes the recorded continuation of the text that a row belongs to, or another id where a hash says so.

    Args:
        num_texts, length: shape of the recorded texts, a parameter like the two below: one compiled step serves all.
    """

    capture: tuple[int, ...] = ()
    cache_spec = CacheSpec((CacheArray("following ids", "token", (), np.dtype(np.float32), ()),))

    def __init__(self, vocab_size: int, num_texts: int, length: int):
        declare = Declare(jnp.int32)
        self.vocab_size = vocab_size
        self.texts = declare((num_texts, length), (None, None), "zeros")
        self.seed = declare((), (), "zeros")
        self.odds = declare((), (), "zeros")  # of being right, in 256

    def features(self, hidden_TH: jax.Array, captured: tuple[jax.Array, ...]) -> jax.Array:  # noqa: ARG002
        return hidden_TH  # reads nothing of the target

    def embed_ids(self, target: CausalLM, ids_T: jax.Array) -> jax.Array:  # noqa: ARG002
        return ids_T[:, None].astype(jnp.float32)

    def __call__(
        self,
        embedded_TH: jax.Array,
        hidden_TH: jax.Array,  # noqa: ARG002
        cache: LayerCache,
        meta: StepMetadata,
    ) -> tuple[jax.Array, LayerCache]:
        ids = self._write(cache, embedded_TH, meta)
        tables_T = jnp.repeat(meta.decode_tables, meta.decode_bounds.shape[1], axis=0)
        if meta.prefill_tables.shape[0]:
            # Padding tokens have a row past the last one; what they propose is nobody's.
            rows_P = jnp.minimum(meta.prefill_rows, meta.prefill_tables.shape[0] - 1)
            tables_T = jnp.concatenate([meta.prefill_tables[rows_P], tables_T])
        return self._propose(ids, tables_T, meta.positions), (ids,)

    def catch_up(
        self,
        embedded_TH: jax.Array,
        hidden_TH: jax.Array,  # noqa: ARG002
        live: LiveRows,
        cache: LayerCache,
        meta: StepMetadata,
    ) -> tuple[jax.Array, LayerCache]:
        ids = self._write(cache, embedded_TH, meta)
        return self._propose(ids, live.tables, live.bounds - 1), (ids,)

    def write_keys(
        self,
        embedded_TH: jax.Array,
        hidden_TH: jax.Array,  # noqa: ARG002
        cache: LayerCache,
        meta: StepMetadata,
    ) -> LayerCache:
        return (self._write(cache, embedded_TH, meta),)

    def logits(self, target: CausalLM, hidden_RH: jax.Array) -> jax.Array:  # noqa: ARG002
        return hidden_RH

    def _write(self, cache: LayerCache, embedded_TH: jax.Array, meta: StepMetadata) -> jax.Array:
        (ids,) = cache
        return ids.at[meta.pages, meta.offsets].set(embedded_TH[:, 0].astype(ids.dtype))

    def _propose(self, ids: jax.Array, tables_R: jax.Array, positions_R: jax.Array) -> jax.Array:
        """Logits [R, V] of the token two positions on: the one in between is the newest entry of the cache."""
        texts_NL = self.texts[...]
        history_RS = ids[tables_R].reshape(tables_R.shape[0], -1)
        S = history_RS.shape[1]
        following_NS = jnp.pad(texts_NL[:, 1 : S + 1], ((0, 0), (0, max(S + 1 - texts_NL.shape[1], 0))))
        unknown_RS = jnp.arange(S) > positions_R[:, None]
        belongs_RN = ((history_RS[:, None] == following_NS) | unknown_RS[:, None]).all(axis=2)
        place_R = positions_R + 2
        text_R = jnp.argmax(belongs_RN, axis=1)
        right_R = texts_NL[text_R, jnp.minimum(place_R, texts_NL.shape[1] - 1)]
        known_R = belongs_RN.any(axis=1) & (place_R < texts_NL.shape[1]) & (right_R != NO_TEXT)
        right_R = jnp.where(known_R, right_R, 0)
        agree_R = is_right(self.seed[...], text_R, place_R, self.odds[...])
        ids_R = jnp.where(agree_R, right_R, (right_R + 1) % self.vocab_size)
        return jnp.where(jnp.arange(self.vocab_size) == ids_R[:, None], _CONFIDENCE, 0.0)


def is_right(seed: Any, texts: Any, positions: Any, odds: Any) -> jax.Array:
    """Does the pattern of a seed propose the right token of these texts at these positions?"""
    x = jnp.asarray(positions, jnp.uint32) * jnp.uint32(0x9E3779B1) ^ jnp.asarray(seed, jnp.uint32)
    x ^= jnp.asarray(texts, jnp.uint32) * jnp.uint32(0xC2B2AE35)
    for shift in (16, 15, 16):  # enough mixing that neighbours are unrelated
        x = (x ^ (x >> shift)) * jnp.uint32(0x85EBCA6B)
    return (x >> 24) < jnp.asarray(odds, jnp.uint32)


def pattern_params(draft: PatternDraft, texts: Sequence[Sequence[int]], *, seed: int = 0, odds: int = 200) -> dict:
    """Parameters of a draft that is right `odds` times in 256; the default makes all lengths up to 7 common."""
    shape = draft.texts.get_value().shape
    table = np.full(shape, NO_TEXT, np.int32)
    assert len(texts) <= shape[0]
    for row, text in zip(table, texts, strict=False):
        known = text[: shape[1]]
        row[: len(known)] = known
    return {"texts": table, "seed": np.int32(seed), "odds": np.int32(odds)}


def recorded_params(draft: PatternDraft, texts: Sequence[Sequence[int]]) -> dict:
    """Parameters of a draft that is always right: the target must accept all of its proposals."""
    return pattern_params(draft, texts, odds=ALWAYS)
