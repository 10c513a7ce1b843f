"""The jitted step: the target reads prompt chunks and decode windows, every row chooses, the draft proposes.

All state passed from step to step stays on the device; the host only reads the packed output, or finds it in its own memory,
where the step has written it. A step is one executable, or
two where rows may choose only once the host knows more than it did when the forward pass could begin.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec import comm
from jaxspec.config import Settings
from jaxspec.engine.batch import READBACK_FIELDS, InputLayout, StepInputs
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.choose import advance, choose
from jaxspec.engine.drafting import propose
from jaxspec.engine.forward import forward
from jaxspec.engine.handoff import Chosen, Drafted, Forwarded
from jaxspec.engine.state import StepState
from jaxspec.sampling.columns import Columns
from jaxspec.sampling.params import MAX_LOGPROBS
from pallas_kernels.readback import api as readback_api

# The counts of accepted and of verified drafts share the packed output's flags column, eight bits each.
ACCEPTED_SHIFT, VERIFIED_SHIFT, FIELD = 8, 16, 255


class Probe(NamedTuple):
    """For `compare` and benchmarks: residual streams [layers + 1, T, H] and logits [T, V], float32, of every token.

    `experts`: for each mixture layer, the experts that it chose, int32 [T, top_k]. `drafted`: float32, of the bucket's rows,
    where a model drafts.
    """

    residuals: jax.Array
    logits: jax.Array
    experts: tuple[jax.Array, ...]
    drafted: Drafted | None = None


class StepArrays(NamedTuple):
    """The outputs of a step that the host may read. Rows are the bucket's, prompt rows first; each rank has such outputs.

    Attributes:
        packed: int32 [rows, `packed_columns`]: tokens emitted, flags and counts of drafts, ids, log-probabilities as bits, the
            new drafts.
        top: int32 [rows, n, 2 * MAX_LOGPROBS]: likeliest ids, log-probabilities as bits; None in a "lean" bucket. Neither
            is there where the step writes both into the host's memory, `packed` first.
        hidden: [P, H] of the prompt tokens after the final norm, for `jaxspec.engine.scoring`; None in a "lean" bucket and
            without prompts.
        probe: where it was asked for.
        expert_load: a copy of the state's, () where it is not counted.
    """

    packed: jax.Array | None
    top: jax.Array | None
    hidden: jax.Array | None
    probe: Probe | None
    expert_load: Any


Step = Callable[[Any, StepState, jax.Array], tuple[StepState, StepArrays]]
ForwardPart = Callable[[Any, StepState, jax.Array], tuple[StepState, Forwarded]]
ChoosePart = Callable[[Any, StepState, Forwarded], tuple[StepState, StepArrays]]


def make_step(
    graphdefs: tuple[nnx.GraphDef, nnx.GraphDef | None],
    layout: InputLayout,
    settings: Settings,
    *,
    probe: bool = False,
    skip_dead: bool = True,
    readback: bool = False,
) -> Step:
    """The step of one bucket: (params, state, inputs int32 [size]) -> (state, StepArrays).

    Args:
        graphdefs: of the target and of the model that drafts, if one does.
        skip_dead: in the draft's catch-up, attend for the rows that draft only (False for tests and benchmarks).
        readback: the output goes into the host's memory, where the inputs say.
    """
    forward_part, choose_part = make_parts(
        graphdefs, layout, settings, probe=probe, skip_dead=skip_dead, readback=readback
    )

    def step(params: tuple, state: StepState, flat_inputs: jax.Array) -> tuple[StepState, StepArrays]:
        state, forwarded = forward_part(params, state, flat_inputs)
        return choose_part(params, state, forwarded)

    return step


def make_parts(
    graphdefs: tuple[nnx.GraphDef, nnx.GraphDef | None],
    layout: InputLayout,
    settings: Settings,
    *,
    probe: bool = False,
    skip_dead: bool = True,
    readback: bool = False,
) -> tuple[ForwardPart, ChoosePart]:
    """The step of one bucket in two parts, which follow each other.

    (params, state, inputs) -> (state, Forwarded) reads and writes the target's KV and nothing else that tells what the rows
    hold; (params, state, Forwarded) -> (state, StepArrays) chooses and drafts. Between the two only masks may change.
    Arguments as in `make_step`.
    """
    full, window = layout.bucket.variant == "full", layout.bucket.window

    def models(params: tuple) -> tuple[Any, Any]:
        draft = None if graphdefs[1] is None else nnx.merge(graphdefs[1], params[1])
        return nnx.merge(graphdefs[0], params[0]), draft

    def forward_part(params: tuple, state: StepState, flat_inputs: jax.Array) -> tuple[StepState, Forwarded]:
        target, draft = models(params)
        inputs = layout.split(flat_inputs)
        capture = () if draft is None else draft.capture
        if probe:
            capture = tuple(range(len(target.layers) + 1))
        with jax.named_scope("target"), comm.through(state.mailboxes):
            state, forwarded = forward(
                target, state, inputs, settings, n=window, full=full, capture=capture, experts=probe
            )
        return state, forwarded._replace(inputs=flat_inputs)

    def choose_part(params: tuple, state: StepState, forwarded: Forwarded) -> tuple[StepState, StepArrays]:
        assert forwarded.inputs is not None
        with comm.through(state.mailboxes):
            return choose_and_draft(params, state, forwarded.inputs, forwarded)

    def choose_and_draft(
        params: tuple, state: StepState, flat_inputs: jax.Array, forwarded: Forwarded
    ) -> tuple[StepState, StepArrays]:
        target, draft = models(params)
        inputs, columns = layout.split(flat_inputs), Columns(target.config.vocab_size)
        with jax.named_scope("verify"):
            chosen = choose(
                forwarded.logits, state, inputs, columns,
                n=window, full=full, synthetic_length=settings.synthetic_acceptance_length,
                one_by_one=settings.synthetic_acceptance_pattern == "each",
            )  # fmt: skip
            was_done = state.done
            state = advance(state, inputs, chosen, columns, full=full)
        drafted = None
        if settings.window > 1:
            state, drafted = propose(
                state, draft, target, forwarded, inputs, chosen,
                k=layout.bucket.drafts, was_done=was_done, settings=settings, skip_dead=skip_dead,
            )  # fmt: skip
        seen = None
        if probe:
            residuals = jnp.stack([c.astype(jnp.float32) for c in forwarded.captured.values()])
            if drafted is not None:
                drafted = drafted._replace(logits=tuple(comm.gather(logits, axis=1) for logits in drafted.logits))
            drafted = jax.tree.map(lambda x: x.astype(jnp.float32), drafted)
            logits_TV = comm.gather(target.logits(forwarded.hidden), axis=1).astype(jnp.float32)
            seen = Probe(residuals, logits_TV, forwarded.experts, drafted)
        P = layout.bucket.prefill_tokens
        hidden = forwarded.hidden[:P] if P and full else None
        packed, top = pack_output(chosen, drafts_of(state, inputs)), chosen.top
        if readback:
            state = state._replace(written=write_to_host(packed, top, flat_inputs, state.written))
            return state, StepArrays(None, None, hidden, seen, state.expert_load)
        return state, StepArrays(packed, top, hidden, seen, state.expert_load)

    return forward_part, choose_part


def write_to_host(packed: jax.Array, top: jax.Array | None, flat_inputs: jax.Array, before: jax.Array) -> jax.Array:
    """int32 [1], ready when the output is where the inputs say. Of the devices of a rank, which all have it, one writes it.

    Args:
        before: what the step before gave, whose place the result takes.
    """
    assert StepInputs._fields[0] == "readback", "the inputs begin with where to write"
    words = packed.reshape(-1) if top is None else jnp.concatenate([packed.reshape(-1), top.reshape(-1)])
    # What nothing reads would be no argument of the executable: the result would lie elsewhere in each step.
    words, _ = lax.optimization_barrier((words, before))
    if comm.is_split():
        return readback_api.write(words, jnp.where(comm.first(1) == 0, flat_inputs[:READBACK_FIELDS], 0))
    return readback_api.write(words, flat_inputs)


def packed_columns(window: int, k: int) -> int:
    """Columns of `StepArrays.packed` with windows of so many tokens, in an engine of k drafts."""
    return 2 + 2 * window + k


def top_columns(bucket: Bucket) -> int:
    """Words of a row of `StepArrays.top`; none in a "lean" bucket."""
    return bucket.window * 2 * MAX_LOGPROBS if bucket.variant == "full" else 0


def drafts_of(state: StepState, inputs: StepInputs) -> jax.Array:
    """int32 [rows, k]: what each row's next window will verify."""
    slots_R = jnp.concatenate([inputs.slots, inputs.decode_slots])
    if isinstance(state.drafts, tuple):  # no speculation
        return jnp.zeros((slots_R.shape[0], 0), jnp.int32)
    return state.drafts[slots_R]


def pack_output(chosen: Chosen, drafts_Rk: jax.Array) -> jax.Array:
    """int32 [rows, 2 + 2n + k]: emitted, flags with two counts above them, ids, log-probability bits, drafts."""
    bits_Rn = lax.bitcast_convert_type(chosen.logprobs, jnp.int32)
    flags_R = chosen.flags + (chosen.accepted << ACCEPTED_SHIFT) + (chosen.verified << VERIFIED_SHIFT)
    return jnp.concatenate([chosen.emitted[:, None], flags_R[:, None], chosen.ids, bits_Rn, drafts_Rk], axis=1)
