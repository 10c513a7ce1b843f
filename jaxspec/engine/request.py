"""One generation request: its state machine and the one place where its output is cut."""

import enum
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxspec.engine.acceptance import Acceptance, acceptance_of
from jaxspec.engine.host_rule import Constraint, HostRule, RuleResult
from jaxspec.engine.output import Alternatives, FinishReason, PromptLogprob, RequestOutput, RequestStats
from jaxspec.engine.prefix_cache import Node
from jaxspec.sampling.params import SamplingParams


class RequestState(enum.Enum):
    WAITING = "waiting"  # no slot, no pages
    PREFILL = "prefill"  # has a slot; some of its tokens have no KV yet
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request, from its arrival to its end. The engine owns every field that is not an argument, and changes it.

    Args:
        rule: sees the output on the host; it may end it, and may give its text.
        priority: lower values run earlier.
        cache_salt: only requests with the same salt share pages of their prompts.

    Attributes:
        tokens: prompt and output ids: all that the host knows to be final.
        prompt_len: length of the original prompt; it stays when the request is preempted and prefilled again.
        computed: tokens whose KV a dispatched step writes, or found in the prefix cache.
        rank: that serves it, from its arrival to its end.
        slot: row of the device state, 0 while there is none; `pages` its KV pages in order, of its rank.
        sent_pages: how many of `pages` the device's page table knows.
        published: how many of `pages` the prefix cache knows, and `node` the parent of the next one.
        parting: tokens after which its text leaves that of earlier requests, as it was when it got its slot.
        taken_states: slots with states that no page's node has yet, by the number of tokens they follow.
        num_cached_tokens: prompt tokens found in the prefix cache when the request first started.
        needs_reset: the device does not yet know that the slot serves this request.
        unread_steps: dispatched steps with this request whose output has not been read; `unread_least` and
            `unread_most` how many tokens they add at least (if nothing ends the output) and at most.
        preempted_time: since when the request has waited to go on; preempted_seconds: such times, summed up.
        windows: entry i, of k + 1: verified windows with i accepted drafts; empty without speculation.
        drafted: drafts in all of them.
        held_drafts: how many drafts the slot holds at most after the steps planned so far.
        seed: 64-bit seed in use; max_total: most tokens, prompt included; stop_ids: ids that end the output.
        num_drafts: how many drafts of a window may be accepted.
        accept_probability: of each of them if those before it are, where drafts are accepted one by one at random.
        drafts: what its next window verifies, where a constraint has to know it.
        prompt_scores: of the prompt's tokens read so far, by position, where they were asked for.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    rule: HostRule | None = None
    priority: int = 0
    cache_salt: str = ""
    arrival_time: float = field(default_factory=time.monotonic)

    state: RequestState = field(default=RequestState.WAITING, init=False)
    tokens: list[int] = field(init=False)
    prompt_len: int = field(init=False)
    computed: int = field(default=0, init=False)
    rank: int = field(default=0, init=False)
    slot: int = field(default=0, init=False)
    pages: list[int] = field(default_factory=list, init=False)
    sent_pages: int = field(default=0, init=False)
    published: int = field(default=0, init=False)
    node: Node = field(default="", init=False)
    parting: int = field(default=0, init=False)
    taken_states: dict[int, int] = field(default_factory=dict, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    needs_reset: bool = field(default=True, init=False)
    windows: list[int] = field(default_factory=list, init=False)
    drafted: int = field(default=0, init=False)
    held_drafts: int = field(default=0, init=False)
    seed: int = field(default=0, init=False)
    max_total: int = field(default=0, init=False)
    stop_ids: frozenset[int] = field(default=frozenset(), init=False)
    num_drafts: int = field(default=0, init=False)
    accept_probability: float = field(default=0.0, init=False)
    drafts: tuple[int, ...] = field(default=(), init=False)
    prompt_scores: dict[int, PromptLogprob] = field(default_factory=dict, init=False)
    unread_steps: int = field(default=0, init=False)
    unread_least: int = field(default=0, init=False)
    unread_most: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    preempted_seconds: float = field(default=0.0, init=False)
    preempted_time: float | None = field(default=None, init=False)
    first_scheduled_time: float | None = field(default=None, init=False)
    first_token_time: float | None = field(default=None, init=False)

    def __post_init__(self):
        self.tokens = list(self.prompt_ids)
        self.prompt_len = len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def needs_readback(self) -> bool:
        """The host must see each step's tokens before the next step."""
        return self.rule is not None and self.rule.needs_readback

    @property
    def constraint(self) -> Constraint | None:
        return None if self.rule is None else self.rule.constraint

    @functools.cached_property
    def needs_full(self) -> bool:
        """Every step of the request is one of a "full" bucket: only these keep count of what it holds."""
        params = self.params
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        masked = not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        ruled = penalised or masked or params.logit_bias or params.min_tokens or self.constraint
        return bool(ruled or params.logprobs or params.prompt_logprobs is not None)

    @property
    def acceptance(self) -> Acceptance | None:
        """None without speculation."""
        return acceptance_of(self.windows, self.drafted)

    @property
    def resuming(self) -> bool:
        """Was preempted: its known tokens but the last are prefilled again, and the last is forced, not sampled."""
        return self.num_output > 0

    @property
    def prefill_target(self) -> int:
        """How many tokens must be prefilled before the request decodes."""
        return len(self.tokens) - 1 if self.resuming else self.prompt_len

    @property
    def order(self) -> tuple[int, float, str]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.priority, self.arrival_time, self.id)

    def scheduled(self, now: float) -> None:
        """A step with prompt tokens of this request has been planned: its first, or the first after a preemption."""
        if self.first_scheduled_time is None:
            self.first_scheduled_time = now
        if self.preempted_time is not None:
            self.preempted_seconds += now - self.preempted_time
            self.preempted_time = None

    def emit(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        alternatives: Sequence[Alternatives] = (),
        *,
        num_accepted: int = 0,
        now: float,
    ) -> RequestOutput:
        """Takes the newest ids up to the first stop inside them: the only place where output is cut."""
        kept, reason = 0, None
        if len(self.tokens) >= self.max_total:  # asked for no tokens
            ids, reason = (), FinishReason.LENGTH
        told = None
        if self.params.prompt_logprobs is not None and not self.num_output:
            told = tuple(self.prompt_scores[i] for i in range(1, self.prompt_len))
        for token in ids:
            kept += 1
            if token in self.stop_ids:
                reason = FinishReason.STOP
            elif len(self.tokens) + kept >= self.max_total:
                reason = FinishReason.LENGTH
            if reason:
                break
        result = RuleResult() if self.rule is None else self.rule.feed(ids[:kept], reason)
        if result.keep is not None:
            kept, reason = result.keep, FinishReason.STOP
        if result.error:
            reason = FinishReason.ERROR
        self.tokens.extend(ids[:kept])
        if kept and self.first_token_time is None:
            self.first_token_time = now
        return RequestOutput(
            self.id,
            now,
            new_ids=tuple(ids[:kept]),
            new_logprobs=tuple(logprobs[:kept]),
            new_alternatives=tuple(alternatives[:kept]),
            num_accepted=min(num_accepted, kept),
            new_text=result.text,
            new_text_offsets=result.text_offsets,
            first_scheduled_time=self.first_scheduled_time,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=told,
            finish_reason=reason,
            error=result.error,
            stats=self._stats(now) if reason else None,
        )

    def report(self, now: float, reason: FinishReason | None = None, error: str | None = None) -> RequestOutput:
        """An output without ids: that the request has been scheduled, or that it ends for `reason`."""
        return RequestOutput(
            self.id,
            now,
            first_scheduled_time=self.first_scheduled_time,
            num_cached_tokens=self.num_cached_tokens,
            finish_reason=reason,
            error=error,
            stats=self._stats(now) if reason else None,
        )

    def _stats(self, end_time: float) -> RequestStats:
        return RequestStats(
            num_prompt_tokens=self.prompt_len,
            num_output_tokens=self.num_output,
            num_cached_tokens=self.num_cached_tokens,
            arrival_time=self.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            end_time=end_time,
            num_preemptions=self.num_preemptions,
            preempted_seconds=self.preempted_seconds,
            acceptance=self.acceptance,
        )
