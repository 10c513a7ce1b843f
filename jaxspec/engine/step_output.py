"""What a step gave, as the host reads it."""

from dataclasses import dataclass

import numpy as np

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.output import Alternatives
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.scoring import Scores
from jaxspec.engine.step import Probe


@dataclass(frozen=True)
class StepOutput:
    """A plan with what its step gave, prompt rows before decode rows.

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
