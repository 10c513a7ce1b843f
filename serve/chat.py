"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from serve.answer import answer
from serve.chat_run import ChatRun, chat_params, prepare_chat
from serve.generation import Choice, Delta
from serve.logprobs import chat_logprobs, prompt_logprobs
from serve.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from serve.protocol import ChatBody
from serve.request_metrics import request_metrics
from serve.service import Service


async def create_chat_completion(service: Service, request: Request, body: ChatBody) -> Response:
    arrival = time.monotonic()
    name = service.resolve_name(body.model)
    params = chat_params(service, body)
    with service.admission.reserve(len(params)) as reservation:
        run = await prepare_chat(service, body, params, arrival=arrival)
        return await answer(service.engine_thread, request, body, run.choices, reservation, _Format(name, body, run))


class _Format:
    def __init__(self, model: str, body: ChatBody, run: ChatRun):
        self._body = body
        self._run = run
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model

    def head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def whole(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        events = self._run.events(choice, delta)
        calls = [{name: value for name, value in call.items() if name != "index"} for call in _calls(events)]
        text = _joined(events, Content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if self._run.thinks:
            thought = _joined(events, Reasoning) or None
            message |= {"reasoning": thought, "reasoning_content": thought}
        if calls:
            message["tool_calls"] = calls
        return self._choice(choice, delta, {"message": message})

    def beside(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """All choices have one prompt, whose log-probabilities stand where vLLM has them."""
        count = self._body.prompt_logprobs
        if count is None:
            return {}
        ids, scores = choice.submission.prompt_ids, delta.prompt_logprobs or ()
        return {"prompt_logprobs": prompt_logprobs(self._run.tokenizer, ids, scores, count=count)}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self._choice(choice, Delta(), {"delta": {"role": "assistant", "content": ""}})

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """The end of an answer with calls has a chunk of its own: openai-python would miss the end of a call otherwise."""
        events = self._run.events(choice, delta)
        written, calls = _delta_of(events)
        if not (written or delta.finish_reason or self._shows_tokens):
            return []
        whole = self._choice(choice, delta, {"delta": written})
        if not (calls and delta.finish_reason):
            return [whole]
        last = {**whole, "delta": {}, "logprobs": None}
        empty: dict[str, list[Any]] = {"token_ids": [], "draft_runs": []}
        for name, nothing in empty.items():
            if name in last:
                last[name] = nothing
        return [{name: value for name, value in whole.items() if name != "metrics"} | {"finish_reason": None}, last]

    @property
    def _shows_tokens(self) -> bool:
        """Each token is told of, also where its text is held back."""
        return bool(self._body.logprobs or self._body.return_token_ids or self._body.return_draft_runs)

    def _choice(self, choice: Choice, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        written: dict[str, Any] = {
            "index": choice.index,
            **content,
            "logprobs": chat_logprobs(self._run.tokenizer, delta) if self._body.logprobs else None,
            "finish_reason": self._run.finish_reason(choice, delta),
        }
        if self._body.return_token_ids:
            written["token_ids"] = delta.ids
        if self._body.return_draft_runs:
            written["draft_runs"] = choice.draft_runs.add(delta.text, delta.offsets, delta.accepted)
        if self._body.return_metrics and delta.finish_reason and choice.stats:
            written["metrics"] = request_metrics(choice.stats)
        return written


def _delta_of(events: Sequence[Event]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a chunk says of the events, and the calls among that."""
    if len(events) == 1 and isinstance(events[0], Content):  # as it mostly is
        return {"content": events[0].text}, []
    written: dict[str, Any] = {}
    if text := _joined(events, Content):
        written["content"] = text
    if thought := _joined(events, Reasoning):
        written |= {"reasoning": thought, "reasoning_content": thought}
    if calls := _calls(events):
        written["tool_calls"] = calls
    return written, calls


def _joined(events: Iterable[Event], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _calls(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The deltas of calls, one for each call: the first of a call has its id, type and name."""
    deltas: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            deltas[event.index] = {"index": event.index, "id": event.id, "type": "function", "function": function}
        elif isinstance(event, CallArguments):
            delta = deltas.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            delta["function"]["arguments"] += event.text
    return list(deltas.values())
