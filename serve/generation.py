"""The outputs of one HTTP request on their way from the engine thread to the client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from jaxspec.engine.request import Alternatives, FinishReason, Request, RequestOutput
from jaxspec.text import TextStream
from serve.errors import ApiError, server_error
from serve.request_metrics import RequestTimes


@dataclass
class Delta:
    """What was added to one choice since the client was last served."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)  # empty where none were asked for
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def extend(self, other: "Delta") -> None:
        self.text += other.text
        self.ids += other.ids
        self.logprobs += other.logprobs
        self.top_logprobs += other.top_logprobs
        self.offsets += other.offsets
        self.finish_reason = other.finish_reason


class Choice:
    """One engine request, and what of its output has not yet gone to the client.

    New output is merged into the one pending delta, so a slow reader holds at most one output's worth of memory.
    """

    def __init__(self, index: int, request: Request, stream: TextStream | None):
        self.index = index
        self.request = request
        self.stream = stream
        self.pending = Delta()
        self.num_ids = 0
        self.num_taken = 0  # ids that the engine thread has turned into deltas
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.times: RequestTimes | None = None  # once it has ended

    @property
    def has_news(self) -> bool:
        """Something to show: output whose text is held back is kept until there is text (or a model has none)."""
        pending = self.pending
        return bool(pending.text or pending.finish_reason or (self.stream is None and pending.ids))

    def make_delta(self, output: RequestOutput) -> Delta:
        """On the engine thread, right after the step: the text stream is fed by the engine."""
        start = self.num_taken
        self.num_taken += len(output.new_ids)
        return Delta(
            self.stream.take_delta() if self.stream else "",
            list(output.new_ids),
            list(output.new_logprobs),
            list(output.new_top_logprobs),
            self.stream.offsets[start : self.num_taken] if self.stream else [0] * len(output.new_ids),
            output.finish_reason,
        )


class Generation:
    """The choices of one HTTP request. Lives on the event loop; the engine thread hands it deltas through `put`.

    `close` must be called however the request ends: it takes the unfinished choices out of the engine.
    """

    def __init__(self, choices: Sequence[Choice], abort: Callable[[Sequence[str]], None]):
        self.choices = choices
        self._abort = abort
        self._unfinished = {c.request.id: c for c in choices}
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    def put(self, choice: Choice, delta: Delta, error: str | None = None) -> None:
        if choice.request.id not in self._unfinished:
            return
        choice.pending.extend(delta)
        choice.num_ids += len(delta.ids)
        if delta.finish_reason is not None:
            del self._unfinished[choice.request.id]
        if delta.finish_reason is FinishReason.ERROR:
            self.fail(server_error(error or "the engine failed this request"))
        elif delta.finish_reason is FinishReason.ABORT:
            self.fail(server_error("the request was aborted"))
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """Ends the whole HTTP request with an error."""
        self._error = self._error or error
        self._changed.set()

    def close(self) -> None:
        if self._unfinished:
            self._abort(list(self._unfinished))
            self._unfinished = {}

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """New output of any choice as it comes, until all have finished. Output without text waits for its text.

        Raises:
            ApiError: the engine failed the request.
        """
        waiting = set(self.choices)
        while waiting:
            if not any(c.has_news for c in waiting):
                await self._changed.wait()
            self._changed.clear()
            for choice in [c for c in self.choices if c in waiting]:
                if self._error is not None:
                    raise self._error
                if not choice.has_news:
                    continue
                delta, choice.pending = choice.pending, Delta()
                if delta.finish_reason is not None:
                    waiting.remove(choice)
                yield choice, delta

    async def collect(self) -> list[Delta]:
        """The whole output of each choice."""
        whole = {c.index: Delta() for c in self.choices}
        async for choice, delta in self.deltas():
            whole[choice.index].extend(delta)
        return [whole[c.index] for c in self.choices]
