"""POST /v1/messages and /v1/messages/count_tokens."""

import time

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.responses import Response

from serve.answer import stream_answer, synthetic_mark, whole_answer
from serve.chat_run import chat_params, encode_chat, output_format, prepare_chat
from serve.errors import invalid_body
from serve.messages.body import CountBody, MessagesBody
from serve.messages.writer import MessageWriter
from serve.named_events import NamedEvents
from serve.protocol import ChatBody
from serve.service import Service


def _chat(body: CountBody) -> ChatBody:
    """What the translated chat does not allow is the client's error, as in a chat."""
    try:
        return body.chat()
    except ValidationError as e:
        raise invalid_body(e) from e


async def create_message(service: Service, request: Request, body: MessagesBody) -> Response:
    arrival = time.monotonic()
    name = service.resolve_name(body.model)
    chat = _chat(body)
    params = chat_params(service, chat)
    with service.admission.reserve(1) as reservation:
        run = await prepare_chat(service, chat, params, arrival=arrival)
        engine = service.engine_thread
        writer = MessageWriter(name, run, body.stop_sequences or [], synthetic_mark(engine))
        if body.stream:
            return await stream_answer(engine, request, run.choices, reservation, NamedEvents(writer))
        return await whole_answer(
            engine, request, run.choices, reservation, lambda whole: writer.whole(run.choices[0], whole[0])
        )


async def count_tokens(service: Service, body: CountBody) -> Response:
    service.resolve_name(body.model)
    chat = _chat(body)
    output_format(service, chat)  # tools are refused here as there
    return JSONResponse({"input_tokens": len(await encode_chat(service, chat))})
