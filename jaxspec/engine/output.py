"""What the engine says of a request: all that a front end needs, so that it never looks at the live `Request`."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from jaxspec.engine.acceptance import Acceptance

# The likeliest (id, log-probability) pairs at one position, likeliest first.
Alternatives = tuple[tuple[int, float], ...]


class PromptLogprob(NamedTuple):
    """Of a prompt's token, under the model's raw distribution.

    Attributes:
        logprob: given the tokens before it.
        rank: 1 for the likeliest id there.
        alternatives: the likeliest ids there, as many as were asked for.
    """

    logprob: float
    rank: int
    alternatives: Alternatives


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class RequestStats:
    """The figures of a request that has ended. Points in time are `time.monotonic()`.

    Attributes:
        num_cached_tokens: prompt tokens found in the prefix cache when the request first started.
        first_scheduled_time: when its first step was planned; None if it ended before.
        first_token_time: when its first token was read; None if there is none.
        preempted_seconds: time between its preemptions and the steps that went on with it, in all.
        acceptance: None without speculation.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    end_time: float
    num_preemptions: int
    preempted_seconds: float
    acceptance: Acceptance | None


class RequestOutput(NamedTuple):
    """What one engine step added to one request. (A tuple, as one is made for every row of a step.)

    The first output tells that the request has been scheduled; it has no ids while the prompt is still prefilled. The
    last one has a `finish_reason` and `stats`.

    Attributes:
        time: when the host read the step, on the clock of `time.monotonic()`.
        new_ids: cut after the id that ended the output.
        new_logprobs: of the model's raw distribution, one for each new id.
        new_alternatives: one for each new id where the request asked for them, else empty.
        num_accepted: how many of the new ids are accepted drafts: they come first, then the target's own one.
        new_text: text that is final now, from the request's host rule. It may belong to earlier ids.
        new_text_offsets: for each new id, the number of characters of the output's text before it; empty where no rule
            gives text.
        first_scheduled_time: when the request's first step was planned; None if it ended before.
        num_cached_tokens: as in `RequestStats`.
        prompt_logprobs: of the prompt's tokens but the first, where the request asked, in its first output with ids or its
            last one.
        error: what went wrong, where the reason is ERROR.
    """

    request_id: str
    time: float
    new_ids: tuple[int, ...] = ()
    new_logprobs: tuple[float, ...] = ()
    new_alternatives: tuple[Alternatives, ...] = ()
    num_accepted: int = 0
    new_text: str = ""
    new_text_offsets: tuple[int, ...] = ()
    first_scheduled_time: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats | None = None
