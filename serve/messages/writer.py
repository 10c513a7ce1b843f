"""What an output is in Anthropic's form: a list of blocks, whole or as the events of a stream."""

import hashlib
import json
import uuid
from collections.abc import Iterator
from typing import Any

from jaxspec.engine.output import FinishReason
from serve.chat_run import ChatRun
from serve.errors import ApiError
from serve.generation import Choice, Delta
from serve.named_events import NamedEvent
from serve.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from serve.parsers.json_prefix import JsonPrefix

_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


class MessageWriter:
    """
    Args:
        stops: the request's stop sequences. The text that is added ends with the one that has ended it.
        mark: fields of every message.
    """

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, model: str, run: ChatRun, stops: list[str], mark: dict[str, Any]):
        self._run = run
        self._stops = stops
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._arguments: JsonPrefix | None = None  # of an open call in a stream
        self._streams = True
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model, **mark}
        self._stop_sequence: str | None = None

    def opening(self) -> Iterator[NamedEvent]:
        usage = self._usage(self._run.choices[0]) | {"output_tokens": 0}
        empty = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": empty}

    def add(self, choice: Choice, delta: Delta) -> Iterator[NamedEvent]:
        """
        Raises:
            ApiError: in a stream, the model's call is none: a client has its beginning, and could not parse the rest.
        """
        self._cut_stop(delta)
        for event in self._run.events(choice, delta):
            yield from self._event(event)
        if delta.finish_reason is not None:
            if delta.finish_reason is FinishReason.LENGTH or self._stop_sequence is not None:
                self._arguments = None  # clients are told that it was cut
            yield from self._close()
            yield {"type": "message_delta", "delta": self._end(choice, delta), "usage": self._usage(choice)}
            yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Iterator[NamedEvent]:
        yield error.anthropic_body()

    def whole(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        self._streams = False
        for _ in self.add(choice, delta):
            pass
        content = [_whole_block(block) for block in self._blocks]
        end = self._end(choice, delta)
        if end["stop_reason"] == "tool_use" and all(block["type"] != "tool_use" for block in content):
            end["stop_reason"] = "end_turn"
        return {**self._head, "content": content, **end, "usage": self._usage(choice)}

    def _cut_stop(self, delta: Delta) -> None:
        """The stop sequence that has ended the text is told, but is no part of it."""
        if delta.finish_reason is FinishReason.STOP:
            self._stop_sequence = max((s for s in self._stops if delta.text.endswith(s)), key=len, default=None)
            delta.text = delta.text.removesuffix(self._stop_sequence or "")

    def _event(self, event: Event) -> Iterator[NamedEvent]:
        match event:
            case Content(text):
                yield from self._piece("text", "text_delta", "text", text)
            case Reasoning(text):
                yield from self._piece("thinking", "thinking_delta", "thinking", text)
            case CallStart(_, call_id, name):
                yield from self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}}, "json")
                self._arguments = JsonPrefix() if self._streams else None
            case CallArguments(_, text):
                assert self._open is not None
                self._open["json"] += text
                if self._arguments is not None and not self._arguments.feed(text):
                    raise _no_call(self._open["name"])
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _piece(self, kind: str, delta: str, name: str, text: str) -> Iterator[NamedEvent]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin({"type": kind} | ({"signature": ""} if kind == "thinking" else {}), name)
        assert self._open is not None
        self._open[name] += text
        yield self._delta({"type": delta, name: text})

    def _begin(self, block: dict[str, Any], collects: str) -> Iterator[NamedEvent]:
        yield from self._close()
        self._open = {**block, collects: ""}
        self._blocks.append(self._open)
        shown = block if collects == "json" else self._open
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(shown)}

    def _close(self) -> Iterator[NamedEvent]:
        if self._open is None:
            return
        if self._open["type"] == "thinking":
            # Clients send it back with the thought; nobody checks it.
            self._open["signature"] = hashlib.sha256(self._open["thinking"].encode()).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": self._open["signature"]})
        if self._arguments is not None and not self._arguments.complete:
            raise _no_call(self._open["name"])
        self._open = self._arguments = None
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> NamedEvent:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        reason = _STOP_REASONS.get(self._run.finish_reason(choice, delta) or "", "end_turn")
        if self._stop_sequence is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": self._stop_sequence}

    def _usage(self, choice: Choice) -> dict[str, int]:
        """Tokens of the prompt that the prefix cache had are counted apart, as Anthropic does."""
        cached = choice.num_cached_tokens
        return {
            "input_tokens": len(choice.submission.prompt_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": choice.num_ids,
        }


def _no_call(name: str) -> ApiError:
    return ApiError(
        500, f"the model's call of {name} has arguments that are no JSON object; try again", code="bad_call"
    )


def _whole_block(block: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are no JSON object has no place in a whole message: it is a text."""
    if block["type"] != "tool_use":
        return block
    arguments = JsonPrefix()
    if not (arguments.feed(block["json"]) and arguments.complete):
        return {"type": "text", "text": f"{block['name']}({block['json']})"}
    return {"type": "tool_use", "id": block["id"], "name": block["name"], "input": json.loads(block["json"])}
