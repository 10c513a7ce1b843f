"""The step's share in penalties, biases and masks: keeping each slot's counts right, and giving its logits their rules.

Only "full" buckets do any of this. A slot that served "lean" requests may hold anything here: their rules are neutral,
and a request with rules begins by clearing it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.engine.batch import StepInputs
from jaxspec.engine.handoff import Chosen
from jaxspec.engine.state import (
    CONSTRAINED,
    FREQUENCY,
    MIN_TOTAL,
    NUM_BIAS,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    StepState,
)
from jaxspec.models.metadata import StepMetadata
from jaxspec.sampling.columns import Columns
from jaxspec.sampling.penalties import adjust
from jaxspec.sampling.target import TargetLogits
from pallas_kernels.logit_rules.reference import PROMPT_BIT, LogitRules


def reset_rules(state: StepState, inputs: StepInputs, slots_E: jax.Array) -> StepState:
    """Empty counts and the biases of new requests. `slots_E` is out of range for rows that start none.

    Where cached tokens have been counted already (see `CountUpload`), the counts stay.
    """
    uncounted_E = jnp.where(inputs.cached > 0, state.counts.shape[0], slots_E)
    values = lax.bitcast_convert_type(inputs.bias_values, jnp.float32)
    return state._replace(
        counts=state.counts.at[uncounted_E].set(0, mode="drop"),
        bias_ids=state.bias_ids.at[slots_E].set(inputs.bias_ids, mode="drop"),
        bias_values=state.bias_values.at[slots_E].set(values, mode="drop"),
    )


def count_prefilled(state: StepState, inputs: StepInputs, meta: StepMetadata, columns: Columns) -> StepState:
    """Counts of the chunks' tokens: the prompt's, then the output of a request that resumes."""
    S = state.counts.shape[0]
    P = inputs.chunk_ids.shape[0]
    if P == 0:
        return state
    slots_P = jnp.pad(inputs.slots, (0, 1))[meta.prefill_rows]
    in_prompt_P = meta.positions[:P] < state.params_i[slots_P, PROMPT_LEN]

    def where(mask_P: jax.Array) -> tuple[jax.Array, jax.Array]:  # out of range: the scatter drops it
        return jnp.where(mask_P & (slots_P > 0), slots_P, S), columns.find(inputs.chunk_ids)

    # A prompt comes before all output, so its ids are at 0 or marked already.
    counts = state.counts.at[where(in_prompt_P)].max(PROMPT_BIT, mode="drop")
    return state._replace(counts=counts.at[where(~in_prompt_P)].add(1, mode="drop"))


def count_chosen(
    counts: jax.Array, inputs: StepInputs, chosen: Chosen, slots_R: jax.Array, columns: Columns
) -> jax.Array:
    """Counts [S, V] with every token that the step chose, once. `slots_R` is out of range for rows that stay still."""
    n = chosen.ids.shape[1]
    D = inputs.decode_slots.shape[0]
    chooses_R = jnp.concatenate([inputs.final, jnp.ones(D, bool)])
    # After a stop inside the window lie tokens that are never emitted; their slot's request is over.
    chosen_Rn = chooses_R[:, None] & (jnp.arange(n) <= chosen.accepted[:, None])
    slots_Rn = jnp.where(chosen_Rn, slots_R[:, None], counts.shape[0])
    return counts.at[slots_Rn, columns.find(chosen.ids)].add(1, mode="drop")


def ruled_logits(
    logits_RV: jax.Array,
    state: StepState,
    slots_W: jax.Array,
    positions_W: jax.Array,
    sound_R: jax.Array,
    n: int,
    columns: Columns,
) -> TargetLogits:
    """Logits [W * n, V] of windows of n tokens, after the rules of each window's request.

    Args:
        logits_RV: raw.
        slots_W: int32 [W] the slot of each window.
        positions_W: int32 [W] absolute position of the first token that each window chooses.
        sound_R: bool [W * n], which rows are finite.
    """
    W, k = slots_W.shape[0], n - 1
    drafts_Wk = state.drafts[slots_W, :k] if k else jnp.zeros((W, 0), jnp.int32)
    windows, sound_Wn = logits_RV.reshape(W, n, -1), sound_R.reshape(W, n)
    return adjust(windows, drafts_Wk, _rules(state, slots_W), positions_W, columns, sound_Wn)


def _rules(state: StepState, slots_W: jax.Array) -> LogitRules:
    params_f, params_i = state.params_f[slots_W], state.params_i[slots_W]
    return LogitRules(
        slots=slots_W,
        counts=state.counts,
        repetition=params_f[:, REPETITION],
        frequency=params_f[:, FREQUENCY],
        presence=params_f[:, PRESENCE],
        num_bias=params_i[:, NUM_BIAS],
        bias_ids=state.bias_ids,
        bias_values=state.bias_values,
        stop_ids=state.stop_ids,
        min_total=params_i[:, MIN_TOTAL],
        constrained=params_i[:, CONSTRAINED] > 0,
        masks=state.masks,
    )
