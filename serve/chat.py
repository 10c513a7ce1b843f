"""POST /v1/chat/completions."""

import time
import uuid
from typing import Any

from fastapi import Request
from starlette.responses import Response

from jaxspec.text import Tokenizer
from serve.answer import answer
from serve.generation import Choice, Delta
from serve.logprobs import chat_logprobs
from serve.protocol import ChatBody
from serve.request_metrics import request_metrics
from serve.service import Service


async def create_chat_completion(service: Service, request: Request, body: ChatBody) -> Response:
    arrival = time.monotonic()
    name = service.resolve_name(body.model)
    tokenizer = service.tokenizer()
    # None: to the end of the context.
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling_params(max_tokens=max_tokens, logprobs=body.alternatives)
    messages = [m.rendered() for m in body.messages]
    service.reject_too_long((m["content"] for m in messages), "messages")
    with service.admission.reserve(len(params)) as reservation:
        matcher = await service.compiled_grammar(params[0].structured_outputs)
        prompt = await service.in_pool(
            tokenizer.apply_chat_template,
            messages,
            add_generation_prompt=body.add_generation_prompt,
            limit=service.model().engine.max_model_len,
        )
        choices = service.make_choices(
            [prompt],
            params,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            arrival_time=arrival,
            matcher=matcher,
        )
        form = _Format(name, body, tokenizer)
        return await answer(service.engine_thread, request, body, choices, reservation, form)


class _Format:
    def __init__(self, model: str, body: ChatBody, tokenizer: Tokenizer):
        self._body = body
        self._tokenizer = tokenizer
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model

    def head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def whole(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._choice(choice, delta, {"message": message})

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self._choice(choice, Delta(), {"delta": {"role": "assistant", "content": ""}})

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return self._choice(choice, delta, {"delta": {"content": delta.text} if delta.text else {}})

    def _choice(self, choice: Choice, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        written: dict[str, Any] = {
            "index": choice.index,
            **content,
            "logprobs": chat_logprobs(self._tokenizer, delta) if self._body.logprobs else None,
            "finish_reason": delta.finish_reason.value if delta.finish_reason else None,
        }
        if self._body.return_token_ids:
            written["token_ids"] = delta.ids
        if self._body.return_metrics and delta.finish_reason and choice.stats:
            written["metrics"] = request_metrics(choice.stats)
        return written
