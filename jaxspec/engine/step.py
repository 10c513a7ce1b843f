"""The jitted step: resets, forward pass over prompt chunks and decode windows, sampling, state update.

Everything that one step tells the next stays on the device; the host only reads the packed output.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.config import Settings
from jaxspec.engine.batch import InputLayout, StepInputs
from jaxspec.engine.state import MAX_LEN, SEED_HIGH, SEED_LOW, TEMPERATURE, TOP_K, TOP_P, StepState
from jaxspec.models.metadata import StepMetadata, window_bounds
from jaxspec.sampling.sampler import SamplingRows, logprobs_of, sample

# Bits of the packed output's flags column.
FLAG_DONE, FLAG_NAN = 1, 2


class Probe(NamedTuple):
    """What `compare` looks at: residual streams [layers + 1, T, H] and logits [T, V], float32, of every token."""

    residuals: jax.Array
    logits: jax.Array


class RowResult(NamedTuple):
    """Per row: the one token chosen, its log-probability, whether it is emitted, and the flags."""

    ids: jax.Array
    logprobs: jax.Array
    emitted: jax.Array
    flags: jax.Array


def make_step(graphdef: nnx.GraphDef, layout: InputLayout, settings: Settings, *, window: int = 1, probe: bool = False):
    """The step of one bucket: (params, state, inputs int32 [size]) -> (state, packed[, Probe]).

    `packed` is int32 [rows, 2 + 2 * window]: tokens emitted, flags, ids, log-probabilities as bits; prompt rows first.
    """

    def step(params: dict, state: StepState, flat_inputs: jax.Array):
        model = nnx.merge(graphdef, params)
        inputs = layout.split(flat_inputs)
        state = apply_updates(state, inputs)
        ids_T, meta = lay_out(state, inputs, settings, window)
        everything = tuple(range(len(model.layers) + 1)) if probe else ()
        output = model(ids_T, state.kv, meta, capture=everything)
        rows_R = logit_rows(inputs, window)
        result = choose(model.logits(output.hidden[rows_R]), state, inputs, full=layout.bucket.variant == "full")
        state = advance(state._replace(kv=output.cache), inputs, result)
        packed = pack_output(result)
        if not probe:
            return state, packed
        residuals = jnp.stack([c.astype(jnp.float32) for c in output.captured])
        return state, packed, Probe(residuals, model.logits(output.hidden))

    return step


def apply_updates(state: StepState, inputs: StepInputs) -> StepState:
    """Gives slots their new requests and pages. Padding records name slot 0, whose row must stay as it is."""
    S = state.page_table.shape[0]

    def or_drop(slots: jax.Array) -> jax.Array:  # out of range: the scatter drops it
        return jnp.where(slots > 0, slots, S)

    slots = or_drop(inputs.resets[:, 0])
    floats = lax.bitcast_convert_type(inputs.resets[:, 1:3], jnp.float32)
    deltas = inputs.deltas
    return state._replace(
        page_table=state.page_table.at[or_drop(deltas[:, 0]), deltas[:, 1]].set(deltas[:, 2], mode="drop"),
        done=state.done.at[slots].set(False, mode="drop"),
        params_f=state.params_f.at[slots].set(floats, mode="drop"),
        params_i=state.params_i.at[slots].set(inputs.resets[:, 3:7], mode="drop"),
        stop_ids=state.stop_ids.at[slots].set(inputs.resets[:, 7:], mode="drop"),
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
    ids_Dn = jnp.where(live_D, state.last_token[slots_D], 0)[:, None]

    positions_T = jnp.concatenate([positions_P, positions_Dn.reshape(-1)])
    slots_T = jnp.concatenate([slots_P, jnp.repeat(slots_D, n)])
    live_T = jnp.concatenate([live_P, jnp.repeat(live_D, n)])
    columns_T = positions_T // settings.page_size
    inside_T = live_T & (columns_T < settings.max_pages)
    pages_T = jnp.where(inside_T, state.page_table[slots_T, jnp.minimum(columns_T, settings.max_pages - 1)], 0)
    meta = StepMetadata(
        positions=positions_T,
        pages=pages_T,
        offsets=positions_T % settings.page_size,
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


def choose(logits_RV: jax.Array, state: StepState, inputs: StepInputs, *, full: bool) -> RowResult:
    """One token for each row: sampled, or forced for a request that resumes."""
    slots_R = jnp.concatenate([inputs.prefill[:, 0], inputs.decode_slots])
    final_E, forced_E = inputs.prefill[:, 3], inputs.prefill[:, 4]
    ends_E = inputs.prefill[:, 1] + inputs.prefill[:, 2]
    # The token to choose goes behind the prompt chunk, or behind the newest token.
    positions_R = jnp.concatenate([ends_E, state.seq_len[inputs.decode_slots] + 1])
    nan_R = ~jnp.isfinite(logits_RV).all(axis=1)
    logits_RV = jnp.where(nan_R[:, None], 0.0, logits_RV)

    params_i = state.params_i[slots_R]
    rows = SamplingRows(
        temperature=state.params_f[slots_R, TEMPERATURE],
        top_p=state.params_f[slots_R, TOP_P],
        top_k=params_i[:, TOP_K],
        seeds=lax.bitcast_convert_type(params_i[:, SEED_LOW : SEED_HIGH + 1], jnp.uint32),
    )
    ids_R = sample(logits_RV, rows, positions_R, full=full)
    forced_R = jnp.concatenate([forced_E, jnp.full(inputs.decode_slots.shape, -1, jnp.int32)])
    is_forced_R = forced_R >= 0
    ids_R = jnp.where(is_forced_R, forced_R, ids_R)

    live_R = (slots_R > 0) & ~state.done[slots_R]
    produces_R = live_R & jnp.concatenate([final_E > 0, jnp.ones(inputs.decode_slots.shape, bool)])
    nan_R &= live_R
    stopped_R = (state.stop_ids[slots_R] == ids_R[:, None]).any(axis=1) | (positions_R + 1 >= params_i[:, MAX_LEN])
    done_R = (produces_R & ~is_forced_R & stopped_R) | nan_R
    return RowResult(
        ids=ids_R,
        logprobs=logprobs_of(logits_RV, ids_R),
        emitted=(produces_R & ~is_forced_R & ~nan_R).astype(jnp.int32),
        flags=(FLAG_DONE * done_R + FLAG_NAN * nan_R).astype(jnp.int32),
    )


def advance(state: StepState, inputs: StepInputs, result: RowResult) -> StepState:
    """Lengths, newest tokens and done flags after the step; rows of padding or done slots change nothing."""
    S = state.seq_len.shape[0]
    slots_E, slots_D = inputs.prefill[:, 0], inputs.decode_slots
    slots_R = jnp.concatenate([slots_E, slots_D])
    moved_R = (slots_R > 0) & ~state.done[slots_R]
    target_R = jnp.where(moved_R, slots_R, S)
    lengths_R = jnp.concatenate([inputs.prefill[:, 1] + inputs.prefill[:, 2], state.seq_len[slots_D] + 1])
    return state._replace(
        seq_len=state.seq_len.at[target_R].set(lengths_R, mode="drop"),
        last_token=state.last_token.at[target_R].set(result.ids, mode="drop"),
        done=state.done.at[target_R].max(result.flags > 0, mode="drop"),
    )


def pack_output(result: RowResult) -> jax.Array:
    """int32 [rows, 4]: emitted, flags, id, log-probability bits."""
    bits = lax.bitcast_convert_type(result.logprobs, jnp.int32)
    return jnp.stack([result.emitted, result.flags, result.ids, bits], axis=1)
