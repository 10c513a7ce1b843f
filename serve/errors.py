"""Errors over HTTP: every one has the body `{"error": {message, type, param, code}}`, as OpenAI's do."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jaxspec.errors import InvalidRequestError

RETRY_AFTER_SECONDS = 5
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

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


def unavailable(why: str) -> ApiError:
    """503; the official clients wait for `Retry-After` and try again."""
    return ApiError(
        503,
        why,
        kind="service_unavailable",
        code="service_unavailable",
        headers={"retry-after": str(RETRY_AFTER_SECONDS)},
    )


def rate_limited(why: str) -> ApiError:
    """429: the server has as many requests as it accepts. Clients try again, as with `unavailable`."""
    return ApiError(
        429,
        why,
        kind="rate_limit_exceeded",
        code="rate_limit_exceeded",
        headers={"retry-after": str(RETRY_AFTER_SECONDS)},
    )


def server_error(message: str = "internal server error") -> ApiError:
    return ApiError(500, message, kind="server_error", code="server_error")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; of a bug, only that there was one (a repr may show internals)."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case RequestValidationError():
            return _validation_error(error)
        case HTTPException():
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            message = _MESSAGES.get(error.status_code, error.detail)
            return ApiError(error.status_code, message, code=code, headers=error.headers)
        case _:
            return server_error()


def _validation_error(error: RequestValidationError) -> ApiError:
    """Names the first field that is wrong. Does not quote the input, which may be long, secret, or NaN."""
    errors = error.errors()
    first = errors[0]
    field = first["loc"][1:2]
    if param := (first.get("ctx") or {}).get("param"):
        return ApiError(400, first["msg"], param=param)
    # A field with several possible types reports one error for each of them.
    reasons = dict.fromkeys(e["msg"][:1].lower() + e["msg"][1:] for e in errors if e["loc"][1:2] == field)
    param = str(field[0]) if field else None
    return ApiError(400, f"{param or 'the body'}: {' or '.join(list(reasons)[:3])}", param=param)


def install(app: FastAPI) -> None:
    """Registers handlers for all errors except bugs, which `serve.middleware.RequestContext` catches."""

    async def handle(_request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    for kind in (HTTPException, RequestValidationError, InvalidRequestError):
        app.add_exception_handler(kind, handle)
