"""A request's rules for its logits: bias, penalties, no stop before min_tokens, and the ids that a grammar allows.

They apply to greedy and random rows alike, before the temperature, in the order of vLLM's sampler (`adjust` of
pallas_kernels/logit_rules). A position of a speculative window counts the drafts before it as output; its logits are used only
if all of these are accepted.
"""

import jax
import jax.numpy as jnp

from jaxspec import comm
from jaxspec.sampling.columns import Columns
from jaxspec.sampling.target import TargetLogits
from pallas_kernels.logit_rules import api
from pallas_kernels.logit_rules.reference import LogitRules


def adjust(
    logits_WnV: jax.Array,
    drafts_Wk: jax.Array,
    rules: LogitRules,
    positions_W: jax.Array,
    columns: Columns | None = None,
    sound_Wn: jax.Array | None = None,
) -> TargetLogits:
    """The rows [W * n] of logits after the rules; where these are neutral, exactly the raw ones.

    Args:
        logits_WnV: raw; row i of a window follows its first i drafts.
        drafts_Wk: int32 [W, n - 1].
        positions_W: int32 [W] absolute position of the first token to choose.
        columns: which columns logits and counts have (default: all).
        sound_Wn: bool [W, n], of which rows the rules count: others stay raw (default: all).
    """
    W, n, V = logits_WnV.shape
    columns = columns or Columns(V)
    changed_Wn = jnp.broadcast_to(changes(rules, positions_W)[:, None], (W, n))
    if sound_Wn is not None:
        changed_Wn &= sound_Wn
    first_column = comm.first(columns.width) if comm.is_split() else None
    ruled_WnV, is_whole = api.adjust(
        logits_WnV, drafts_Wk, rules, positions_W, changed_Wn, vocab=columns.vocab, first_column=first_column
    )
    raw_RV, ruled_RV, changed_R = logits_WnV.reshape(-1, V), ruled_WnV.reshape(-1, V), changed_Wn.reshape(-1)
    if is_whole:
        return TargetLogits(jnp.where(changed_R[:, None], ruled_RV, raw_RV.astype(jnp.float32)), None, changed_R)
    return TargetLogits(raw_RV, ruled_RV, changed_R)


def changes(rules: LogitRules, positions_W: jax.Array) -> jax.Array:
    """Which windows may have logits that `adjust` changes, bool [W]."""
    penalises = (rules.repetition != 1) | (rules.frequency != 0) | (rules.presence != 0)
    return penalises | (rules.num_bias > 0) | rules.constrained | (positions_W < rules.min_total)
