"""The first part of a step: slots get their new requests and pages, and the target reads the step's tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.config import Settings
from jaxspec.engine.batch import StepInputs
from jaxspec.engine.expert_load import add_load
from jaxspec.engine.handoff import Forwarded
from jaxspec.engine.lookup import write_history
from jaxspec.engine.rules import count_prefilled, reset_rules
from jaxspec.engine.state import StepState, drafts_that_count
from jaxspec.models.decoder import CausalLM
from jaxspec.models.metadata import StepMetadata, window_bounds
from jaxspec.sampling.columns import Columns


def forward(
    target: CausalLM,
    state: StepState,
    inputs: StepInputs,
    settings: Settings,
    *,
    n: int,
    full: bool,
    capture: tuple[int, ...],
    experts: bool = False,
) -> tuple[StepState, Forwarded]:
    """Applies the step's updates and runs the target once over its T = P + D * n tokens.

    Args:
        n: tokens of a decode window.
        full: keep the counts that penalties need.
        capture: ascending ids of the residual streams to hand on.
        experts: also hand on which experts were chosen.
    """
    state = apply_updates(state, inputs, full=full)
    ids_T, meta = lay_out(state, inputs, settings, n)
    if full:
        state = count_prefilled(state, inputs, meta, Columns(target.config.vocab_size))
    if settings.lookup is not None:
        state = state._replace(history=write_history(state.history, ids_T, meta))
    output = target(ids_T, state.kv, meta, capture=capture, experts=experts or settings.expert_load_metrics)
    if settings.expert_load_metrics:
        state = state._replace(expert_load=add_load(state.expert_load, output.experts, meta.live))
    captured = dict(zip(capture, output.captured, strict=True))
    # Without prompts all rows choose, in their order.
    hidden_RH = output.hidden[logit_rows(inputs, n)] if inputs.chunk_ids.size else output.hidden
    logits_RV = target.logits(hidden_RH)
    chosen = output.experts if experts else ()
    return state._replace(kv=output.cache), Forwarded(meta, output.hidden, captured, chosen, logits_RV)


def apply_updates(state: StepState, inputs: StepInputs, *, full: bool) -> StepState:
    """Gives slots their new requests and pages. Padding records name slot 0, whose row must stay as it is."""
    S = state.page_table.shape[0]

    def or_drop(slots: jax.Array) -> jax.Array:  # out of range: the scatter drops it
        return jnp.where(slots > 0, slots, S)

    slots = or_drop(inputs.reset_slots)
    floats = lax.bitcast_convert_type(inputs.reset_floats, jnp.float32)
    if full:
        state = reset_rules(state, inputs, slots)
    # A slot's former pages belong to others by now.
    page_table = state.page_table.at[slots].set(0, mode="drop")
    return state._replace(
        page_table=page_table.at[or_drop(inputs.delta_slots), inputs.delta_columns].set(
            inputs.delta_pages, mode="drop"
        ),
        done=state.done.at[slots].set(False, mode="drop"),
        params_f=state.params_f.at[slots].set(floats, mode="drop"),
        params_i=state.params_i.at[slots].set(inputs.reset_ints, mode="drop"),
        stop_ids=state.stop_ids.at[slots].set(inputs.reset_stop_ids, mode="drop"),
    )


def lay_out(state: StepState, inputs: StepInputs, settings: Settings, n: int) -> tuple[jax.Array, StepMetadata]:
    """Token ids [T] and where each of the T = P + D * n tokens sits."""
    P, D = inputs.chunk_ids.shape[0], inputs.decode_slots.shape[0]
    i32 = jnp.int32

    # Prompt tokens: which row each belongs to, by the running sum of chunk lengths.
    slots_E, starts_E, lengths_E = inputs.slots, inputs.starts, inputs.lengths
    E = slots_E.shape[0]
    row_ends_E = jnp.cumsum(lengths_E)
    token_P = jnp.arange(P, dtype=i32)
    row_P = (token_P[:, None] >= row_ends_E[None]).sum(axis=1, dtype=i32)
    first_E = row_ends_E - lengths_E

    def of_row(values_E: jax.Array) -> jax.Array:  # padding tokens have row E and get 0
        return jnp.concatenate([values_E, jnp.zeros(1, i32)])[row_P]

    live_P = row_P < E
    positions_P = jnp.where(live_P, of_row(starts_E) + token_P - of_row(first_E), 0)
    slots_P = of_row(slots_E)

    # Decode windows: the newest token comes right after the written ones.
    live_D = (inputs.decode_slots > 0) & ~state.done[inputs.decode_slots]
    slots_D = jnp.where(live_D, inputs.decode_slots, 0)
    bases_D = jnp.where(live_D, state.seq_len[slots_D], 0)
    positions_Dn = bases_D[:, None] + jnp.arange(n, dtype=i32)
    tables_D = jnp.where(live_D[:, None], state.page_table[slots_D], 0)
    ids_Dn = state.last_token[slots_D][:, None]
    if n > 1:
        ids_Dn = jnp.concatenate([ids_Dn, state.drafts[slots_D, : n - 1]], axis=1)
    ids_Dn = jnp.where(live_D[:, None], ids_Dn, 0)
    counts_Dn = live_D[:, None] & (jnp.arange(n, dtype=jnp.int32) <= drafts_that_count(state, slots_D, n)[:, None])

    positions_T = jnp.concatenate([positions_P, positions_Dn.reshape(-1)])
    slots_T = jnp.concatenate([slots_P, jnp.repeat(slots_D, n)])
    written_T = jnp.concatenate([live_P, jnp.repeat(live_D, n)])
    pages_T, offsets_T = kv_places(state.page_table, slots_T, positions_T, written_T, settings)
    meta = StepMetadata(
        positions=positions_T,
        pages=pages_T,
        offsets=offsets_T,
        live=jnp.concatenate([live_P, counts_Dn.reshape(D * n)]),
        prefill_tables=jnp.where((slots_E > 0)[:, None], state.page_table[slots_E], 0),
        prefill_rows=row_P,
        prefill_ends=jnp.where(slots_E > 0, starts_E + lengths_E, 0),
        decode_tables=tables_D,
        decode_bounds=window_bounds(bases_D + n, n),
        prefill_slots=slots_E,
        prefill_starts=starts_E,
        decode_slots=slots_D,
    )
    return jnp.concatenate([inputs.chunk_ids, ids_Dn.reshape(D * n)]), meta


def kv_places(
    tables: jax.Array, rows: jax.Array, positions: jax.Array, live: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    """Page and offset, int32 [X], of each token's KV: the token's row of `tables` [*, max_pages], and its position.

    Tokens that are not live or lie past the context limit go to the padding page.
    """
    columns = positions // settings.page_size
    pages = tables[rows, jnp.minimum(columns, settings.max_pages - 1)]
    return jnp.where(live & (columns < settings.max_pages), pages, 0), positions % settings.page_size


def logit_rows(inputs: StepInputs, n: int) -> jax.Array:
    """Token index of every row that needs logits: the last token of each chunk, then all window tokens."""
    P, D = inputs.chunk_ids.shape[0], inputs.decode_slots.shape[0]
    last_E = jnp.maximum(jnp.cumsum(inputs.lengths) - 1, 0)
    return jnp.concatenate([last_E, P + jnp.arange(D * n, dtype=jnp.int32)])
