"""Reading a request's body: its type, its size, its JSON, its model.

A big body is checked and parsed on a thread of its own, one at a time: what the parser needs is then bounded for the
whole server, and the event loop goes on.
"""

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from serve.byte_budget import ByteBudget
from serve.errors import ApiError, invalid_body, unavailable
from serve.json_size import excess
from serve.middleware import CLIENT_GONE

MAX_BODY_BYTES = 8 * 2**20
# What every request may send without taking from the budget that all share.
FREE_BODY_BYTES = 64 * 2**10
# Parsed where it is: handing it to a thread would take longer.
_SMALL = 32 * 2**10

_big_bodies = ThreadPoolExecutor(1, thread_name_prefix="body")


def parse_body(kind: type[BaseModel], data: bytes) -> BaseModel:
    """The model of a body.

    pydantic's parser, unlike the standard library's, rejects lone surrogates and bounds nesting and numbers. It accepts
    NaN and Infinity; the model rejects them and can name the field.

    Raises:
        ApiError: 400.
    """
    if not data:
        raise ApiError(400, "the body is empty: send a JSON object", code="invalid_json")
    if len(data) > _SMALL and (too_much := excess(data)):
        raise ApiError(400, f"the body is too large to parse: it has {too_much}", code="request_too_large")
    try:
        content = from_json(data, cache_strings=False)
    except ValueError as e:
        raise ApiError(400, f"the body is not valid JSON: {e}", code="invalid_json") from e
    try:
        return kind.model_validate(content)
    except ValidationError as e:
        raise invalid_body(e) from e


class _JsonRequest(Request):
    """FastAPI reads it as any JSON request, and finds the model already made."""

    kind: type[BaseModel]
    _taken = 0  # bytes of the server's budget

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != "application/json":
                raise ApiError(415, "the content-type must be application/json", code="unsupported_media_type")
            if int(self.headers.get("content-length", 0)) > MAX_BODY_BYTES:
                raise _too_large()
            self._body = await self._read() or b" "  # FastAPI has its own words for an empty one
        return self._body

    async def _read(self) -> bytes:
        data = bytearray()
        budget: ByteBudget = self.app.state.body_bytes
        try:
            async for chunk in self.stream():  # a chunked body announces no length
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise _too_large()
                more = len(data) - FREE_BODY_BYTES - self._taken
                if more > 0:
                    budget.take(more, lambda: unavailable("too many large bodies arrive at once"))
                    self._taken += more
        except ClientDisconnect as e:
            raise ApiError(CLIENT_GONE, "the client has gone") from e
        return bytes(data)

    def release(self) -> None:
        """The body has been parsed: what it held may be taken by others."""
        taken, self._taken = self._taken, 0
        self.app.state.body_bytes.give_back(taken)

    async def json(self) -> Any:
        data = await self.body()
        try:
            if len(data) <= _SMALL:
                return parse_body(self.kind, data.strip())
            return await asyncio.get_running_loop().run_in_executor(_big_bodies, parse_body, self.kind, data)
        finally:
            self.release()


def _too_large() -> ApiError:
    return ApiError(413, f"the body is over {MAX_BODY_BYTES} bytes", code="request_too_large")


class JsonRoute(APIRoute):
    """A route that checks its body's type, size and JSON, and makes the model that its handler names."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()
        kind = body_model(self.endpoint)

        async def route(request: Request) -> Response:
            if kind is None:
                return await handle(request)
            read = _JsonRequest(request.scope, request.receive)
            read.kind = kind
            try:
                return await handle(read)
            finally:
                read.release()

        return route


def body_model(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """The model of a handler's body, if it has one."""
    kinds = [p.annotation for p in inspect.signature(endpoint).parameters.values()]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
