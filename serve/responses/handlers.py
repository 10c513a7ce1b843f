"""POST /v1/responses."""

import time

from fastapi import Request
from pydantic import ValidationError
from starlette.responses import Response

from jaxspec.errors import InvalidRequestError
from serve.answer import stream_answer, synthetic_mark, whole_answer
from serve.chat_run import chat_params, prepare_chat
from serve.errors import invalid_body
from serve.named_events import NamedEvents
from serve.responses.body import ResponsesBody
from serve.responses.writer import ResponseWriter
from serve.service import Service

_PARAMS = {"messages": "input", "structured_outputs": "text", "response_format": "text"}


async def create_response(service: Service, request: Request, body: ResponsesBody) -> Response:
    arrival = time.monotonic()
    name = service.resolve_name(body.model)
    try:
        chat = body.chat()
    except ValidationError as e:
        raise invalid_body(e) from e
    params = chat_params(service, chat)
    with service.admission.reserve(1) as reservation:
        try:
            run = await prepare_chat(service, chat, params, arrival=arrival)
        except InvalidRequestError as e:  # of the chat that was made of it
            raise InvalidRequestError(str(e), param=_PARAMS.get(e.param or "", e.param), code=e.code) from e
        engine = service.engine_thread
        writer = ResponseWriter(name, body, run, synthetic_mark(engine))
        if body.stream:
            return await stream_answer(engine, request, run.choices, reservation, NamedEvents(writer))
        return await whole_answer(
            engine, request, run.choices, reservation, lambda whole: writer.whole(run.choices[0], whole[0])
        )
