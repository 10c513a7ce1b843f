"""Answering a generation request, whole or as server-sent events, and dropping it when its client goes away.

Everything that can be refused is refused before the status line is sent: a stream's 200 means that the engine has
accepted the request.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.responses import Response

from serve.admission import Reservation
from serve.disconnect import until_disconnect
from serve.engine_thread import EngineThread
from serve.errors import ApiError
from serve.event_stream import EventStream, StreamWriter
from serve.generation import Choice, Delta, Generation
from serve.middleware import CLIENT_GONE
from serve.protocol import GenerationBody, Usage

_DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """How one endpoint writes its answer."""

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """id, object, created, model."""
        ...

    def whole(self, choice: Choice, delta: Delta) -> dict[str, Any]: ...

    def beside(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """What a whole answer has beside its choices, of the first of them."""
        ...

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """A first chunk of a choice, sent before any output."""
        ...

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """Usually one; none where nothing is ready to be shown."""
        ...


async def answer(
    engine: EngineThread,
    request: Request,
    body: GenerationBody,
    choices: Sequence[Choice],
    reservation: Reservation,
    form: Format,
) -> Response:
    """Runs the choices, for which there is a reservation, and writes them as `form` says.

    Raises:
        ApiError, InvalidRequestError: the engine did not accept the request, or failed it before anything was sent.
    """
    if body.stream:
        head = {**form.head(chunk=True), **synthetic_mark(engine)}
        return await stream_answer(engine, request, choices, reservation, _ChunkWriter(choices, body, form, head))

    def written(whole: list[Delta]) -> dict[str, Any]:
        head = {**form.head(chunk=False), **synthetic_mark(engine)}
        texts = [form.whole(choice, delta) for choice, delta in zip(choices, whole, strict=True)]
        beside = form.beside(choices[0], whole[0])
        return {**head, "choices": texts, **beside, "usage": _usage(choices, body.choices)}

    return await whole_answer(engine, request, choices, reservation, written)


async def whole_answer(
    engine: EngineThread,
    request: Request,
    choices: Sequence[Choice],
    reservation: Reservation,
    written: Callable[[list[Delta]], dict[str, Any]],
) -> Response:
    """Runs the choices to their end, and answers with what `written` makes of them."""
    whole = await until_disconnect(request.receive, _collect(engine, choices, reservation))
    return Response(status_code=CLIENT_GONE) if whole is None else JSONResponse(written(whole))


async def stream_answer(
    engine: EngineThread,
    request: Request,
    choices: Sequence[Choice],
    reservation: Reservation,
    writer: StreamWriter,
) -> Response:
    """Starts the choices, and answers with the events that `writer` makes of their output."""
    generation = await _accepted(engine, request, choices, reservation)
    if generation is None:
        return Response(status_code=CLIENT_GONE)
    return EventStream(engine, generation, writer)


async def _accepted(
    engine: EngineThread, request: Request, choices: Sequence[Choice], reservation: Reservation
) -> Generation | None:
    """Once the engine has taken the choices; None: the client has gone before."""
    taken: list[Generation] = []

    async def submit() -> None:
        taken.append(await engine.submit(choices, reservation))

    try:
        await until_disconnect(request.receive, submit())
    except BaseException:
        # The handler may be cancelled just when the engine has accepted: nobody else would release the choices.
        for generation in taken:
            engine.release(generation)
        raise
    return taken[0] if taken else None


def synthetic_mark(engine: EngineThread) -> dict[str, Any]:
    """With synthetic acceptance the text is worthless, and every answer and chunk says so."""
    length = engine.model.synthetic_acceptance_length if engine.model else None
    return {} if length is None else {"synthetic_acceptance_length": length}


async def _collect(engine: EngineThread, choices: Sequence[Choice], reservation: Reservation) -> list[Delta]:
    generation = await engine.submit(choices, reservation)
    try:
        return await generation.collect()
    finally:
        engine.release(generation)


class _ChunkWriter:
    """A `StreamWriter` in OpenAI's form.

    Args:
        head: fields of every chunk.
    """

    ping = b": ping\n\n"

    def __init__(self, choices: Sequence[Choice], body: GenerationBody, form: Format, head: dict[str, Any]):
        self._choices, self._form, self._choices_per_prompt = choices, form, body.choices
        self._options, self._head = body.stream_options, to_json(head)[:-1]
        self._continuous = bool(self._options and self._options.continuous_usage_stats)

    def opening(self) -> Iterator[bytes]:
        for choice in self._choices:
            if (first := self._form.opening(choice)) is not None:
                yield self._chunk([first], with_usage=self._continuous)

    def add(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        for written in self._form.chunks(choice, delta):
            yield self._chunk([written], with_usage=self._continuous)

    def ending(self) -> Iterator[bytes]:
        if self._options and self._options.include_usage:
            yield self._chunk([], with_usage=True)
        yield _DONE

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield b"data: %b\n\n" % to_json(error.body())
        yield _DONE

    def _chunk(self, choices: list[dict[str, Any]], *, with_usage: bool) -> bytes:
        usage = b""
        if self._options:
            usage = b',"usage":%b' % to_json(_usage(self._choices, self._choices_per_prompt) if with_usage else None)
        return b'data: %b,"choices":%b%b}\n\n' % (self._head, to_json(choices), usage)


def _usage(choices: Sequence[Choice], choices_per_prompt: int) -> Usage:
    """A prompt counts once, however many choices it has."""
    prompts = choices[::choices_per_prompt]
    prompt_tokens = sum(len(c.submission.prompt_ids) for c in prompts)
    completion_tokens = sum(c.num_ids for c in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(c.num_cached_tokens for c in prompts)},
    }
