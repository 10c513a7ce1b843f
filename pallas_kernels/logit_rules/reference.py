"""A request's rules for its logits, in plain XLA: bias, penalties, no stop before min_tokens, and the ids that masks allow."""

import functools
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
    ids_V = jnp.arange(V, dtype=jnp.int32)
    if first_column is not None:
        ids_V = ids_V + first_column
    biased_WnV = logits_WnV.astype(jnp.float32) + _bias(rules, V, first_column)[:, None]
    allowed_WnV = _allowed_ids(rules.masks[rules.slots, :n], V, vocab, first_column)
    counts_WV, early_Wn = rules.counts[rules.slots], no_stop_yet(rules, positions_W, n, vocab)
    return _after_biases(biased_WnV, ids_V[None], counts_WV, allowed_WnV, early_Wn, drafts_Wk, rules)


def biased_columns(
    logits_WnV: jax.Array,
    drafts_Wk: jax.Array,
    rules: LogitRules,
    positions_W: jax.Array,
    vocab: int,
    first_column: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The columns that have a bias, int32 [W, B], V where there is none or it is not at hand; and float32 [W, n, B], their
    logits after all rules."""
    _, n, V = logits_WnV.shape
    ids_WB, values_WB = rules.bias_ids[rules.slots], rules.bias_values[rules.slots]
    columns_WB = _bias_columns(ids_WB, rules, V, first_column)
    at_WB = jnp.minimum(columns_WB, V - 1)
    biased_WnB = jnp.take_along_axis(logits_WnV, at_WB[:, None], axis=2).astype(jnp.float32) + values_WB[:, None]
    words_WnB = jnp.take_along_axis(rules.masks[rules.slots, :n], (ids_WB // 32)[:, None], axis=2)
    allowed_WnB = (words_WnB >> (ids_WB % 32)[:, None]) & 1 > 0
    counts_WB, early_Wn = rules.counts[rules.slots[:, None], at_WB], no_stop_yet(rules, positions_W, n, vocab)
    return columns_WB, _after_biases(biased_WnB, ids_WB, counts_WB, allowed_WnB, early_Wn, drafts_Wk, rules)


def _after_biases(
    x_WnC: jax.Array,
    ids_WC: jax.Array,
    counts_WC: jax.Array,
    allowed_WnC: jax.Array,
    early_Wn: jax.Array,
    drafts_Wk: jax.Array,
    rules: LogitRules,
) -> jax.Array:
    """Biased logits of some ids after the other rules.

    Args:
        ids_WC: of each window's columns, or [1, C]. counts_WC, allowed_WnC: of these, as in `LogitRules`.
        early_Wn: see `no_stop_yet`.
    """
    n = x_WnC.shape[1]
    index_n1 = jnp.arange(n, dtype=jnp.int32)[:, None]
    # Comparisons fuse with what reads them; a scatter would need a copy of the counts for every window row.
    output_WnC = jnp.broadcast_to((counts_WC & (PROMPT_BIT - 1))[:, None], x_WnC.shape)
    for j in range(n - 1):
        output_WnC += (drafts_Wk[:, j, None, None] == ids_WC[:, None]) & (j < index_n1)
    was_output_WnC = output_WnC > 0
    seen_WnC = was_output_WnC | (counts_WC >= PROMPT_BIT)[:, None]

    factor_WnC = jnp.where(seen_WnC, _per_request(rules.repetition), 1.0)
    x_WnC = jnp.where(x_WnC > 0, x_WnC / factor_WnC, x_WnC * factor_WnC)
    x_WnC -= _per_request(rules.frequency) * output_WnC
    x_WnC -= _per_request(rules.presence) * was_output_WnC

    stop_ids_WM = rules.stop_ids[rules.slots]
    is_stop_WC = functools.reduce(jnp.logical_or, [stop_WM1 == ids_WC for stop_WM1 in stop_ids_WM.T[..., None]])
    refused_WnC = rules.constrained[:, None, None] & ~allowed_WnC | early_Wn[..., None] & is_stop_WC[:, None]
    return jnp.where(refused_WnC, -jnp.inf, x_WnC)


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
        # One after the other: a reduction would be a kernel of its own.
        is_new_W = (id_W >= 0) & (id_W < V)
        for j in range(m):
            is_new_W &= stop_ids_WM[:, j] != id_W
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
    columns_WB, W = _bias_columns(bias_ids_WB, rules, V, first_column), rules.slots.shape[0]
    return jnp.zeros((W, V), jnp.float32).at[jnp.arange(W)[:, None], columns_WB].add(bias_values_WB, mode="drop")


def _bias_columns(bias_ids_WB: jax.Array, rules: LogitRules, V: int, first_column: jax.Array | None) -> jax.Array:
    """Their columns; V, out of range, where there is no bias or it is not at hand."""
    columns_WB = bias_ids_WB if first_column is None else bias_ids_WB - first_column
    is_set_WB = jnp.arange(bias_ids_WB.shape[1], dtype=jnp.int32) < rules.num_bias[:, None]
    return jnp.where(is_set_WB & (columns_WB >= 0) & (columns_WB < V), columns_WB, V)
