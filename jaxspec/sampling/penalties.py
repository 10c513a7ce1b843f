"""A request's rules for its logits: bias, penalties, no stop before min_tokens, and the ids that a grammar allows.

They apply to greedy and random rows alike, before the temperature, in the order of vLLM's sampler: bias; repetition
penalty (Keskar et al., arXiv 1909.05858, section 4.1, extended to negative logits); frequency and presence penalty
(OpenAI's API reference); min_tokens; masks. A position of a speculative window counts the drafts before it as output; its
logits are used only if all of these are accepted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import comm
from jaxspec.sampling.columns import Columns

# `counts` holds how often the output has an id; this bit marks the ids that the prompt has.
PROMPT_BIT = 1 << 30


class LogitRules(NamedTuple):
    """The rules of W requests, and the ids that their texts hold before the window.

    Attributes:
        counts: int32 [W, V], of the columns at hand, how often the output has each id, plus PROMPT_BIT where the prompt
            has it.
        repetition, frequency, presence: float32 [W] penalties; neutral at 1, 0, 0.
        num_bias: int32 [W] how many of a row's biases are set. bias_ids: int32 [W, B]; bias_values: float32 [W, B].
        stop_ids: int32 [W, M] ids that must not come before absolute position `min_total`, int32 [W]; -1 for none.
        constrained: bool [W]: only ids of the masks may come, and a stop where nothing else may.
        masks: int32 [W, n, mask_words(V)]: bit i % 32 of word i // 32 allows id i at that position of the window.
    """

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


def allowed_ids(masks_WnM: jax.Array, columns: Columns) -> jax.Array:
    """bool [W, n, V] of these columns, from bits int32 [W, n, mask_words] of the whole vocabulary."""

    def bits(words_WnM: jax.Array) -> jax.Array:
        return lax.collapse((words_WnM[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1, 2, 4)

    if not comm.is_split():
        return bits(masks_WnM)[..., : columns.vocab] > 0
    # From the word on that has the bit of the first column. Past the last word nothing is allowed.
    word, bit = jnp.divmod(comm.first(columns.width), 32)
    words = mask_words(columns.width) + 1
    masks_WnM = jnp.pad(masks_WnM, ((0, 0), (0, 0), (0, words)))
    own_WnM = lax.dynamic_slice_in_dim(masks_WnM, word, words, axis=2)
    return lax.dynamic_slice_in_dim(bits(own_WnM), bit, columns.width, axis=2) > 0


def adjust(
    logits_WnV: jax.Array,
    drafts_Wk: jax.Array,
    rules: LogitRules,
    positions_W: jax.Array,
    columns: Columns | None = None,
) -> jax.Array:
    """Logits float32 [W, n, V] after the rules; where these are neutral, exactly the raw ones.

    Args:
        logits_WnV: float32, raw and finite; row i of a window follows its first i drafts.
        drafts_Wk: int32 [W, n - 1].
        positions_W: int32 [W] absolute position of the first token to choose.
        columns: which columns logits and counts have (default: all).
    """
    _, n, V = logits_WnV.shape
    columns = columns or Columns(V)
    ids_V = columns.ids
    index_n1 = jnp.arange(n, dtype=jnp.int32)[:, None]
    # Comparisons fuse with what reads them; a scatter would need a copy of the counts for every window row.
    output_WnV = jnp.broadcast_to((rules.counts & (PROMPT_BIT - 1))[:, None], logits_WnV.shape)
    for j in range(n - 1):
        output_WnV += (drafts_Wk[:, j, None, None] == ids_V) & (j < index_n1)
    was_output_WnV = output_WnV > 0
    seen_WnV = was_output_WnV | (rules.counts >= PROMPT_BIT)[:, None]

    x_WnV = logits_WnV + _bias(rules, columns)[:, None]
    factor_WnV = jnp.where(seen_WnV, _per_request(rules.repetition), 1.0)
    x_WnV = jnp.where(x_WnV > 0, x_WnV / factor_WnV, x_WnV * factor_WnV)
    x_WnV -= _per_request(rules.frequency) * output_WnV
    x_WnV -= _per_request(rules.presence) * was_output_WnV

    is_stop_WV = jnp.zeros((logits_WnV.shape[0], V), bool)
    for m in range(rules.stop_ids.shape[1]):
        is_stop_WV |= rules.stop_ids[:, m, None] == ids_V
    early_Wn1 = (positions_W[:, None] + index_n1[:, 0] < rules.min_total[:, None])[..., None]
    allowed_WnV = ~rules.constrained[:, None, None] | allowed_ids(rules.masks, columns)
    # Where a grammar has ended only a stop is left: it beats min_tokens.
    early_Wn1 &= _anything_but_stops(rules, columns.vocab)[..., None]
    return jnp.where(allowed_WnV & ~(early_Wn1 & is_stop_WV[:, None]), x_WnV, -jnp.inf)


def changes(rules: LogitRules, positions_W: jax.Array) -> jax.Array:
    """Which windows may have logits that `adjust` changes, bool [W]."""
    penalises = (rules.repetition != 1) | (rules.frequency != 0) | (rules.presence != 0)
    return penalises | (rules.num_bias > 0) | rules.constrained | (positions_W < rules.min_total)


def _anything_but_stops(rules: LogitRules, V: int) -> jax.Array:
    """Whether an id that is no stop may come, bool [W, n]: from the masks' bits, without a look at V logits."""
    words = mask_words(V)
    unused = jnp.zeros(words, jnp.int32).at[-1].set(-1 << (V - 32 * (words - 1)) if V % 32 else 0)
    masks_WnM = jnp.where(rules.constrained[:, None, None], rules.masks, -1) & ~unused
    others_Wn = lax.population_count(masks_WnM).sum(axis=2)
    for m in range(rules.stop_ids.shape[1]):
        id_W = rules.stop_ids[:, m]
        is_new_W = (id_W >= 0) & (id_W < V) & (rules.stop_ids[:, :m] != id_W[:, None]).all(axis=1)
        word_Wn = jnp.take_along_axis(masks_WnM, jnp.maximum(id_W, 0)[:, None, None] // 32, axis=2)[..., 0]
        others_Wn -= ((word_Wn >> (id_W % 32)[:, None]) & 1) * is_new_W[:, None]
    return others_Wn > 0


def _per_request(values_W: jax.Array) -> jax.Array:
    return values_W[:, None, None]


def _bias(rules: LogitRules, columns: Columns) -> jax.Array:
    """The sparse biases as float32 [W, V]."""
    W, B = rules.bias_ids.shape
    V = columns.width
    counts = jnp.arange(B, dtype=jnp.int32) < rules.num_bias[:, None]
    columns_WB = jnp.where(counts, columns.find(rules.bias_ids), V)  # out of range: the scatter drops it
    return jnp.zeros((W, V), jnp.float32).at[jnp.arange(W)[:, None], columns_WB].add(rules.bias_values, mode="drop")
