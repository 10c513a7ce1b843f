"""The outputs of one HTTP request on their way from the engine thread to the client."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxspec.engine.host_rule import HostRule
from jaxspec.engine.output import Alternatives, FinishReason, PromptLogprob, RequestOutput, RequestStats
from jaxspec.sampling.params import SamplingParams
from serve.drafts import DraftRuns
from serve.errors import ApiError, server_error
from serve.request_info import request_info
from serve.request_metrics import PromptGroup


@dataclass(frozen=True)
class Submission:
    """What is asked of the engine for one choice.

    The engine thread makes the engine's own `Request` of it, and feeds `rule`; the event loop sees neither of them again.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    rule: HostRule | None
    priority: int
    cache_salt: str
    arrival_time: float
    group: PromptGroup = field(default_factory=lambda: PromptGroup(1))


# Id, log-probability and offset of a token, and a pair in a tuple, as Python objects.
_BYTES_OF_A_TOKEN = 100
_BYTES_OF_AN_ALTERNATIVE = 120


@dataclass
class Delta:
    """What was added to one choice since the client was last served."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)  # empty where none were asked for
    offsets: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)  # of each id: a draft that the target agreed with
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None  # told once
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> "Delta":
        count, accepted = len(output.new_ids), output.num_accepted
        return cls(
            output.new_text,
            list(output.new_ids),
            list(output.new_logprobs),
            list(output.new_alternatives),
            list(output.new_text_offsets) or [0] * count,
            [True] * accepted + [False] * (count - accepted),
            output.prompt_logprobs,
            output.finish_reason,
        )

    @property
    def size(self) -> int:
        """About how many bytes of memory it takes."""
        scores = self.prompt_logprobs or ()
        alternatives = len(self.alternatives[0]) * len(self.alternatives) if self.alternatives else 0
        alternatives += len(scores[0].alternatives) * len(scores) if scores else 0
        tokens = len(self.ids) + len(scores)
        return len(self.text) + _BYTES_OF_A_TOKEN * tokens + _BYTES_OF_AN_ALTERNATIVE * alternatives

    def extend(self, other: "Delta") -> None:
        self.text += other.text
        self.ids += other.ids
        self.logprobs += other.logprobs
        self.alternatives += other.alternatives
        self.offsets += other.offsets
        self.accepted += other.accepted
        self.prompt_logprobs = self.prompt_logprobs or other.prompt_logprobs
        self.finish_reason = other.finish_reason


class Choice:
    """One submission, and what of its output has not yet gone to the client. Lives on the event loop.

    New output is merged into the one pending delta, so a slow reader holds at most one output's worth of memory.

    Attributes:
        pending: that delta; None where there is none.
        scheduled: the engine has planned its first step.
        stats: the engine's figures, once the choice has ended.
        draft_runs: cuts the text that goes to the client, where it asked for that.
    """

    def __init__(self, index: int, submission: Submission):
        self.index = index
        self.submission = submission
        self.pending: Delta | None = None
        self.num_ids = 0
        self.num_cached_tokens = 0
        self.scheduled = False
        self.last_token_time: float | None = None
        self.stats: RequestStats | None = None
        self.draft_runs = DraftRuns()

    @property
    def has_news(self) -> bool:
        """Something to show. Ids whose text is held back wait for it, unless the model has no text at all."""
        pending = self.pending
        return pending is not None and bool(
            pending.text or pending.finish_reason or (self.submission.rule is None and pending.ids)
        )

    def put(self, output: RequestOutput) -> None:
        if self.pending is None:
            self.pending = Delta.of(output)
        else:
            self.pending.extend(Delta.of(output))
        self.num_ids += len(output.new_ids)
        self.num_cached_tokens = output.num_cached_tokens
        self.scheduled = output.first_scheduled_time is not None
        self.stats = output.stats


class Taker(Protocol):
    """What a generation's output goes to."""

    @property
    def keeps_up(self) -> bool:
        """More may be taken at once."""
        ...

    def take(self, choice: Choice, delta: Delta) -> None:
        """Must not wait."""
        ...

    def ping(self) -> None:
        """Nothing has been taken for a while."""
        ...

    async def drain(self) -> None:
        """Waits until it keeps up."""
        ...


class _Collected:
    """The whole output of each choice."""

    keeps_up = True

    def __init__(self, choices: Sequence[Choice]):
        self.whole = {choice.index: Delta() for choice in choices}

    def take(self, choice: Choice, delta: Delta) -> None:
        self.whole[choice.index].extend(delta)

    def ping(self) -> None:
        """Nobody sees it."""

    async def drain(self) -> None:
        """There is nothing to wait for."""


class Silence:
    """Whether a stream has been silent for some seconds. One timer for all of it, which is cheaper than one for each event.

    Args:
        wake: called when it has.
    """

    def __init__(self, seconds: float, wake: Callable[[], None]):
        self._seconds = seconds
        self._wake = wake
        self._is_long = False
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_at(self._since + seconds, self._look)

    def end(self) -> None:
        """The stream has said something."""
        self._since = self._loop.time()

    def was_long(self) -> bool:
        """Once for each silence of that length, however long it goes on."""
        was, self._is_long = self._is_long, False
        return was

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._since + self._seconds:
            self._is_long, self._since = True, now
            self._wake()
        self._timer = self._loop.call_at(self._since + self._seconds, self._look)


class Generation:
    """The choices of one HTTP request. Lives on the event loop; the engine thread hands it outputs through `put`.

    `close` must be called however the request ends: it aborts the unfinished choices.

    Attributes:
        http_id: of its HTTP request, for the log.
        timers: of its deadlines.
    """

    def __init__(self, choices: Sequence[Choice], abort: Callable[[Sequence[str]], None]):
        self.choices = choices
        self.http_id = request_info().id
        self.timers: list[asyncio.TimerHandle] = []
        self._abort = abort
        self._unfinished = {c.submission.request_id: c for c in choices}
        self._untaken = list(choices)  # of which more is to be taken
        self._error: ApiError | None = None
        self._changed = asyncio.Event()
        self._taker: Taker | None = None  # where it has taken all that there is, and keeps up
        self._taking_failed: Exception | None = None
        self._silence: Silence | None = None

    def put(self, choice: Choice, output: RequestOutput) -> None:
        if output.request_id not in self._unfinished:
            return
        choice.put(output)
        if output.finish_reason is not None:
            del self._unfinished[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            self.fail(server_error(output.error or "the engine failed this request"))
        elif output.finish_reason is FinishReason.ABORT:
            self.fail(server_error("the request was aborted"))
        taker = self._taker
        if taker is None or self._error is not None:
            self._changed.set()
        elif choice.has_news:
            self._hand_over(choice, taker)
            if self._taking_failed is not None or not self._untaken or not taker.keeps_up:
                self._taker = None
                self._changed.set()

    def _hand_over(self, choice: Choice, taker: Taker) -> None:
        delta, choice.pending = choice.pending, None
        assert delta is not None
        if delta.finish_reason is not None:
            self._untaken.remove(choice)
        try:
            taker.take(choice, delta)
        except Exception as e:  # it is `feed` that raises, not whoever brings outputs
            self._taking_failed = e
        if self._silence is not None:
            self._silence.end()

    def fail(self, error: ApiError) -> None:
        """Ends the whole HTTP request with an error."""
        self._error = self._error or error
        self._changed.set()

    def drop(self, error: ApiError) -> None:
        """Ends it with an error at once, whether or not its client ever reads that: nothing stays in the engine."""
        self.fail(error)
        self.close()
        for choice in self.choices:
            choice.pending = None

    @property
    def unread(self) -> int:
        """About how many bytes of output wait for the client."""
        return sum(c.pending.size for c in self.choices if c.pending is not None)

    @property
    def has_started(self) -> bool:
        """The engine has planned a step for one of its choices."""
        return any(c.scheduled for c in self.choices)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def close(self) -> int:
        """Returns how many choices were unfinished."""
        for timer in self.timers:
            timer.cancel()
        unfinished = len(self._unfinished)
        if self._unfinished:
            self._abort(list(self._unfinished))
            self._unfinished = {}
        return unfinished

    async def feed(self, taker: Taker, ping_seconds: float | None = None) -> None:
        """Hands over the output of all choices as it comes, until all have finished. Output without text waits for its text.

        As long as the taker keeps up it is called by `put`, for every output: a turn of the event loop for each would cost more
        than writing it. While it does not, outputs are merged.

        Args:
            ping_seconds: it is pinged whenever it has taken nothing for so long.

        Raises:
            ApiError: the engine failed the request.
            Exception: whatever the taker raises.
        """
        silence = self._silence = None if ping_seconds is None else Silence(ping_seconds, self._changed.set)
        try:
            while True:
                self._changed.clear()
                if silence is not None and silence.was_long():
                    taker.ping()
                for choice in [choice for choice in self._untaken if choice.has_news]:
                    if self._error is None and self._taking_failed is None:
                        self._hand_over(choice, taker)
                if self._taking_failed is not None:
                    raise self._taking_failed
                if self._error is not None:
                    raise self._error
                if not self._untaken:
                    return
                if taker.keeps_up:
                    self._taker = taker
                    await self._changed.wait()
                    self._taker = None
                else:
                    await taker.drain()
        finally:
            self._taker = self._silence = None
            if silence is not None:
                silence.close()

    async def collect(self) -> list[Delta]:
        """The whole output of each choice."""
        collected = _Collected(self.choices)
        await self.feed(collected)
        return [collected.whole[c.index] for c in self.choices]
