"""The second part of a step: every row samples a token or has its window verified, and stops are found.

Shapes: R = E + D rows, prompt rows first; a row of logits (of E + D * n) belongs to a prompt row or to one token of a
decode window.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import comm
from jaxspec.engine.batch import StepInputs
from jaxspec.engine.handoff import FLAG_DONE, FLAG_NAN, Chosen
from jaxspec.engine.rules import count_chosen, ruled_logits
from jaxspec.engine.state import (
    ACCEPT_PROBABILITY,
    ALTERNATIVES,
    GREEDY_DRAFTS,
    MAX_LEN,
    MIN_P,
    SEED_HIGH,
    SEED_LOW,
    SEEDED,
    STOP_IDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    StepState,
    drafts_that_count,
)
from jaxspec.sampling.columns import Columns
from jaxspec.sampling.logprobs import logprobs_of, top_logprobs
from jaxspec.sampling.params import MAX_LOGPROBS
from jaxspec.sampling.rejection import DraftLogits, verify
from jaxspec.sampling.sampler import LogitsStats, SamplingRows, sample, temperatures
from jaxspec.sampling.target import TargetLogits
from pallas_kernels.sampling.keys import LEAST_KEY


class _Rows(NamedTuple):
    """The rows that choose.

    Attributes:
        slots: int32 [R].
        positions: int32 [R] absolute position of the first token that each row chooses.
        params_i: int32 [R, PARAMS_I].
        sampling: the sampling parameters [R].
    """

    slots: jax.Array
    positions: jax.Array
    params_i: jax.Array
    sampling: SamplingRows


def choose(
    logits_RV: jax.Array,
    state: StepState,
    inputs: StepInputs,
    columns: Columns,
    *,
    n: int,
    full: bool,
    synthetic_length: float | None = None,
    one_by_one: bool = False,
) -> Chosen:
    """Each row's new tokens: one sampled token (a forced one if the request resumes), or a verified window.

    Args:
        logits_RV: [E + D * n, V], of these columns.
        n: tokens of a decode window.
        full: apply every sampling parameter, and find the likeliest alternatives of rows that asked for them. On one device
            only in steps that need it: the others choose the same without rules, with fewer kernels.
        synthetic_length: see `verify`.
        one_by_one: with such a length, drafts are accepted with their request's probability instead (static).
    """
    E, D = inputs.slots.shape[0], inputs.decode_slots.shape[0]
    by_rules, without = (
        functools.partial(
            _read, logits_RV, state, inputs, columns,
            n=n, full=rules, synthetic_length=synthetic_length, one_by_one=one_by_one,
        )
        for rules in (True, False)
    )  # fmt: skip
    if not full or comm.is_split():
        found = by_rules() if full else without()
    else:
        no_top = jnp.zeros((E + D, n, 2 * _most_logprobs(columns)), jnp.int32)
        found = lax.cond(inputs.needs_full, by_rules, lambda: without()._replace(top=no_top))
    rows, ids_Rn, accepted_R = _rows(state, inputs), found.ids, found.accepted
    is_forced_R = jnp.concatenate([inputs.forced >= 0, jnp.zeros(D, bool)])
    live_R = (rows.slots > 0) & ~state.done[rows.slots]
    produces_R = live_R & jnp.concatenate([inputs.final, jnp.ones(D, bool)])
    nan_R = ~found.finite & live_R
    count_R, stopped_R = _first_stop(ids_Rn, accepted_R, rows, state.stop_ids[rows.slots])
    done_R = (produces_R & ~is_forced_R & stopped_R) | nan_R
    verified_D = drafts_that_count(state, rows.slots[E:], n)
    return Chosen(
        ids=ids_Rn,
        logprobs=found.logprobs,
        emitted=jnp.where(produces_R & ~is_forced_R & ~nan_R, count_R, 0),
        verified=jnp.concatenate([jnp.zeros(E, jnp.int32), verified_D]),
        accepted=accepted_R,
        flags=(FLAG_DONE * done_R + FLAG_NAN * nan_R).astype(jnp.int32),
        lengths=rows.positions + accepted_R,
        last=jnp.take_along_axis(ids_Rn, accepted_R[:, None], axis=1)[:, 0],
        rows=rows.sampling,
        top=found.top,
    )


class _Read(NamedTuple):
    """What is read from the logits. `finite` bool [R]: all rows of them are. Others as in `Chosen`."""

    ids: jax.Array
    logprobs: jax.Array
    accepted: jax.Array
    finite: jax.Array
    top: jax.Array | None


def _read(
    logits_RV: jax.Array,
    state: StepState,
    inputs: StepInputs,
    columns: Columns,
    *,
    n: int,
    full: bool,
    synthetic_length: float | None,
    one_by_one: bool,
) -> _Read:
    """The tokens of each row. Arguments as of `choose`, but with `full` rules apply in every step."""
    E, D = inputs.slots.shape[0], inputs.decode_slots.shape[0]
    rows = _rows(state, inputs)
    # The row R that each row of logits belongs to.
    row_R = jnp.concatenate([jnp.arange(E), E + jnp.repeat(jnp.arange(D), n)])
    temperature = temperatures(rows.sampling)[row_R]
    stats = columns.stats(logits_RV, temperature)
    finite_R = jnp.concatenate([stats.finite[:E], stats.finite[E:].reshape(D, n).all(axis=1)])
    parts = [
        _ruled(logits_RV, stats, temperature, rows, state, part, full, columns)
        for part in _parts(E, D, n)
        if part.windows
    ]

    verified_D = drafts_that_count(state, rows.slots[E:], n)
    ids_Rn, accepted_R = _sample_or_verify(
        parts, rows, verified_D, state, inputs, columns,
        n=n, full=full, synthetic_length=synthetic_length, one_by_one=one_by_one,
    )  # fmt: skip
    forced_E = inputs.forced
    ids_Rn = ids_Rn.at[:E, 0].set(jnp.where(forced_E >= 0, forced_E, ids_Rn[:E, 0]))
    wanted = (rows.params_i[row_R, ALTERNATIVES] > 0) & stats.finite if full else None
    logprobs_Rn, top = _logprobs(logits_RV, ids_Rn, stats.log_z, E, wanted, columns)
    return _Read(ids_Rn, logprobs_Rn, accepted_R, finite_R, top)


def advance(state: StepState, inputs: StepInputs, chosen: Chosen, columns: Columns, *, full: bool) -> StepState:
    """Lengths, newest tokens, counts and done flags after the step; rows of padding or done slots change nothing."""
    S = state.seq_len.shape[0]
    slots_R = jnp.concatenate([inputs.slots, inputs.decode_slots])
    moved_R = (slots_R > 0) & ~state.done[slots_R]
    target_R = jnp.where(moved_R, slots_R, S)
    if full:
        state = state._replace(counts=count_chosen(state.counts, inputs, chosen, target_R, columns))
    return state._replace(
        seq_len=state.seq_len.at[target_R].set(chosen.lengths, mode="drop"),
        last_token=state.last_token.at[target_R].set(chosen.last, mode="drop"),
        done=state.done.at[target_R].max(chosen.flags > 0, mode="drop"),
    )


def _rows(state: StepState, inputs: StepInputs) -> _Rows:
    slots_R = jnp.concatenate([inputs.slots, inputs.decode_slots])
    ends_E = inputs.starts + inputs.lengths
    # The first token to choose follows the prompt chunk, or the newest token.
    positions_R = jnp.concatenate([ends_E, state.seq_len[inputs.decode_slots] + 1])
    params_i = state.params_i[slots_R]
    sampling = SamplingRows(
        temperature=state.params_f[slots_R, TEMPERATURE],
        top_p=state.params_f[slots_R, TOP_P],
        min_p=state.params_f[slots_R, MIN_P],
        top_k=params_i[:, TOP_K],
        seeds=lax.bitcast_convert_type(params_i[:, SEED_LOW : SEED_HIGH + 1], jnp.uint32),
        greedy_drafts=params_i[:, GREEDY_DRAFTS] > 0,
        seeded=params_i[:, SEEDED] > 0,
    )
    return _Rows(slots_R, positions_R, params_i, sampling)


class _Part(NamedTuple):
    """Windows whose logits lie one after the other: prompt rows and windows of one token, or windows of several.

    Attributes:
        first: of their rows R, and of their rows of logits.
        windows: how many there are.
        n: tokens of a window.
    """

    first: int
    windows: int
    n: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.windows)

    @property
    def of_logits(self) -> slice:
        return slice(self.first, self.first + self.windows * self.n)


def _parts(E: int, D: int, n: int) -> tuple[_Part, ...]:
    return (_Part(0, E + D, 1),) if n == 1 else (_Part(0, E, 1), _Part(E, D, n))


def _ruled(
    logits_RV: jax.Array,
    stats: LogitsStats,
    temperature: jax.Array,
    rows: _Rows,
    state: StepState,
    part: _Part,
    full: bool,
    columns: Columns,
) -> tuple[_Part, TargetLogits, LogitsStats]:
    """A part's logits after its requests' rules, and their statistics.

    Args:
        logits_RV, stats, temperature: of all rows of logits.
    """
    own, temperature = logits_RV[part.of_logits], temperature[part.of_logits]
    stats = jax.tree.map(lambda a: a[part.of_logits], stats)
    if not full:
        return part, TargetLogits.of(own), stats
    target = ruled_logits(own, state, rows.slots[part.rows], rows.positions[part.rows], stats.finite, part.n, columns)
    # Other rows are not read again.
    again = columns.stats(
        target.raw if target.ruled is None else target.ruled,
        temperature,
        jnp.where(target.changed, LEAST_KEY + 1, LEAST_KEY),
    )
    return part, target, jax.tree.map(functools.partial(jnp.where, target.changed), again, stats)


def _sample_or_verify(
    parts: Sequence[tuple[_Part, TargetLogits, LogitsStats]],
    rows: _Rows,
    verified_D: jax.Array,
    state: StepState,
    inputs: StepInputs,
    columns: Columns,
    *,
    n: int,
    full: bool,
    synthetic_length: float | None,
    one_by_one: bool,
) -> tuple[jax.Array, jax.Array]:
    """Ids int32 [R, n] and accepted drafts int32 [R]: prompt rows, and windows of one token, are sampled.

    Args:
        parts: each with its logits after the requests' rules, and the statistics of these.
        verified_D: int32 [D] how many drafts of each window may be accepted.
    """
    slots_D = inputs.decode_slots
    ids_Rn, accepted_R = [], []
    for part, target, stats in parts:
        own = jax.tree.map(lambda a, part=part: a[part.rows], rows.sampling)
        positions = rows.positions[part.rows]
        if part.n == 1:
            ids = sample(target, own, positions, full=full, stats=stats, columns=columns)
            ids_Rn.append(jnp.pad(ids[:, None], ((0, 0), (0, n - 1))))
            accepted_R.append(jnp.zeros(part.windows, jnp.int32))
            continue
        verified = verify(
            target,
            state.drafts[slots_D, : n - 1],
            None if isinstance(state.draft_logits, tuple) else DraftLogits(state.draft_logits, state.draft_log_z),
            own.greedy_drafts if isinstance(state.looked_up, tuple) else own.greedy_drafts | state.looked_up[slots_D],
            verified_D,
            own,
            positions,
            full=full,
            synthetic_length=synthetic_length,
            accept_probability=state.params_f[slots_D, ACCEPT_PROBABILITY] if one_by_one else None,
            q_rows=slots_D,
            stats=stats,
            columns=columns,
        )
        ids_Rn.append(verified.ids)
        accepted_R.append(verified.accepted)
    # Joined, not written into zeros: without prompts such a write is of all rows, whose indices are an empty constant, and
    # XLA's partitioner crashes where a step over several devices is given one.
    return jnp.concatenate(ids_Rn), jnp.concatenate(accepted_R)


def _first_stop(
    ids_Rn: jax.Array, accepted_R: jax.Array, rows: _Rows, stop_ids_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tokens up to and including the first stop, int32 [R], and whether there is one, bool [R].

    A stop is one of the row's `stop_ids_R` [R, STOP_IDS], or the request's last position.
    """
    index_n = jnp.arange(ids_Rn.shape[1], dtype=jnp.int32)
    # One after the other: so XLA needs no kernel for them alone.
    stops_Rn = functools.reduce(jnp.logical_or, [ids_Rn == stop_ids_R[:, i, None] for i in range(STOP_IDS)])
    stops_Rn |= rows.positions[:, None] + index_n + 1 >= rows.params_i[:, MAX_LEN][:, None]
    stops_Rn &= index_n <= accepted_R[:, None]
    stopped_R = stops_Rn.any(axis=1)
    return jnp.where(stopped_R, jnp.argmax(stops_Rn, axis=1).astype(jnp.int32), accepted_R) + 1, stopped_R


def _most_logprobs(columns: Columns) -> int:
    return min(MAX_LOGPROBS, columns.vocab)


def _logprobs(
    logits_RV: jax.Array,
    ids_Rn: jax.Array,
    log_z: jax.Array,
    E: int,
    wanted: jax.Array | None,
    columns: Columns,
) -> tuple[jax.Array, jax.Array | None]:
    """Raw log-probabilities [R, n] of the chosen ids, and `Chosen.top`.

    A prompt row has one row of logits for all n columns, of which only the first is ever read.

    Args:
        wanted: of which rows of logits, all finite, the likeliest ids are read; None in a "lean" bucket, which finds none.
    """
    R, n = ids_Rn.shape
    D = R - E
    token_Rn = jnp.concatenate([jnp.repeat(jnp.arange(E)[:, None], n, axis=1), E + jnp.arange(D * n).reshape(D, n)])
    top = None
    if wanted is not None:
        ids, values = top_logprobs(logits_RV, log_z, _most_logprobs(columns), wanted, columns)
        top = jnp.concatenate([ids, lax.bitcast_convert_type(values, jnp.int32)], axis=1)[token_Rn]
    of_logits = jnp.concatenate([ids_Rn[:E, :1], ids_Rn[E:].reshape(D * n, 1)])
    return logprobs_of(logits_RV, of_logits, log_z, columns)[token_Rn, 0], top
