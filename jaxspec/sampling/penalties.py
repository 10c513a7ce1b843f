"""Changes to a request's logits that depend on its own text: bias, penalties, and stops that come too early.

They act on greedy and random rows alike, before the temperature, in the order of vLLM's sampler: bias; repetition
penalty (Keskar et al., arXiv 1909.05858, section 4.1, extended to negative logits); frequency and presence penalty
(OpenAI's API reference); the least number of tokens. A position of a speculative window counts the drafts before it as
output: it only matters where all of them are accepted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# One array holds both what was output and what was asked: this bit of a count marks the prompt's ids.
PROMPT_BIT = 1 << 30


class LogitRules(NamedTuple):
    """What W requests ask for, and what their text holds before the window.

    Attributes:
        counts: int32 [W, V] how often each id was output, plus PROMPT_BIT where the prompt holds it.
        repetition, frequency, presence: float32 [W] penalties; neutral at 1, 0, 0.
        bias_ids: int32 [W, B] of which the first `num_bias`, int32 [W], count; bias_values float32 [W, B].
        stop_ids: int32 [W, M] ids that must not come before absolute position `min_total`, int32 [W]; -1 for none.
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


def adjust(logits_WnV: jax.Array, drafts_Wk: jax.Array, rules: LogitRules, positions_W: jax.Array) -> jax.Array:
    """Logits float32 [W, n, V] after the rules; where these are neutral, exactly the raw ones.

    Args:
        logits_WnV: float32, raw and finite; row i of a window chooses behind its first i drafts.
        drafts_Wk: int32 [W, n - 1].
        positions_W: int32 [W] absolute position of the first token to choose.
    """
    _, n, V = logits_WnV.shape
    ids_V = jnp.arange(V, dtype=jnp.int32)
    index_n1 = jnp.arange(n, dtype=jnp.int32)[:, None]
    # Comparisons fuse with what reads them; a scatter would need a copy of the counts for every window row.
    output_WnV = jnp.broadcast_to((rules.counts & (PROMPT_BIT - 1))[:, None], logits_WnV.shape)
    for j in range(n - 1):
        output_WnV += (drafts_Wk[:, j, None, None] == ids_V) & (j < index_n1)
    was_output_WnV = output_WnV > 0
    seen_WnV = was_output_WnV | (rules.counts >= PROMPT_BIT)[:, None]

    x_WnV = logits_WnV + _bias(rules, V)[:, None]
    factor_WnV = jnp.where(seen_WnV, _per_request(rules.repetition), 1.0)
    x_WnV = jnp.where(x_WnV > 0, x_WnV / factor_WnV, x_WnV * factor_WnV)
    x_WnV -= _per_request(rules.frequency) * output_WnV
    x_WnV -= _per_request(rules.presence) * was_output_WnV

    is_stop_WV = jnp.zeros((logits_WnV.shape[0], V), bool)
    for m in range(rules.stop_ids.shape[1]):
        is_stop_WV |= rules.stop_ids[:, m, None] == ids_V
    early_Wn1 = (positions_W[:, None] + index_n1[:, 0] < rules.min_total[:, None])[..., None]
    return jnp.where(early_Wn1 & is_stop_WV[:, None], -jnp.inf, x_WnV)


def _per_request(values_W: jax.Array) -> jax.Array:
    return values_W[:, None, None]


def _bias(rules: LogitRules, V: int) -> jax.Array:
    """The sparse biases as float32 [W, V]."""
    W, B = rules.bias_ids.shape
    counts = jnp.arange(B, dtype=jnp.int32) < rules.num_bias[:, None]
    columns_WB = jnp.where(counts, rules.bias_ids, V)  # out of range: the scatter drops it
    return jnp.zeros((W, V), jnp.float32).at[jnp.arange(W)[:, None], columns_WB].add(rules.bias_values, mode="drop")
