"""The jitted step: resets, forward pass over prompt chunks and decode windows, verification, drafting, state update.

Everything that one step tells the next stays on the device; the host only reads the packed output.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.config import Settings
from jaxspec.engine.batch import RESET_INTS, RESET_STOPS, InputLayout, StepInputs
from jaxspec.engine.drafting import kv_places, propose
from jaxspec.engine.result import RowResult
from jaxspec.engine.rules import adjusted_logits, count_chosen, count_prefilled, reset_rules
from jaxspec.engine.state import (
    GREEDY_DRAFTS,
    MAX_LEN,
    MIN_P,
    NUM_DRAFTS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    StepState,
)
from jaxspec.models.metadata import StepMetadata, window_bounds
from jaxspec.sampling.logprobs import TopLogprobs, logprobs_of, top_logprobs
from jaxspec.sampling.params import MAX_LOGPROBS
from jaxspec.sampling.rejection import verify
from jaxspec.sampling.sampler import LogitsStats, SamplingRows, logits_stats, sample, temperatures

# Bits of the packed output's flags column.
FLAG_DONE, FLAG_NAN = 1, 2
# The count of accepted drafts shares that column.
ACCEPTED_SHIFT = 8


class Probe(NamedTuple):
    """What `compare` looks at: residual streams [layers + 1, T, H] and logits [T, V], float32, of every token."""

    residuals: jax.Array
    logits: jax.Array


class StepArrays(NamedTuple):
    """What the host may read of a step. Rows are the bucket's, prompt rows first.

    Attributes:
        packed: int32 [rows, 2 + 2n]: tokens emitted, flags, ids, log-probabilities as bits.
        top: int32 [rows, n, 2 * MAX_LOGPROBS]: likeliest ids, log-probabilities as bits; None in a "lean" bucket.
        probe: where it was asked for.
    """

    packed: jax.Array
    top: jax.Array | None
    probe: Probe | None


def make_step(
    graphdefs: tuple[nnx.GraphDef, nnx.GraphDef | None],
    layout: InputLayout,
    settings: Settings,
    *,
    window: int = 1,
    probe: bool = False,
    skip_dead: bool = True,
):
    """The step of one bucket: (params, state, inputs int32 [size]) -> (state, StepArrays).

    Args:
        graphdefs: of the target and of the draft; without a draft the window is 1.
        skip_dead: in the draft's catch-up, attend for the rows that draft only (False for tests and benchmarks).
    """

    def step(params: tuple, state: StepState, flat_inputs: jax.Array):
        target = nnx.merge(graphdefs[0], params[0])
        inputs = layout.split(flat_inputs)
        full = layout.bucket.variant == "full"
        state = apply_updates(state, inputs, full=full)
        ids_T, meta = lay_out(state, inputs, settings, window)
        if full:
            state = count_prefilled(state, inputs, meta)
        draft = None if graphdefs[1] is None else nnx.merge(graphdefs[1], params[1])
        wanted = () if draft is None else draft.capture
        captured_ids = tuple(range(len(target.layers) + 1)) if probe else wanted
        output = target(ids_T, state.kv, meta, capture=captured_ids)
        captured = dict(zip(captured_ids, output.captured, strict=True))
        rows_R = logit_rows(inputs, window)
        result = choose(
            target.logits(output.hidden[rows_R]), state, inputs,
            n=window, full=full, synthetic_length=settings.synthetic_acceptance_length,
        )  # fmt: skip
        was_done = state.done
        state = advance(state._replace(kv=output.cache), inputs, result, full=full)
        if draft is not None:
            features_TH = draft.features(output.hidden, tuple(captured[i] for i in wanted))
            state = propose(
                state, draft, target, features_TH, meta, inputs, result,
                was_done=was_done, settings=settings, skip_dead=skip_dead,
            )  # fmt: skip
        seen = None
        if probe:
            residuals = jnp.stack([c.astype(jnp.float32) for c in output.captured])
            seen = Probe(residuals, target.logits(output.hidden).astype(jnp.float32))
        return state, StepArrays(pack_output(result), pack_top(result), seen)

    return step


def apply_updates(state: StepState, inputs: StepInputs, *, full: bool) -> StepState:
    """Gives slots their new requests and pages. Padding records name slot 0, whose row must stay as it is."""
    S = state.page_table.shape[0]

    def or_drop(slots: jax.Array) -> jax.Array:  # out of range: the scatter drops it
        return jnp.where(slots > 0, slots, S)

    slots = or_drop(inputs.resets[:, 0])
    floats = lax.bitcast_convert_type(inputs.resets[:, 1:RESET_INTS], jnp.float32)
    deltas = inputs.deltas
    if full:
        state = reset_rules(state, inputs, slots)
    # A slot's former pages belong to others by now.
    page_table = state.page_table.at[slots].set(0, mode="drop")
    return state._replace(
        page_table=page_table.at[or_drop(deltas[:, 0]), deltas[:, 1]].set(deltas[:, 2], mode="drop"),
        done=state.done.at[slots].set(False, mode="drop"),
        params_f=state.params_f.at[slots].set(floats, mode="drop"),
        params_i=state.params_i.at[slots].set(inputs.resets[:, RESET_INTS:RESET_STOPS], mode="drop"),
        stop_ids=state.stop_ids.at[slots].set(inputs.resets[:, RESET_STOPS:], mode="drop"),
    )


def lay_out(state: StepState, inputs: StepInputs, settings: Settings, n: int) -> tuple[jax.Array, StepMetadata]:
    """Token ids [T] and where each of the T = P + D * n tokens sits."""
    P, D = inputs.chunk_ids.shape[0], inputs.decode_slots.shape[0]
    i32 = jnp.int32

    # Prompt tokens: which row each belongs to, by the running sum of chunk lengths.
    slots_E, starts_E, lengths_E = inputs.prefill[:, 0], inputs.prefill[:, 1], inputs.prefill[:, 2]
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

    # Decode windows: the newest token sits right behind the written ones.
    live_D = (inputs.decode_slots > 0) & ~state.done[inputs.decode_slots]
    slots_D = jnp.where(live_D, inputs.decode_slots, 0)
    bases_D = jnp.where(live_D, state.seq_len[slots_D], 0)
    positions_Dn = bases_D[:, None] + jnp.arange(n, dtype=i32)
    tables_D = jnp.where(live_D[:, None], state.page_table[slots_D], 0)
    ids_Dn = state.last_token[slots_D][:, None]
    if n > 1:
        ids_Dn = jnp.concatenate([ids_Dn, state.drafts[slots_D]], axis=1)
    ids_Dn = jnp.where(live_D[:, None], ids_Dn, 0)

    positions_T = jnp.concatenate([positions_P, positions_Dn.reshape(-1)])
    slots_T = jnp.concatenate([slots_P, jnp.repeat(slots_D, n)])
    live_T = jnp.concatenate([live_P, jnp.repeat(live_D, n)])
    pages_T, offsets_T = kv_places(state.page_table, slots_T, positions_T, live_T, settings)
    meta = StepMetadata(
        positions=positions_T,
        pages=pages_T,
        offsets=offsets_T,
        live=live_T,
        prefill_tables=jnp.where((slots_E > 0)[:, None], state.page_table[slots_E], 0),
        prefill_rows=row_P,
        prefill_ends=jnp.where(slots_E > 0, starts_E + lengths_E, 0),
        decode_tables=tables_D,
        decode_bounds=window_bounds(bases_D + n, n),
    )
    return jnp.concatenate([inputs.chunk_ids, ids_Dn.reshape(D * n)]), meta


def logit_rows(inputs: StepInputs, n: int) -> jax.Array:
    """Token index of every row that needs logits: the last token of each chunk, then all window tokens."""
    P, D = inputs.chunk_ids.shape[0], inputs.decode_slots.shape[0]
    lengths_E = inputs.prefill[:, 2]
    last_E = jnp.maximum(jnp.cumsum(lengths_E) - 1, 0)
    return jnp.concatenate([last_E, P + jnp.arange(D * n, dtype=jnp.int32)])


def choose(
    logits_RV: jax.Array,
    state: StepState,
    inputs: StepInputs,
    *,
    n: int,
    full: bool,
    synthetic_length: float | None = None,
) -> RowResult:
    """What each row gains: one sampled (or, for a request that resumes, forced) token, or a verified window.

    Args:
        logits_RV: [E + D * n, V].
        synthetic_length: see `verify`.
    """
    slots_E, slots_D = inputs.prefill[:, 0], inputs.decode_slots
    slots_R = jnp.concatenate([slots_E, slots_D])
    E, D = slots_E.shape[0], slots_D.shape[0]
    final_E, forced_E = inputs.prefill[:, 3], inputs.prefill[:, 4]
    ends_E = inputs.prefill[:, 1] + inputs.prefill[:, 2]
    # The first token to choose goes behind the prompt chunk, or behind the newest token.
    positions_R = jnp.concatenate([ends_E, state.seq_len[slots_D] + 1])
    params_i = state.params_i[slots_R]
    rows = SamplingRows(
        temperature=state.params_f[slots_R, TEMPERATURE],
        top_p=state.params_f[slots_R, TOP_P],
        min_p=state.params_f[slots_R, MIN_P],
        top_k=params_i[:, TOP_K],
        seeds=lax.bitcast_convert_type(params_i[:, SEED_LOW : SEED_HIGH + 1], jnp.uint32),
        greedy_drafts=params_i[:, GREEDY_DRAFTS] > 0,
    )
    # Of which of the E + D rows each row of logits is.
    row_R = jnp.concatenate([jnp.arange(E), E + jnp.repeat(jnp.arange(D), n)])
    stats = logits_stats(logits_RV, temperatures(rows)[row_R])
    bad_rows = ~stats.finite
    nan_R = jnp.concatenate([bad_rows[:E], bad_rows[E:].reshape(D, n).any(axis=1)])
    adjusted_RV = logits_RV
    if full:
        logits_RV = jnp.where(bad_rows[:, None], 0.0, logits_RV.astype(jnp.float32))
        adjusted_RV = adjusted_logits(logits_RV, state, inputs, positions_R, n)

    def part(tree, start: int, stop: int):
        return jax.tree.map(lambda a: a[start:stop], tree)

    def stats_of(start: int, stop: int) -> LogitsStats | None:  # of what is not adjusted
        return None if full else part(stats, start, stop)

    accepted_R = jnp.zeros(E + D, jnp.int32)
    ids_Rn = jnp.zeros((E + D, n), jnp.int32)
    whole = E + D if n == 1 else E
    if whole:
        ids = sample(
            adjusted_RV[:whole], part(rows, 0, whole), positions_R[:whole], full=full, stats=stats_of(0, whole)
        )
        ids_Rn = ids_Rn.at[:whole, 0].set(ids)
    if D and n > 1:
        window = part(rows, E, E + D)
        verified = verify(
            adjusted_RV[E:].reshape(D, n, adjusted_RV.shape[1]),
            state.drafts[slots_D],
            state.draft_log_q,
            window.greedy_drafts,
            params_i[E:, NUM_DRAFTS],
            window,
            positions_R[E:],
            full=full,
            synthetic_length=synthetic_length,
            q_rows=slots_D,
            stats=stats_of(E, E + D * n),
        )
        ids_Rn = ids_Rn.at[E:].set(verified.ids)
        accepted_R = accepted_R.at[E:].set(verified.accepted)
    is_forced_R = jnp.concatenate([forced_E >= 0, jnp.zeros(D, bool)])
    ids_Rn = ids_Rn.at[:E, 0].set(jnp.where(forced_E >= 0, forced_E, ids_Rn[:E, 0]))

    live_R = (slots_R > 0) & ~state.done[slots_R]
    produces_R = live_R & jnp.concatenate([final_E > 0, jnp.ones(D, bool)])
    nan_R &= live_R
    index_n = jnp.arange(n, dtype=jnp.int32)
    stops_Rn = (state.stop_ids[slots_R][:, None] == ids_Rn[..., None]).any(axis=2)
    stops_Rn |= positions_R[:, None] + index_n + 1 >= params_i[:, MAX_LEN][:, None]
    stops_Rn &= index_n <= accepted_R[:, None]
    stopped_R = stops_Rn.any(axis=1)
    count_R = jnp.where(stopped_R, jnp.argmax(stops_Rn, axis=1).astype(jnp.int32), accepted_R) + 1
    done_R = (produces_R & ~is_forced_R & stopped_R) | nan_R

    token_Rn = jnp.concatenate([jnp.repeat(jnp.arange(E)[:, None], n, axis=1), E + jnp.arange(D * n).reshape(D, n)])
    top = None
    if full:
        of_token = top_logprobs(logits_RV, min(MAX_LOGPROBS, logits_RV.shape[1]))
        top = TopLogprobs(*(values[token_Rn] for values in of_token))
    # A row of logits of a prompt has one id, each of a window's its own; what lies behind a prompt's first is not read.
    of_logits = jnp.concatenate([ids_Rn[:E, :1], ids_Rn[E:].reshape(D * n, 1)])
    logprobs_Rn = logprobs_of(logits_RV, of_logits, stats.log_z)[token_Rn, 0]
    return RowResult(
        ids=ids_Rn,
        logprobs=logprobs_Rn,
        emitted=jnp.where(produces_R & ~is_forced_R & ~nan_R, count_R, 0),
        accepted=accepted_R,
        flags=(FLAG_DONE * done_R + FLAG_NAN * nan_R).astype(jnp.int32),
        lengths=positions_R + accepted_R,
        last=jnp.take_along_axis(ids_Rn, accepted_R[:, None], axis=1)[:, 0],
        rows=rows,
        top=top,
    )


def advance(state: StepState, inputs: StepInputs, result: RowResult, *, full: bool) -> StepState:
    """Lengths, newest tokens, counts and done flags after the step; rows of padding or done slots change nothing."""
    S = state.seq_len.shape[0]
    slots_R = jnp.concatenate([inputs.prefill[:, 0], inputs.decode_slots])
    moved_R = (slots_R > 0) & ~state.done[slots_R]
    target_R = jnp.where(moved_R, slots_R, S)
    if full:
        state = state._replace(counts=count_chosen(state.counts, inputs, result, target_R))
    return state._replace(
        seq_len=state.seq_len.at[target_R].set(result.lengths, mode="drop"),
        last_token=state.last_token.at[target_R].set(result.last, mode="drop"),
        done=state.done.at[target_R].max(result.flags > 0, mode="drop"),
    )


def pack_output(result: RowResult) -> jax.Array:
    """int32 [rows, 2 + 2n]: emitted, flags with the accepted drafts above bit 8, ids, log-probability bits."""
    bits_Rn = lax.bitcast_convert_type(result.logprobs, jnp.int32)
    flags_R = result.flags + (result.accepted << ACCEPTED_SHIFT)
    return jnp.concatenate([result.emitted[:, None], flags_R[:, None], result.ids, bits_Rn], axis=1)


def pack_top(result: RowResult) -> jax.Array | None:
    """int32 [rows, n, 2 * MAX_LOGPROBS]: likeliest ids, then log-probability bits."""
    if result.top is None:
        return None
    return jnp.concatenate([result.top.ids, lax.bitcast_convert_type(result.top.values, jnp.int32)], axis=2)
