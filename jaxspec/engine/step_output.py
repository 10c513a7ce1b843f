"""What a step gave, as the host reads it."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.output import Alternatives
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.scoring import Scores
from jaxspec.engine.step import ACCEPTED_SHIFT, FIELD, VERIFIED_SHIFT, Probe, StepArrays


@dataclass(frozen=True)
class StepOutput:
    """A plan with what its step gave, prompt rows before decode rows, as the plan has them.

    Attributes:
        bucket: that it ran in.
        emitted, verified, accepted, flags: int32 [rows]. ids: int32 [rows, n]. logprobs: float32 [rows, n].
        drafts: int32 [rows, k] that each row's next window verifies.
        top_ids: int32 [rows, n, MAX_LOGPROBS] likeliest ids at each position, top_logprobs float32 likewise; where a row
            of the plan asked for alternatives.
        scores: of the prompt tokens, where a row of the plan asked.
        probe: where the runner was built with `probe`.
    """

    plan: StepPlan
    bucket: Bucket
    emitted: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    flags: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    drafts: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    scores: Scores | None = None
    probe: Probe | None = None

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        bucket: Bucket,
        packed: np.ndarray,
        arrays: StepArrays,
        *,
        top: np.ndarray | None,
        scores: Scores | None,
    ) -> "StepOutput":
        """From what the device gave: of all ranks' rows, one after the other. Waits for the other arrays.

        Args:
            packed, top: as in `StepArrays`; top where it is wanted.
        """
        rows, n = _rows_of(plan, bucket, packed), bucket.window
        top_ids, top_bits = (None, None) if top is None else np.split(_rows_of(plan, bucket, top), 2, axis=2)
        return cls(
            plan,
            bucket,
            emitted=rows[:, 0],
            verified=rows[:, 1] >> VERIFIED_SHIFT,
            accepted=rows[:, 1] >> ACCEPTED_SHIFT & FIELD,
            flags=rows[:, 1] & FIELD,
            ids=rows[:, 2 : 2 + n],
            logprobs=rows[:, 2 + n : 2 + 2 * n].view(np.float32),
            drafts=rows[:, 2 + 2 * n :],
            top_ids=top_ids,
            top_logprobs=None if top_bits is None else np.ascontiguousarray(top_bits).view(np.float32),
            scores=scores,
            probe=None if arrays.probe is None else jax.tree.map(np.asarray, arrays.probe),
        )

    def token_offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the rows begin in the step's flat token arrays, such as the probe's: prompt rows [E], decode rows [D]."""
        lengths = np.array([row.length for row in self.plan.prefill], np.int64)
        decode = self.bucket.prefill_tokens + self.bucket.window * np.arange(len(self.plan.decode))
        return np.cumsum(lengths) - lengths, decode

    def alternatives(self, row: int, kept: int, count: int) -> tuple[Alternatives, ...]:
        """The `count` likeliest ids at each of a row's first `kept` positions; empty for a count of 0."""
        if not count:
            return ()
        assert self.top_ids is not None
        assert self.top_logprobs is not None
        pairs = zip(
            self.top_ids[row, :kept, :count].tolist(), self.top_logprobs[row, :kept, :count].tolist(), strict=True
        )
        return tuple(tuple(zip(ids, values, strict=True)) for ids, values in pairs)


def _rows_of(plan: StepPlan, bucket: Bucket, array: Any) -> np.ndarray:
    """Of an array [ranks * rows of the bucket, ...] the rows of a plan."""
    ranks, first = np.split(np.asarray(array), len(plan.parts)), bucket.prefill_rows
    parts = list(zip(ranks, plan.parts, strict=True))
    prompts = [rows[: len(part.prefill)] for rows, part in parts]
    return np.concatenate([*prompts, *(rows[first : first + len(part.decode)] for rows, part in parts)])
