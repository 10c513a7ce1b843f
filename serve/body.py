"""Reading a request's body: its type, its size, its JSON."""

from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

from serve.errors import ApiError

MAX_BODY_BYTES = 8 * 2**20


class _JsonRequest(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != "application/json":
                raise ApiError(415, "the content-type must be application/json", code="unsupported_media_type")
            if int(self.headers.get("content-length", 0)) > MAX_BODY_BYTES:
                raise _too_large()
            self._body = await self._read()
        return self._body

    async def _read(self) -> bytes:
        data = bytearray()
        async for chunk in self.stream():  # a chunked body announces no length
            data += chunk
            if len(data) > MAX_BODY_BYTES:
                raise _too_large()
        return bytes(data)

    async def json(self) -> Any:
        """pydantic's parser: unlike the standard library's it rejects lone surrogates and bounds nesting and numbers.

        It accepts NaN and Infinity; the body's model rejects them and can name the field.
        """
        try:
            return from_json(await self.body())
        except ValueError as e:
            raise ApiError(400, f"the body is not valid JSON: {e}", code="invalid_json") from e


def _too_large() -> ApiError:
    return ApiError(413, f"the body is over {MAX_BODY_BYTES} bytes", code="request_too_large")


class JsonRoute(APIRoute):
    """A route that checks its body's type, size and JSON."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def route(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return route
