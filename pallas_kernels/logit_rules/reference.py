"""A request's rules for its logits, in plain XLA: bias, penalties, no stop before min_tokens, and the ids that masks allow."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# `counts` holds how often the output has an id; this bit marks the ids that the prompt has.
PROMPT_BIT = 1 << 30


class LogitRules(NamedTuple):
    """The rules of W requests, and the ids that their texts hold before the window.

    Attributes:
        slots: int32 [W], which of the S rows below are each request's.
        counts: int32 [S, V], of the columns at hand, how often the output has each id, plus PROMPT_BIT where the prompt
            has it.
        repetition, frequency, presence: float32 [W] penalties; neutral at 1, 0, 0.
        num_bias: int32 [W] how many of a row's biases are set. bias_ids: int32 [S, B]; bias_values: float32 [S, B].
        stop_ids: int32 [S, M] ids that must not come before absolute position `min_total`, int32 [W]; -1 for none.
        constrained: bool [W]: only ids of the masks may come, and a stop where nothing else may.
        masks: int32 [S, at least n, mask_words(vocabulary)]: bit i % 32 of word i // 32 allows id i at that position of the
            window.
    """

    slots: jax.Array
    counts: jax.Array
    repetition: jax.Array
    frequency: jax.Array
    presence: jax.Array
    num_bias: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    stop_ids: jax.Array
    min_total: jax.Array
    constrained: jax.Array
    masks: jax.Array


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit for each id."""
    return -(-vocab_size // 32)


def adjust(
    logits_WnV: jax.Array,
    drafts_Wk: jax.Array,
    rules: LogitRules,
    positions_W: jax.Array,
    vocab: int,
    first_column: jax.Array | None,
) -> jax.Array:
    """See api.py. All rows are there; those whose rules are neutral are exactly the raw ones."""
    _, n, V = logits_WnV.shape
    logits_WnV = logits_WnV.astype(jnp.float32)
    ids_V = jnp.arange(V, dtype=jnp.int32)
    if first_column is not None:
        ids_V = ids_V + first_column
    counts_WV, stop_ids_WM = rules.counts[rules.slots], rules.stop_ids[rules.slots]
    index_n1 = jnp.arange(n, dtype=jnp.int32)[:, None]
    # Comparisons fuse with what reads them; a scatter would need a copy of the counts for every window row.
    output_WnV = jnp.broadcast_to((counts_WV & (PROMPT_BIT - 1))[:, None], logits_WnV.shape)
    for j in range(n - 1):
        output_WnV += (drafts_Wk[:, j, None, None] == ids_V) & (j < index_n1)
    was_output_WnV = output_WnV > 0
    seen_WnV = was_output_WnV | (counts_WV >= PROMPT_BIT)[:, None]

    x_WnV = logits_WnV + _bias(rules, V, first_column)[:, None]
    factor_WnV = jnp.where(seen_WnV, _per_request(rules.repetition), 1.0)
    x_WnV = jnp.where(x_WnV > 0, x_WnV / factor_WnV, x_WnV * factor_WnV)
    x_WnV -= _per_request(rules.frequency) * output_WnV
    x_WnV -= _per_request(rules.presence) * was_output_WnV

    is_stop_WV = jnp.zeros((logits_WnV.shape[0], V), bool)
    for m in range(stop_ids_WM.shape[1]):
        is_stop_WV |= stop_ids_WM[:, m, None] == ids_V
    early_Wn1 = no_stop_yet(rules, positions_W, n, vocab)[..., None]
    masks_WnM = rules.masks[rules.slots, :n]
    allowed_WnV = ~rules.constrained[:, None, None] | _allowed_ids(masks_WnM, V, vocab, first_column)
    return jnp.where(allowed_WnV & ~(early_Wn1 & is_stop_WV[:, None]), x_WnV, -jnp.inf)


def no_stop_yet(rules: LogitRules, positions_W: jax.Array, n: int, vocab: int) -> jax.Array:
    """Where stops may not come, bool [W, n]. Where a grammar has ended only a stop is left: it beats min_tokens."""
    early_Wn = positions_W[:, None] + jnp.arange(n, dtype=jnp.int32) < rules.min_total[:, None]
    return early_Wn & _anything_but_stops(rules, n, vocab)


def _anything_but_stops(rules: LogitRules, n: int, V: int) -> jax.Array:
    """Whether an id that is no stop may come, bool [W, n]: from the masks' bits, without a look at V logits."""
    words = mask_words(V)
    unused = jnp.zeros(words, jnp.int32).at[-1].set(-1 << (V - 32 * (words - 1)) if V % 32 else 0)
    masks_WnM = jnp.where(rules.constrained[:, None, None], rules.masks[rules.slots, :n], -1) & ~unused
    others_Wn = lax.population_count(masks_WnM).sum(axis=2)
    stop_ids_WM = rules.stop_ids[rules.slots]
    for m in range(stop_ids_WM.shape[1]):
        id_W = stop_ids_WM[:, m]
        is_new_W = (id_W >= 0) & (id_W < V) & (stop_ids_WM[:, :m] != id_W[:, None]).all(axis=1)
        word_Wn = jnp.take_along_axis(masks_WnM, jnp.maximum(id_W, 0)[:, None, None] // 32, axis=2)[..., 0]
        others_Wn -= ((word_Wn >> (id_W % 32)[:, None]) & 1) * is_new_W[:, None]
    return others_Wn > 0


def _allowed_ids(masks_WnM: jax.Array, V: int, vocab: int, first_column: jax.Array | None) -> jax.Array:
    """bool [W, n, V] of the columns at hand, from bits int32 [W, n, mask_words] of the whole vocabulary."""

    def bits(words_WnM: jax.Array) -> jax.Array:
        return lax.collapse((words_WnM[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1, 2, 4)

    if first_column is None:
        return bits(masks_WnM)[..., :vocab] > 0
    # From the word on that has the bit of the first column. Past the last word nothing is allowed.
    word, bit = jnp.divmod(first_column, 32)
    words = mask_words(V) + 1
    masks_WnM = jnp.pad(masks_WnM, ((0, 0), (0, 0), (0, words)))
    own_WnM = lax.dynamic_slice_in_dim(masks_WnM, word, words, axis=2)
    return lax.dynamic_slice_in_dim(bits(own_WnM), bit, V, axis=2) > 0


def _per_request(values_W: jax.Array) -> jax.Array:
    return values_W[:, None, None]


def _bias(rules: LogitRules, V: int, first_column: jax.Array | None) -> jax.Array:
    """The sparse biases as float32 [W, V]."""
    bias_ids_WB, bias_values_WB = rules.bias_ids[rules.slots], rules.bias_values[rules.slots]
    W, B = bias_ids_WB.shape
    columns_WB = bias_ids_WB if first_column is None else bias_ids_WB - first_column
    counts = (jnp.arange(B, dtype=jnp.int32) < rules.num_bias[:, None]) & (columns_WB >= 0)
    columns_WB = jnp.where(counts, columns_WB, V)  # out of range: the scatter drops it
    return jnp.zeros((W, V), jnp.float32).at[jnp.arange(W)[:, None], columns_WB].add(bias_values_WB, mode="drop")
