"""The figures of one choice that has ended: where its time went, for /metrics and for answers that ask for it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serve.protocol import RequestMetrics, SpeculationMetrics

if TYPE_CHECKING:
    from jaxspec.engine.acceptance import Acceptance
    from jaxspec.engine.output import RequestStats


@dataclass
class PromptGroup:
    """The choices of one prompt, which count as one request in some figures.

    Attributes:
        size: choices asked for.
    """

    size: int
    _ended: int = field(default=0, init=False)
    _longest: int = field(default=0, init=False)

    def end(self, num_output_tokens: int) -> int | None:
        """One choice has ended: the length of the longest one if it was the last, else None."""
        self._ended += 1
        self._longest = max(self._longest, num_output_tokens)
        return self._longest if self._ended == self.size else None


@dataclass(frozen=True)
class RequestTimes:
    """
    In seconds. Queue, prefill and decode add up to the time from arrival to end. A time that needs a first step or a
    first token is None where there was none.

    Attributes:
        queue: arrival to first step.
        prefill: first step to first token.
        first_token: arrival to first token.
        decode: first token to end.
        preemption: the part of prefill and decode in which the request was preempted and waited to go on.
    """

    queue: float | None
    prefill: float | None
    first_token: float | None
    decode: float | None
    preemption: float


def times_of(stats: "RequestStats") -> RequestTimes:
    arrival, scheduled, first_token = stats.arrival_time, stats.first_scheduled_time, stats.first_token_time

    def between(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else end - start

    return RequestTimes(
        queue=between(arrival, scheduled),
        prefill=between(scheduled, first_token),
        first_token=between(arrival, first_token),
        decode=between(first_token, stats.end_time),
        preemption=stats.preempted_seconds,
    )


def request_metrics(stats: "RequestStats") -> RequestMetrics:
    """The `metrics` of one choice."""
    times = times_of(stats)
    return {
        "queue_time_seconds": times.queue,
        "prefill_time_seconds": times.prefill,
        "time_to_first_token_seconds": times.first_token,
        "decode_time_seconds": times.decode,
        "preemption_time_seconds": times.preemption,
        "num_preemptions": stats.num_preemptions,
        "speculative_decoding": _speculation(stats.acceptance),
    }


def _speculation(acceptance: "Acceptance | None") -> SpeculationMetrics | None:
    """Means are null where no window was verified: a single token needs none."""
    if acceptance is None:
        return None
    return {
        "mean_acceptance_length": acceptance.mean_length,
        "draft_acceptance_rate": acceptance.rate,
        "acceptance_histogram": list(acceptance.histogram),
        "num_spec_steps": acceptance.num_steps,
        "num_accepted_draft_tokens": acceptance.num_accepted,
        "num_draft_tokens": acceptance.num_drafted,
    }
