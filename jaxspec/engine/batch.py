"""A step's plan as ONE int32 array: each host-to-device copy costs more than many small kernels.

`InputLayout` is the one description of that array; packing (NumPy, on the host) and unpacking (inside the step) both
follow it.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.config import pages_for
from jaxspec.engine.buckets import Bucket, choose_bucket
from jaxspec.engine.plan import NO_ID, StepPlan
from jaxspec.engine.request import Request
from jaxspec.engine.state import PARAMS_F, PARAMS_I, STOP_IDS
from jaxspec.sampling.params import MAX_LOGIT_BIAS
from pallas_kernels.readback.host_memory import ENTRY_WORDS, Entry


def bucket_for(table: tuple[Bucket, ...], plan: StepPlan, seconds: Mapping[Bucket, float] | None = None) -> Bucket:
    """The cheapest bucket that holds a plan, of several ranks that of each. See `choose_bucket`."""
    return choose_bucket(
        table,
        prefill_tokens=max(part.prefill_tokens for part in plan.parts),
        prefill_rows=max(len(part.prefill) for part in plan.parts),
        decode_rows=max(len(part.decode) for part in plan.parts),
        full=plan.needs_full,
        drafts=plan.drafts,
        seconds=seconds,
    )


class StepInputs(NamedTuple):
    """The unpacked array. Padding rows have slot 0; padding deltas and resets too.

    Attributes:
        readback: int32 [READBACK_FIELDS], begins with `Entry.words` of where the step writes its output, or with zeros; then
            whether a row needs a "full" sampler.
        chunk_ids: int32 [P].
        prefill: int32 [E, PREFILL_FIELDS]; its columns are `PrefillRow`'s fields, by the names below.
        decode_slots: int32 [D].
        deltas: int32 [M, 3] of page tables: slot, column, page.
        resets: int32 [E, RESET_FIELDS]: slot, params_f as bits, params_i, stop ids; slot 0 for rows that do not start a
            request.
        biases: int32 [E, 2 * MAX_LOGIT_BIAS] of the same rows: ids, values as bits. No rows in a "lean" bucket.
    """

    readback: jax.Array
    chunk_ids: jax.Array
    prefill: jax.Array
    decode_slots: jax.Array
    deltas: jax.Array
    resets: jax.Array
    biases: jax.Array

    @property
    def needs_full(self) -> jax.Array:  # bool []
        return self.readback[ENTRY_WORDS] > 0

    @property
    def slots(self) -> jax.Array:  # [E], as all of a prompt row's fields
        return self.prefill[:, 0]

    @property
    def starts(self) -> jax.Array:
        return self.prefill[:, 1]

    @property
    def lengths(self) -> jax.Array:
        return self.prefill[:, 2]

    @property
    def final(self) -> jax.Array:
        return self.prefill[:, 3] > 0

    @property
    def forced(self) -> jax.Array:
        return self.prefill[:, 4]

    @property
    def next_ids(self) -> jax.Array:
        return self.prefill[:, 5]

    @property
    def cached(self) -> jax.Array:
        return self.prefill[:, 6]

    @property
    def delta_slots(self) -> jax.Array:  # [M], like the next two
        return self.deltas[:, 0]

    @property
    def delta_columns(self) -> jax.Array:
        return self.deltas[:, 1]

    @property
    def delta_pages(self) -> jax.Array:
        return self.deltas[:, 2]

    @property
    def reset_slots(self) -> jax.Array:  # [E]
        return self.resets[:, 0]

    @property
    def reset_floats(self) -> jax.Array:  # [E, PARAMS_F], bits
        return self.resets[:, 1:RESET_INTS]

    @property
    def reset_ints(self) -> jax.Array:  # [E, PARAMS_I]
        return self.resets[:, RESET_INTS:RESET_STOPS]

    @property
    def reset_stop_ids(self) -> jax.Array:  # [E, STOP_IDS]
        return self.resets[:, RESET_STOPS:]

    @property
    def bias_ids(self) -> jax.Array:  # [E, MAX_LOGIT_BIAS]
        return self.biases[:, :MAX_LOGIT_BIAS]

    @property
    def bias_values(self) -> jax.Array:  # [E, MAX_LOGIT_BIAS], bits
        return self.biases[:, MAX_LOGIT_BIAS:]


# Four are used. With these what follows begins at a multiple of 256 bytes, as Mosaic GPU's kernels want their operands.
READBACK_FIELDS = 64
PREFILL_FIELDS = 7
# Where a reset record's parts begin.
RESET_INTS = 1 + PARAMS_F
RESET_STOPS = RESET_INTS + PARAMS_I
RESET_FIELDS = RESET_STOPS + STOP_IDS


@dataclass(frozen=True)
class InputLayout:
    """Shapes of one bucket's inputs, laid end to end in one int32 array."""

    bucket: Bucket
    page_size: int
    max_pages: int

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the fields of `StepInputs`, in their order."""
        b = self.bucket
        # A chunk of c tokens opens at most ceil(c / page) + 1 pages, a decode row at most one, and a row that has
        # just become a decode row one more for its reserve. Of pages found in the prefix cache a step can tell as many
        # as the longest request has.
        deltas = pages_for(b.prefill_tokens, self.page_size) + 2 * b.rows + self.max_pages * (b.prefill_tokens > 0)
        return (
            (READBACK_FIELDS,), (b.prefill_tokens,), (b.prefill_rows, PREFILL_FIELDS), (b.decode_rows,), (deltas, 3),
            (b.prefill_rows, RESET_FIELDS), (b.prefill_rows * (b.variant == "full"), 2 * MAX_LOGIT_BIAS),
        )  # fmt: skip

    @functools.cached_property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes))

    def split(self, flat: Any) -> StepInputs:
        """Views of a flat array [size], NumPy or traced, in the shapes of `StepInputs`."""
        parts, offset = [], 0
        for shape in self.shapes:
            count = math.prod(shape)
            parts.append(flat[offset : offset + count].reshape(shape))
            offset += count
        return StepInputs(*parts)

    def pack_ranks(self, plan: StepPlan, max_slots: int, entry: Entry | None = None) -> np.ndarray:
        """The int32 array [ranks * size] of a plan that fits the bucket: `pack` of each rank's, which has so many slots.

        Args:
            entry: where the step writes its output, if it does.
        """
        return np.concatenate(
            [
                self.pack(part, rank * max_slots, None if entry is None else entry.words(rank))
                for rank, part in enumerate(plan.parts)
            ]
        )

    def pack(self, plan: StepPlan, first_slot: int = 0, readback: np.ndarray | None = None) -> np.ndarray:
        """The int32 array [size] of one rank's plan that fits the bucket.

        Args:
            first_slot: the rank's padding slot.
            readback: `Entry.words` of the rank, where the step writes its output.
        """
        flat = np.zeros(self.size, np.int32)
        views = self.split(flat)
        if readback is not None:
            views.readback[:ENTRY_WORDS] = readback
        views.readback[ENTRY_WORDS] = plan.needs_full
        offset = 0
        for e, row in enumerate(plan.prefill):
            slot = row.request.slot - first_slot
            views.chunk_ids[offset : offset + row.length] = row.request.tokens[row.start : row.start + row.length]
            views.prefill[e] = (slot, row.start, row.length, row.final, row.forced, row.next_id, row.cached)
            if row.request.needs_reset:
                views.resets[e] = reset_record(row.request, slot)
                if len(views.biases):
                    views.biases[e] = bias_record(row.request)
            offset += row.length
        views.decode_slots[: len(plan.decode)] = [request.slot - first_slot for request in plan.decode]
        if plan.page_deltas:
            views.deltas[: len(plan.page_deltas)] = np.array(plan.page_deltas) - (first_slot, 0, 0)
        return flat


def reset_record(request: Request, slot: int) -> np.ndarray:
    """int32 [RESET_FIELDS]: the parameters of the request that a slot now serves."""
    params = request.params
    floats = (
        params.temperature, params.top_p, params.min_p,
        params.repetition_penalty, params.frequency_penalty, params.presence_penalty, request.accept_probability,
    )  # fmt: skip
    seed = np.array([request.seed & 0xFFFFFFFF, request.seed >> 32 & 0xFFFFFFFF], np.uint32).view(np.int32)
    top_k = min(max(params.top_k, 0), np.iinfo(np.int32).max)
    # Past the longest text the two are the same, and unlike min_tokens it fits the type.
    min_total = min(request.prompt_len + params.min_tokens, request.max_total)
    record = np.full(RESET_FIELDS, NO_ID, np.int32)
    record[0] = slot
    record[1:RESET_INTS] = np.array(floats, np.float32).view(np.int32)
    record[RESET_INTS:RESET_STOPS] = (
        *seed, top_k, request.max_total, request.prompt_len, min_total,
        len(params.logit_bias), request.num_drafts, params.greedy_drafts, request.constraint is not None,
        params.seed is not None, params.logprobs or 0,
    )  # fmt: skip
    stop_ids = sorted(request.stop_ids)
    record[RESET_STOPS : RESET_STOPS + len(stop_ids)] = stop_ids
    return record


def bias_record(request: Request) -> np.ndarray:
    """int32 [2 * MAX_LOGIT_BIAS]: a request's logit biases, ids and then values."""
    record = np.zeros((2, MAX_LOGIT_BIAS), np.int32)
    for index, (token, value) in enumerate(request.params.logit_bias.items()):
        record[:, index] = (token, np.float32(value).view(np.int32))
    return record.reshape(-1)
