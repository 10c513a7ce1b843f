"""Answering a generation request, whole or as server-sent events, and dropping it when its client goes away.

Everything that can be refused is refused before the status line is sent: a stream's 200 means that the engine has
accepted the request.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.admission import Reservation
from serve.connection import SEND_KEY
from serve.engine_thread import EngineThread
from serve.errors import ApiError, as_api_error
from serve.generation import Choice, Delta, Generation
from serve.middleware import CLIENT_GONE
from serve.protocol import GenerationBody, Usage

T = TypeVar("T")
logger = logging.getLogger("jaxspec.serve")

# Proxies close idle connections, and a long prompt may take longer than they wait.
PING_SECONDS = 15.0


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
        return await stream_answer(
            engine, request, choices, reservation, lambda generation: _events(generation, body, form, head)
        )

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
    events: Callable[[Generation], AsyncGenerator[bytes, None]],
) -> Response:
    """Starts the choices, and answers with the events that `events` makes of their output."""
    generation = await _accepted(engine, request, choices, reservation)
    if generation is None:
        return Response(status_code=CLIENT_GONE)
    return EventStream(engine, generation, events(generation))


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


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Runs `work` while the client is there; cancels it and returns None as soon as the client has gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _collect(engine: EngineThread, choices: Sequence[Choice], reservation: Reservation) -> list[Delta]:
    generation = await engine.submit(choices, reservation)
    try:
        return await generation.collect()
    finally:
        engine.release(generation)


class EventStream(Response):
    """Server-sent events. Sending waits for the client's side, and meanwhile the engine's output is merged."""

    media_type = "text/event-stream"

    def __init__(self, engine: EngineThread, generation: Generation, events: AsyncGenerator[bytes, None]):
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._engine = engine
        self._generation = generation
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_events(send, scope.get(SEND_KEY)))
        finally:
            self._engine.release(self._generation)
            await self._events.aclose()

    async def _send_events(self, send: Send, send_event: Callable[[bytes], Coroutine[Any, Any, None]] | None) -> None:
        async def through_send(event: bytes) -> None:  # where the connection is another server's
            await send({"type": "http.response.body", "body": event, "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send_event = send_event or through_send
        async for event in self._events:
            await send_event(event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(
    generation: Generation, body: GenerationBody, form: Format, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    options, opening = body.stream_options, to_json(head)[:-1]

    def chunk(choices: list[dict[str, Any]], *, with_usage: bool) -> bytes:
        usage = b""
        if options:
            usage = b',"usage":%b' % to_json(_usage(generation.choices, body.choices) if with_usage else None)
        return b'data: %b,"choices":%b%b}\n\n' % (opening, to_json(choices), usage)

    continuous = bool(options and options.continuous_usage_stats)
    try:
        for choice in generation.choices:
            if (first := form.opening(choice)) is not None:
                yield chunk([first], with_usage=continuous)
        async with aclosing(with_pings(generation)) as deltas:
            async for news in deltas:
                if news is None:
                    yield b": ping\n\n"
                    continue
                for written in form.chunks(*news):
                    yield chunk([written], with_usage=continuous)
        if options and options.include_usage:
            yield chunk([], with_usage=True)
    except Exception as e:
        if not isinstance(e, ApiError):
            logger.exception("bug in a stream")
        yield _event(as_api_error(e).body())
    yield b"data: [DONE]\n\n"


def with_pings(generation: Generation) -> AsyncGenerator[tuple[Choice, Delta] | None, None]:
    """Its new output, and None whenever there was none for a while."""
    return generation.deltas(PING_SECONDS)


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % to_json(content)


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
