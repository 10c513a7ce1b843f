"""CORS: which pages of other sites a browser lets call the server. Off unless origins are named."""

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from serve.errors import ApiError

# What a page may read of an answer beside its body.
EXPOSED = ("x-request-id", "retry-after")


@dataclass(frozen=True)
class Cors:
    """
    Attributes:
        origins: of pages that may call the server; none: no page of another site may. "*" is any.
        headers: that they may send, beside the harmless ones that every page may. "*" is any.
        credentials: they may send cookies.
    """

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("GET", "POST")
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


class CorsMiddleware(CORSMiddleware):
    """Starlette's, around authentication: a browser's preflight request carries no key. Refusals are OpenAI errors."""

    def __init__(self, app: ASGIApp, cors: Cors):
        super().__init__(
            app,
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
            expose_headers=EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        names = {"access-control-allow-origin", "vary", "access-control-allow-methods", "access-control-allow-headers"}
        headers = {name: value for name, value in response.headers.items() if name in names}
        why = bytes(response.body).decode()
        return ApiError(
            400, f"{why}: see --allowed-origins, --allowed-methods and --allowed-headers", headers=headers
        ).response()
