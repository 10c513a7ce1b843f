"""POST /v1/completions."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from jaxspec.errors import InvalidRequestError
from jaxspec.text import Tokenizer
from serve.answer import answer
from serve.generation import Choice, Delta
from serve.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from serve.protocol import CompletionBody, CompletionLogprobs
from serve.request_metrics import request_metrics
from serve.service import Service

# OpenAI's default where a request names no limit.
DEFAULT_MAX_TOKENS = 16


async def create_completion(service: Service, request: Request, body: CompletionBody) -> Response:
    arrival = time.monotonic()
    name = service.resolve_name(body.model)
    tokenizer = service.model().tokenizer
    for prompt in body.prompts:
        _reject_too_long(service, prompt)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.sampling_params(
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        defaults=service.model().sampling_defaults,
        prompt_logprobs=body.scored,
    )
    with service.admission.reserve(len(body.prompts) * len(params)) as reservation:
        grammar = await service.compiled_grammar(params[0].structured_outputs)
        prompts = [await _ids(service, each, add_special_tokens=body.add_special_tokens) for each in body.prompts]
        choices = service.make_choices(
            prompts,
            params,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            arrival_time=arrival,
            grammar=grammar,
        )
        form = _Format(name, body, tokenizer)
        return await answer(service.engine_thread, request, body, choices, reservation, form)


def _reject_too_long(service: Service, prompt: str | list[int]) -> None:
    """Before anything is made of it: each choice has ids of its own.

    Raises:
        InvalidRequestError: it cannot fit the context.
    """
    if isinstance(prompt, str):
        service.reject_too_long([prompt], "prompt")
        return
    limit = service.model().engine.max_model_len
    if len(prompt) >= limit:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens, but the maximum context length is {limit} tokens",
            param="prompt",
            code="context_length_exceeded",
        )


async def _ids(service: Service, prompt: str | list[int], *, add_special_tokens: bool) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    limit = service.model().engine.max_model_len
    encode = service.tokenizer().encode
    return await service.in_pool(encode, prompt, add_special_tokens=add_special_tokens, limit=limit)


class _Format:
    def __init__(self, model: str, body: CompletionBody, tokenizer: Tokenizer | None):
        self._body = body
        self._tokenizer = tokenizer
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model
        self._to_echo = set(range(len(body.prompts) * body.choices)) if body.echo else set()

    def head(self, *, chunk: bool) -> dict[str, Any]:  # noqa: ARG002 - both forms of completions have one head
        return self._head

    def whole(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return self._choice(choice, delta)

    def beside(self, choice: Choice, delta: Delta) -> dict[str, Any]:  # noqa: ARG002 - each choice has its own prompt
        return {}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """Log-probabilities of the prompt are known with the first output only, and come with its text."""
        return self._choice(choice, Delta()) if self._body.echo and self._body.logprobs is None else None

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        return [self._choice(choice, delta)]

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The first of a choice begins with the prompt, where that is to be echoed."""
        echoes = choice.index in self._to_echo
        self._to_echo.discard(choice.index)
        echo = self._echo(choice) if self._body.echo else ""
        written: dict[str, Any] = {
            "index": choice.index,
            "text": echo + delta.text if echoes else delta.text,
            "logprobs": self._logprobs(choice, delta, echo, with_prompt=echoes),
            "finish_reason": delta.finish_reason.value if delta.finish_reason else None,
        }
        if self._body.prompt_logprobs is not None:
            written["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer,
                choice.submission.prompt_ids,
                delta.prompt_logprobs or (),
                count=self._body.prompt_logprobs,
            )
        if self._body.return_token_ids:
            written["token_ids"] = delta.ids
        if self._body.return_draft_runs:
            written["draft_runs"] = choice.draft_runs.add(delta.text, delta.offsets, delta.accepted)
        if self._body.return_metrics and delta.finish_reason and choice.stats:
            written["metrics"] = request_metrics(choice.stats)
        return written

    def _logprobs(self, choice: Choice, delta: Delta, echo: str, *, with_prompt: bool) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        if with_prompt:
            ids = choice.submission.prompt_ids
            return echoed_logprobs(self._tokenizer, ids, delta, echo, count=self._body.logprobs)
        logprobs = completion_logprobs(self._tokenizer, delta)
        if self._body.echo:
            logprobs["text_offset"] = [len(echo) + offset for offset in logprobs["text_offset"]]
        return logprobs

    def _echo(self, choice: Choice) -> str:
        """The prompt as text, as the client wrote it where it wrote text."""
        prompts: Sequence[str | list[int]] = self._body.prompts
        prompt = prompts[choice.index // self._body.choices]
        if isinstance(prompt, str) or self._tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return self._tokenizer.decode(prompt, skip_special_tokens=self._body.skip_special_tokens)
