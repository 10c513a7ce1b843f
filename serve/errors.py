"""Errors over HTTP: every one has the body `{"error": {message, type, param, code}}`, as OpenAI's do.

Those of Anthropic's paths have its body, `{"type": "error", "error": {type, message}}`.
"""

import math
import random
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from jaxspec.errors import SHOWN_CHARACTERS, InvalidRequestError
from serve.paths import is_anthropic, route_path

RETRY_AFTER_SECONDS = 5.0
_LONGEST_RETRY_AFTER = 60  # the official clients do not wait longer for it
# Anthropic's types of errors.
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MESSAGES = {404: "no such path", 405: "this path does not support that method"}


class ApiError(HTTPException):
    """An error response. An `HTTPException`, so that it can be raised anywhere in a FastAPI handler."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, dict(headers) if headers else None)
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_KINDS.get(
            self.status_code, "invalid_request_error" if self.status_code < 500 else "api_error"
        )
        return {"type": "error", "error": {"type": kind, "message": self.detail}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


def retry_after(seconds: float) -> dict[str, str]:
    """The header, with jitter: clients that were refused together should not come back together."""
    spread = seconds * random.uniform(1.0, 1.5) + random.uniform(0.0, 1.0)
    return {"retry-after": str(min(max(math.ceil(spread), 1), _LONGEST_RETRY_AFTER))}


def unavailable(why: str) -> ApiError:
    """503; the official clients wait for `Retry-After` and try again."""
    return ApiError(
        503, why, kind="service_unavailable", code="service_unavailable", headers=retry_after(RETRY_AFTER_SECONDS)
    )


def rate_limited(why: str, seconds: float = RETRY_AFTER_SECONDS) -> ApiError:
    """429: the server has as many requests as it accepts, for about so long. Clients try again, as with `unavailable`."""
    return ApiError(429, why, kind="rate_limit_exceeded", code="rate_limit_exceeded", headers=retry_after(seconds))


def deadline_passed(why: str) -> ApiError:
    """504. The official clients would repeat the whole work, and are told not to."""
    return ApiError(504, why, kind="timeout", code="timeout", headers={"x-should-retry": "false"})


def server_error(message: str = "internal server error") -> ApiError:
    return ApiError(500, message, kind="server_error", code="server_error")


def error_response(scope: Scope, error: ApiError) -> JSONResponse:
    """In the form that the clients of this path want."""
    if is_anthropic(route_path(scope)):
        return JSONResponse(error.anthropic_body(), error.status_code, error.headers)
    return error.response()


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; of a bug, only that there was one (a repr may show internals)."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case RequestValidationError():  # of a path or query: bodies are checked by `serve.body`
            return ApiError(400, "the request's parameters are not valid")
        case HTTPException():
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            message = _MESSAGES.get(error.status_code, error.detail)
            return ApiError(error.status_code, message, code=code, headers=error.headers)
        case _:
            return server_error()


def invalid_body(error: ValidationError) -> ApiError:
    """Names the first place that is wrong, by field and index. Does not quote the input: it may be long, secret, or NaN."""
    first = error.errors(include_url=False, include_input=False)[0]
    # `at` is the place inside the value that a check of our own was given.
    location, at = first["loc"], str((first.get("ctx") or {}).get("at", ""))
    field = str(location[0]) if location else at[1:]
    place = one_line("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location) + at)[1:]
    reason = first["msg"].replace("Input should", "must", 1)
    return ApiError(400, f"{place or 'the body'}: {reason[:1].lower()}{reason[1:]}", param=field or None)


def one_line(text: str, most: int = 2 * SHOWN_CHARACTERS) -> str:
    """What a user wrote, or a template: bounded, and what is not printable is escaped."""
    return repr(text[:most])[1:-1] + ("..." if len(text) > most else "")


def quoted(text: str) -> str:
    """What a user wrote, in quotes."""
    return f"'{one_line(text, SHOWN_CHARACTERS)}'"


def install(app: FastAPI) -> None:
    """Registers handlers for all errors except bugs, which `serve.middleware.RequestContext` catches."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return error_response(request.scope, as_api_error(error))

    for kind in (HTTPException, RequestValidationError, InvalidRequestError):
        app.add_exception_handler(kind, handle)
