"""The last part of a step: drafts for the next one, looked up in a row's text or drawn by a model.

A model catches up with the target's tokens, then proposes the next k; or writes its keys alone. Its cache holds, at
position p, the pair (token p + 1, target's hidden state p), under the target's page ids.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import Settings
from jaxspec.engine.batch import StepInputs
from jaxspec.engine.forward import kv_places
from jaxspec.engine.handoff import Chosen, Drafted, Forwarded
from jaxspec.engine.lookup import look_up, read_history
from jaxspec.engine.state import StepState
from jaxspec.models.cache import LayerCache
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.sampling.columns import Columns
from jaxspec.sampling.rejection import sample_draft
from pallas_kernels.row_write.api import write_rows


def next_tokens(inputs: StepInputs, chosen: Chosen) -> jax.Array:
    """The token that follows each of the step's T tokens, int32 [T].

    Within a chunk it is the chunk's own; after a middle chunk the prompt's, after a final one the token just chosen.
    In a decode window it is what verification put there; after the accepted drafts that is stale, but legal.
    """
    P, E = inputs.chunk_ids.shape[0], inputs.prefill.shape[0]
    lengths_E, next_E = inputs.lengths, inputs.next_ids
    ends_E = jnp.cumsum(lengths_E)
    following_E = jnp.where(next_E >= 0, next_E, chosen.last[:E])
    last_of_row_E = jnp.where(lengths_E > 0, ends_E - 1, P)  # padding rows: dropped
    shifted_P = jnp.roll(inputs.chunk_ids, -1).at[last_of_row_E].set(following_E, mode="drop")
    return jnp.concatenate([shifted_P, chosen.ids[E:].reshape(-1)])


class _Drawn(NamedTuple):
    """What a model proposes for R rows: ids int32 [R, k], log_z float32 [R, k] of the distributions that they are drawn from,
    and what it said, with k = 0 none; its written cache."""

    cache: LayerCache
    ids: jax.Array | None = None
    log_z: jax.Array | None = None
    drafted: Drafted | None = None


def propose(
    state: StepState,
    draft: Draft | None,
    target: CausalLM,
    forwarded: Forwarded,
    inputs: StepInputs,
    chosen: Chosen,
    *,
    k: int,
    was_done: jax.Array,
    settings: Settings,
    skip_dead: bool,
) -> tuple[StepState, Drafted | None]:
    """Proposes k tokens for every row that has a newest token: looked up in its own text, or else drawn by the draft.

    Writes the draft's KV of all T tokens. Also returns what a draft read and said, if it proposed any.

    Args:
        draft: None where drafts are only looked up.
        k: with 0 the draft's keys are written and nothing is proposed, so that a later step can.
        was_done: bool [S] slots that were done before the step: their drafts stay as they are.
        skip_dead: attend, project and run the MLP only for the one token of each row that drafts.
    """
    slots_R = jnp.concatenate([inputs.slots, inputs.decode_slots])
    # A middle chunk has no newest token: what it drafts is never read, and must not touch its pages.
    drafts_R = (slots_R > 0) & jnp.concatenate([inputs.final, jnp.ones(inputs.decode_slots.shape[0], bool)])
    S = state.seq_len.shape[0]
    target_R = jnp.where(drafts_R & ~was_done[slots_R], slots_R, S)
    ids_Rk, held_R, drafted = None, jnp.full(slots_R.shape, k), None
    if draft is not None:
        drawn = _draw(
            state,
            draft,
            target,
            forwarded,
            inputs,
            chosen,
            k=k,
            drafts_R=drafts_R,
            settings=settings,
            skip_dead=skip_dead,
        )
        state, ids_Rk, drafted = state._replace(draft_kv=drawn.cache), drawn.ids, drawn.drafted
        if drafted is not None:
            # Nobody looks at the q of a greedy or seeded request, and it is the largest thing that a step writes.
            wanted_R = (chosen.rows.temperature > 0) & ~chosen.rows.seeded
            q_target_R = jnp.where(wanted_R, target_R, S)
            draft_logits = state.draft_logits
            for i, logits_RV in enumerate(drafted.logits):
                draft_logits = write_rows(draft_logits, i, logits_RV, q_target_R)
            log_z = state.draft_log_z.at[q_target_R, :k].set(drawn.log_z, mode="drop")
            state = state._replace(draft_logits=draft_logits, draft_log_z=log_z)
    if settings.lookup is not None and k:
        meta = forwarded.meta
        tables_R = jnp.concatenate([meta.prefill_tables, meta.decode_tables])
        text_RH = read_history(state.history, tables_R, chosen.lengths, chosen.last)
        found = look_up(text_RH, chosen.lengths, k, settings.lookup)
        if ids_Rk is None:
            ids_Rk, held_R = found.ids, found.number
        else:
            found_R = found.number > 0
            ids_Rk = jnp.where(found_R[:, None], found.ids, ids_Rk)
            held_R = jnp.where(found_R, found.number, k)
            state = state._replace(looked_up=state.looked_up.at[target_R].set(found_R, mode="drop"))
    state = state._replace(held=state.held.at[target_R].set(held_R, mode="drop"))
    if ids_Rk is None:
        return state, drafted
    return state._replace(drafts=state.drafts.at[target_R, :k].set(ids_Rk, mode="drop")), drafted


def _draw(
    state: StepState,
    draft: Draft,
    target: CausalLM,
    forwarded: Forwarded,
    inputs: StepInputs,
    chosen: Chosen,
    *,
    k: int,
    drafts_R: jax.Array,
    settings: Settings,
    skip_dead: bool,
) -> _Drawn:
    """Catches up with the step's tokens and draws k ids for each row. Arguments as in `propose`.

    Args:
        drafts_R: bool [R] the rows that have a newest token.
    """
    slots_R = jnp.concatenate([inputs.slots, inputs.decode_slots])
    features_TH = draft.features(forwarded.hidden, tuple(forwarded.captured[i] for i in draft.capture))
    with jax.named_scope("catch_up"):
        embedded_TH = draft.embed_ids(target, next_tokens(inputs, chosen))
        if k == 0:
            cache = draft.write_keys(embedded_TH, features_TH, state.draft_kv, forwarded.meta)
            return _Drawn(cache)
        live = _live_rows(forwarded.meta, inputs, chosen)
        if skip_dead:
            h_RH, cache = draft.catch_up(embedded_TH, features_TH, live, state.draft_kv, forwarded.meta)
        else:
            h_TH, cache = draft(embedded_TH, features_TH, state.draft_kv, forwarded.meta)
            h_RH = h_TH[live.tokens]

    tables_R = jnp.where(drafts_R[:, None], live.tables, 0)
    columns = Columns(target.config.vocab_size)
    ids: list[jax.Array] = []
    log_z: list[jax.Array] = []
    hidden: list[jax.Array] = []
    logits: list[jax.Array] = []
    for i in range(k):
        with jax.named_scope("draft" if i else "catch_up"):
            if i > 0:
                positions_R = chosen.lengths + i - 1  # drafts count forward from the newest token
                single = _single_tokens(positions_R, drafts_R, slots_R, tables_R, settings)
                h_RH, cache = draft(draft.embed_ids(target, ids[-1]), h_RH, cache, single)
            logits_RV = draft.logits(target, h_RH)
            id_R, log_z_R = sample_draft(logits_RV, chosen.rows, chosen.lengths + 1 + i, columns)
        for values, value in ((ids, id_R), (log_z, log_z_R), (hidden, h_RH), (logits, logits_RV)):
            values.append(value)
    drafted = Drafted(features_TH, tuple(hidden), tuple(logits))
    return _Drawn(cache, jnp.stack(ids, axis=1), jnp.stack(log_z, axis=1), drafted)


def _live_rows(meta: StepMetadata, inputs: StepInputs, chosen: Chosen) -> LiveRows:
    """The token that each row's drafts follow: the last one of its chunk, or the last accepted one of its window."""
    E, D, P = inputs.slots.shape[0], inputs.decode_slots.shape[0], inputs.chunk_ids.shape[0]
    last_of_row_E = jnp.maximum(jnp.cumsum(inputs.lengths) - 1, 0)
    windows_D = P + jnp.arange(D, dtype=jnp.int32) * chosen.ids.shape[1]
    return LiveRows(
        tokens=jnp.concatenate([last_of_row_E, windows_D + chosen.accepted[E:]]),
        tables=jnp.concatenate([meta.prefill_tables, meta.decode_tables]),
        bounds=jnp.maximum(chosen.lengths, 1),
    )


def _single_tokens(
    positions_R: jax.Array, live_R: jax.Array, slots_R: jax.Array, tables_R: jax.Array, settings: Settings
) -> StepMetadata:
    """R decode rows of one token each."""
    pages_R, offsets_R = kv_places(tables_R, jnp.arange(len(positions_R)), positions_R, live_R, settings)
    return StepMetadata(
        positions=positions_R,
        pages=pages_R,
        offsets=offsets_R,
        live=live_R,
        prefill_tables=tables_R[:0],
        prefill_rows=positions_R[:0],
        prefill_ends=positions_R[:0],
        decode_tables=tables_R,
        decode_bounds=jnp.maximum(positions_R + 1, 1)[:, None],
        prefill_slots=slots_R[:0],
        prefill_starts=positions_R[:0],
        decode_slots=slots_R,
    )
