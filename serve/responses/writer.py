"""What an output is as a response: a list of items, whole or as the events of a stream."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

from jaxspec.engine.output import FinishReason
from serve.chat_run import ChatRun
from serve.errors import ApiError
from serve.generation import Choice, Delta
from serve.named_events import NamedEvent
from serve.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from serve.responses.body import ResponsesBody

Item = dict[str, Any]
# Kind of item -> the prefix of its id, its part's type, and the names of its events.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter:
    """
    Args:
        mark: fields of every response.
    """

    ping = b": ping\n\n"

    def __init__(self, model: str, body: ResponsesBody, run: ChatRun, mark: dict[str, Any]):
        self._run = run
        self._output: list[Item] = []
        self._open: Item | None = None
        self._number = -1
        self._offsets: list[int] = []
        self._response = {**_as_asked(body), "id": f"resp_{uuid.uuid4().hex}", "model": model, **mark}

    def opening(self) -> Iterator[NamedEvent]:
        for kind in ("created", "in_progress"):
            yield self._numbered(f"response.{kind}", response=self._snapshot("in_progress"))

    def add(self, choice: Choice, delta: Delta) -> Iterator[NamedEvent]:
        self._offsets += delta.offsets
        for event in self._run.events(choice, delta):
            yield from self._event(event)
        if delta.finish_reason is not None:
            cut = delta.finish_reason is FinishReason.LENGTH
            yield from self._close("incomplete" if cut else "completed")
            self._response["usage"] = self._usage(choice)
            if cut:
                self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            status = "incomplete" if cut else "completed"
            self._response["completed_at"] = None if cut else int(time.time())
            yield self._numbered(f"response.{status}", response=self._snapshot(status))

    def failed(self, error: ApiError) -> Iterator[NamedEvent]:
        yield from self._close("incomplete")
        self._response["error"] = {"code": error.code or "server_error", "message": error.detail}
        yield self._numbered("response.failed", response=self._snapshot("failed"))

    def whole(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        for last in self.add(choice, delta):
            response = last.get("response")
        assert response is not None
        return response

    def _snapshot(self, status: str) -> dict[str, Any]:
        done = [item for item in self._output if item is not self._open]
        return {**self._response, "status": status, "output": done}

    def _event(self, event: Event) -> Iterator[NamedEvent]:
        match event:
            case Content(text):
                yield from self._piece("message", text)
            case Reasoning(text):
                yield from self._piece("reasoning", text)
            case CallStart(_, call_id, name):
                yield from self._begin({"type": "function_call", "call_id": call_id, "name": name, "arguments": ""})
            case CallArguments(_, text):
                assert self._open is not None
                self._open["arguments"] += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)

    def _piece(self, kind: str, text: str) -> Iterator[NamedEvent]:
        if self._open is None or self._open["type"] != kind:
            head: Item = {"role": "assistant"} if kind == "message" else {"summary": [], "encrypted_content": None}
            yield from self._begin({"type": kind, **head, "content": []})
            assert self._open is not None
            part = _part(kind, "")
            yield self._of_part("response.content_part.added", part=part)
            self._open["content"] = [_part(kind, "")]
        assert self._open is not None
        self._open["content"][0]["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._of_part(f"response.{_PARTS[kind]}.delta", delta=text, **logprobs)

    def _begin(self, item: Item) -> Iterator[NamedEvent]:
        yield from self._close("completed")
        self._open = {"id": f"{_PREFIXES[item['type']]}_{uuid.uuid4().hex}", **item, "status": "in_progress"}
        self._output.append(self._open)
        yield self._numbered("response.output_item.added", output_index=self._index, item=dict(self._open))

    def _close(self, status: str) -> Iterator[NamedEvent]:
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_item("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._of_part(f"response.{_PARTS[item['type']]}.done", text=part["text"], **logprobs)
            yield self._of_part("response.content_part.done", part=part)
        item["status"] = status
        self._open = None
        yield self._numbered("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _of_part(self, kind: str, **fields: Any) -> NamedEvent:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> NamedEvent:
        assert self._open is not None
        return self._numbered(kind, item_id=self._open["id"], output_index=self._index, **fields)

    def _numbered(self, kind: str, **fields: Any) -> NamedEvent:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        prompt, output = len(choice.submission.prompt_ids), choice.num_ids
        thought = self._run.reasoning_tokens(choice, self._offsets)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": choice.num_cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + output,
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    others: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": text, **others}


def _format(body: ResponsesBody) -> dict[str, Any]:
    asked: dict[str, Any] = body.text.format if body.text and body.text.format else {"type": "text"}
    return {"type": asked["type"], **asked.get("json_schema", {})}


def _as_asked(body: ResponsesBody) -> dict[str, Any]:
    """What a response repeats of its request, and what never changes here."""
    tools = [{"type": "function", "strict": tool.get("strict", False), **tool["function"]} for tool in body.tools or []]
    effort = body.reasoning.effort if body.reasoning else None
    return {
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "background": False,
        "store": False,
        "temperature": body.temperature,
        "text": {"format": _format(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }
