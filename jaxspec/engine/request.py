"""One generation request: its state machine and the one place where its output is cut."""

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxspec.engine.acceptance import Acceptance, acceptance_of
from jaxspec.sampling.params import SamplingParams

# The likeliest (id, log-probability) pairs at one position, likeliest first.
Alternatives = tuple[tuple[int, float], ...]


class StopRule(Protocol):
    """A rule that lives on the host, such as stop strings. The engine knows nothing of text: it only asks."""

    def feed(self, ids: Sequence[int], ended: bool) -> int | None:
        """Takes the newest output ids and says how many of them to keep if the output ends inside them, else None.

        `ended`: these are the last ids, because another rule (an end-of-text id, max_tokens) has fired.
        """
        ...


class RequestState(enum.Enum):
    WAITING = "waiting"  # no slot, no pages
    PREFILL = "prefill"  # has a slot; some of its tokens have no KV yet
    DECODE = "decode"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class RequestOutput:
    """What one engine step added to one request."""

    request_id: str
    new_ids: tuple[int, ...]
    new_logprobs: tuple[float, ...]  # of the raw distribution, one for each new id
    finish_reason: FinishReason | None = None
    error: str | None = None
    # One for each new id where the request asked for alternatives, else none.
    new_top_logprobs: tuple[Alternatives, ...] = ()
    num_accepted: int = 0  # how many of the new ids are accepted drafts: they come first, then the target's own one


@dataclass(eq=False)
class Request:
    """A request, from its arrival to its end. The engine owns every field that is not an argument.

    Attributes:
        tokens: prompt and output ids: all that the host knows to be final.
        prompt_len: length of the original prompt; it stays when the request is retracted and prefilled again.
        computed: tokens whose KV a dispatched step writes.
        slot: row of the device state, 0 while there is none; `pages` its KV pages in order.
        sent_pages: how many of `pages` the device's page table knows.
        needs_reset: the device does not yet know that the slot serves this request.
        windows: entry i, of k + 1: verified windows with i accepted drafts; empty without speculation.
        seed: 64-bit seed in use; max_total: most tokens, prompt included; stop_ids: ids that end the output.
        num_drafts: how many drafts of a window may be accepted.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    stop_rule: StopRule | None = None
    priority: int = 0
    arrival_time: float = field(default_factory=time.monotonic)

    state: RequestState = field(default=RequestState.WAITING, init=False)
    tokens: list[int] = field(init=False)
    prompt_len: int = field(init=False)
    computed: int = field(default=0, init=False)
    slot: int = field(default=0, init=False)
    pages: list[int] = field(default_factory=list, init=False)
    sent_pages: int = field(default=0, init=False)
    needs_reset: bool = field(default=True, init=False)
    windows: list[int] = field(default_factory=list, init=False)
    seed: int = field(default=0, init=False)
    max_total: int = field(default=0, init=False)
    stop_ids: frozenset[int] = field(default=frozenset(), init=False)
    num_drafts: int = field(default=0, init=False)
    aborted: bool = field(default=False, init=False)
    num_preemptions: int = field(default=0, init=False)
    preempted_seconds: float = field(default=0.0, init=False)  # from each retraction to the step that takes it up again
    first_scheduled_time: float | None = field(default=None, init=False)

    def __post_init__(self):
        self.tokens = list(self.prompt_ids)
        self.prompt_len = len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def acceptance(self) -> Acceptance | None:
        """None without speculation."""
        return acceptance_of(self.windows, self.num_drafts * sum(self.windows))

    @property
    def resuming(self) -> bool:
        """Was retracted: its known tokens but the last are prefilled again, and the last is forced, not sampled."""
        return self.num_output > 0

    @property
    def prefill_target(self) -> int:
        """How many tokens must be prefilled before the request decodes."""
        return len(self.tokens) - 1 if self.resuming else self.prompt_len

    @property
    def order(self) -> tuple[int, float, str]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.priority, self.arrival_time, self.id)

    def accept(self, ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Takes the newest ids up to the first stop inside them: the only place where output is cut.

        Returns:
            How many of `ids` were kept, and why the output ended, if it did.
        """
        kept, reason = 0, None
        for token in ids:
            kept += 1
            if token in self.stop_ids:
                reason = FinishReason.STOP
            elif len(self.tokens) + kept >= self.max_total:
                reason = FinishReason.LENGTH
            if reason:
                break
        if self.stop_rule is not None:
            matched = self.stop_rule.feed(ids[:kept], ended=reason is not None)
            if matched is not None:
                kept, reason = matched, FinishReason.STOP
        self.tokens.extend(ids[:kept])
        return kept, reason
