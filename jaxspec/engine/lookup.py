"""Drafts without a model: what followed where the end of a request's own text occurred before.

The text lies where the KV does: one id a token, under the same page ids. So whatever shares, frees or finds a page, such as
the prefix cache, does so with its ids, and nothing is copied when a request starts in the middle of its prompt.

What is proposed is a function of the text alone, hence a point mass in verification (see `jaxspec.sampling.rejection`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import Lookup
from jaxspec.models.cache import CacheArray, CacheSpec, LayerCache
from jaxspec.models.metadata import StepMetadata

HISTORY = CacheSpec((CacheArray("token ids", "token", (), np.dtype(np.int32), ()),))
# Equal to no id, and not to each other: what lies before the beginning of the text, and of its end.
_BEFORE_TEXT, _BEFORE_END = -1, -2


class Found(NamedTuple):
    """ids int32 [R, k] to propose, legal ones in every row; number int32 [R] how many of them, 0 where nothing was found."""

    ids: jax.Array
    number: jax.Array


def write_history(history: LayerCache, ids_T: jax.Array, meta: StepMetadata) -> LayerCache:
    """The ids of a step's tokens, at the places of their KV; rejected drafts are overwritten as their KV is."""
    (ids,) = history
    return (ids.at[meta.pages, meta.offsets].set(ids_T),)


def read_history(history: LayerCache, tables_RC: jax.Array, newest_R: jax.Array, ids_R: jax.Array) -> jax.Array:
    """Texts int32 [R, C * page size] of rows with these pages; the newest token, at `newest_R`, is not written yet."""
    (ids,) = history
    text_RH = ids[tables_RC].reshape(tables_RC.shape[0], -1)
    return jnp.where(jnp.arange(text_RH.shape[1]) == newest_R[:, None], ids_R[:, None], text_RH)


def look_up(text_RH: jax.Array, newest_R: jax.Array, k: int, lookup: Lookup) -> Found:
    """Finds the longest end of each text that occurs earlier in it, of several the latest, and what followed it.

    Where that reaches the end of the text, it goes on with what it has proposed, as a text that repeats itself does.

    Args:
        text_RH: int32 [R, H]; ids after the newest one count for nothing.
        newest_R: int32 [R] index of the newest token, under H.
        k: how many ids to propose at most.
    """
    H = text_RH.shape[1]
    index_H = jnp.arange(H, dtype=jnp.int32)
    behind_RM = newest_R[:, None] - jnp.arange(lookup.most, dtype=jnp.int32)
    end_RM = jnp.take_along_axis(text_RH, jnp.maximum(behind_RM, 0), axis=1)
    end_RM = jnp.where(behind_RM < 0, _BEFORE_END, end_RM)
    padded = jnp.pad(text_RH, ((0, 0), (lookup.most - 1, 0)), constant_values=_BEFORE_TEXT)
    # At each position: do the i + 1 tokens up to it equal the last ones, and how many do?
    equal_RH = index_H < newest_R[:, None]
    length_RH = jnp.zeros(text_RH.shape, jnp.int32)
    for i in range(lookup.most):
        first = lookup.most - 1 - i
        equal_RH &= padded[:, first : first + H] == end_RM[:, i, None]
        length_RH += equal_RH
    # Longest first, then latest, in one number: a maximum costs no sort.
    best_R = jnp.where(length_RH >= lookup.least, length_RH * H + index_H, -1).max(axis=1)
    at_R, length_R = best_R % H, best_R // H
    period_R = jnp.maximum(newest_R - at_R, 1)
    place_Rk = at_R[:, None] + 1 + jnp.arange(k, dtype=jnp.int32) % period_R[:, None]
    found_R = best_R >= 0
    ids_Rk = jnp.take_along_axis(text_RH, jnp.where(found_R[:, None], place_Rk, 0), axis=1)
    most_R = jnp.full_like(length_R, k)
    if lookup.per_token is not None:
        most_R = jnp.minimum(k, (lookup.per_token * length_R).astype(jnp.int32))
    return Found(ids_Rk, jnp.where(found_R, most_R, 0))
