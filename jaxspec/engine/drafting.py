"""The draft's part of a step: catch up with the target's tokens, then propose the next k.

The draft's cache holds, at position p, the pair (token p + 1, target's hidden state p), under the target's page ids.
"""

import jax
import jax.numpy as jnp

from jaxspec.config import Settings
from jaxspec.engine.batch import StepInputs
from jaxspec.engine.result import RowResult
from jaxspec.engine.state import StepState
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.metadata import StepMetadata
from jaxspec.sampling.rejection import sample_draft


def kv_places(
    tables: jax.Array, rows: jax.Array, positions: jax.Array, live: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    """Page and offset, int32 [X], of each token's KV: the token's row of `tables` [*, max_pages], and its position.

    What is not live, and what lies past the longest context, goes to the padding page.
    """
    columns = positions // settings.page_size
    pages = tables[rows, jnp.minimum(columns, settings.max_pages - 1)]
    return jnp.where(live & (columns < settings.max_pages), pages, 0), positions % settings.page_size


def next_tokens(inputs: StepInputs, result: RowResult) -> jax.Array:
    """The token that follows each of the step's T tokens, int32 [T].

    Within a chunk it is the chunk's own; behind a middle chunk the prompt's, behind a final one the token just chosen.
    In a decode window it is what verification put there; behind the accepted drafts that is stale, but legal.
    """
    P, E = inputs.chunk_ids.shape[0], inputs.prefill.shape[0]
    lengths_E, next_E = inputs.prefill[:, 2], inputs.prefill[:, 5]
    ends_E = jnp.cumsum(lengths_E)
    following_E = jnp.where(next_E >= 0, next_E, result.last[:E])
    last_of_row_E = jnp.where(lengths_E > 0, ends_E - 1, P)  # padding rows: dropped
    shifted_P = jnp.roll(inputs.chunk_ids, -1).at[last_of_row_E].set(following_E, mode="drop")
    return jnp.concatenate([shifted_P, result.ids[E:].reshape(-1)])


def propose(
    state: StepState,
    draft: Draft,
    target: CausalLM,
    features_TH: jax.Array,
    meta: StepMetadata,
    inputs: StepInputs,
    result: RowResult,
    *,
    was_done: jax.Array,
    settings: Settings,
    skip_dead: bool,
) -> StepState:
    """Writes the draft's KV of all T tokens and proposes k tokens for every row that has a newest token.

    Args:
        features_TH: what the draft reads of the target (`Draft.features`).
        was_done: bool [S] slots that were done before the step: their drafts stay as they are.
        skip_dead: attend, project and run the MLP only for the one token of each row that drafts.
    """
    k = state.drafts.shape[1]
    slots_E, slots_D = inputs.prefill[:, 0], inputs.decode_slots
    slots_R = jnp.concatenate([slots_E, slots_D])
    E, D, P = slots_E.shape[0], slots_D.shape[0], inputs.chunk_ids.shape[0]
    last_of_row_E = jnp.maximum(jnp.cumsum(inputs.prefill[:, 2]) - 1, 0)
    windows_D = P + jnp.arange(D, dtype=jnp.int32) * result.ids.shape[1]
    live_R = jnp.concatenate([last_of_row_E, windows_D + result.accepted[E:]])
    tables_R = jnp.concatenate([meta.prefill_tables, meta.decode_tables])
    bounds_R = jnp.maximum(result.lengths, 1)

    embedded_TH = draft.embed_ids(target, next_tokens(inputs, result))
    if skip_dead:
        h_RH, cache = draft.catch_up(embedded_TH, features_TH, live_R, state.draft_kv, meta, tables_R, bounds_R)
    else:
        h_TH, cache = draft(embedded_TH, features_TH, state.draft_kv, meta)
        h_RH = h_TH[live_R]

    # A middle chunk has no newest token: what it drafts is never read, and must not touch its pages.
    drafts_R = (slots_R > 0) & jnp.concatenate([inputs.prefill[:, 3] > 0, jnp.ones(D, bool)])
    tables_R = jnp.where(drafts_R[:, None], tables_R, 0)
    ids: list[jax.Array] = []
    log_q: list[jax.Array] = []
    for i in range(k):
        if i > 0:
            positions_R = result.lengths + i - 1  # drafts count forward from the newest token
            pages_R, offsets_R = kv_places(tables_R, jnp.arange(E + D), positions_R, drafts_R, settings)
            h_RH, cache = draft(
                draft.embed_ids(target, ids[-1]), h_RH, cache,
                _single_tokens(positions_R, pages_R, offsets_R, drafts_R, tables_R),
            )  # fmt: skip
        id_R, log_q_RV = sample_draft(draft.logits(target, h_RH), result.rows, result.lengths + 1 + i)
        ids.append(id_R)
        log_q.append(log_q_RV)
    S = state.seq_len.shape[0]
    target_R = jnp.where(drafts_R & ~was_done[slots_R], slots_R, S)
    # Nobody looks at the q of a greedy request, and it is the largest thing that a step writes.
    q_target_R = jnp.where(result.rows.temperature > 0, target_R, S)
    return state._replace(
        draft_kv=cache,
        drafts=state.drafts.at[target_R].set(jnp.stack(ids, axis=1), mode="drop"),
        draft_log_q=state.draft_log_q.at[q_target_R].set(jnp.stack(log_q, axis=1), mode="drop"),
    )


def _single_tokens(
    positions_R: jax.Array, pages_R: jax.Array, offsets_R: jax.Array, live_R: jax.Array, tables_R: jax.Array
) -> StepMetadata:
    """R decode rows of one token each."""
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
    )
