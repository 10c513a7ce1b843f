"""What is done for every request: its id, its line in the log, the API key, the count of requests in flight."""

import asyncio
import hashlib
import logging
import re
import secrets
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.errors import SHOWN_CHARACTERS
from serve.connection import TASK_KEY
from serve.errors import ApiError, error_response, server_error, unavailable
from serve.paths import route_path
from serve.request_info import RequestInfo, set_request_info
from serve.service import Service

logger = logging.getLogger("jaxspec.access")

# Load balancers poll the first two without a key; the page at / asks for the key, and holds no data.
OPEN_PATHS = frozenset({"/health", "/ready", "/"})
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/server_info"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


# Only for the log, as in nginx: the client has gone.
CLIENT_GONE = 499


class RootPath:
    """Tells the application where a proxy has it: paths are routed with that prefix and without it."""

    def __init__(self, app: ASGIApp, root_path: str):
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class RequestContext:
    """Outermost: gives the request an id (the client's own if it is safe to log), counts it and logs its end.

    Also the last resort for bugs: the client gets the usual error body, with an id to find the traceback in the log.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        offered = Headers(scope=scope).get("x-request-id", "")
        request_id = offered if _REQUEST_ID.fullmatch(offered) else uuid.uuid4().hex
        quiet = route_path(scope) in _QUIET_PATHS
        status, start = 0, time.monotonic()
        set_request_info(RequestInfo(request_id, start))
        scope[TASK_KEY] = asyncio.current_task()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self._service.in_flight += not quiet
        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # The client has gone, or the server ends and what this request waits for has been cancelled. Nobody awaits
            # this task, so the cancellation ends here.
            task = asyncio.current_task()
            gone = task is not None and task.cancelling() > 0
            if not status:
                error = unavailable("the server is shutting down")
                await error_response(scope, error)(scope, receive, send_with_id)
                status = CLIENT_GONE if gone else status
        except Exception:
            logger.exception("bug in a request handler, id=%s", request_id)
            if status:
                raise  # the response has begun: uvicorn closes the connection
            await error_response(scope, server_error())(scope, receive, send_with_id)
        finally:
            self._service.in_flight -= not quiet
            if not quiet:
                seconds = time.monotonic() - start
                route = getattr(scope.get("route"), "path", None)
                self._service.metrics.http.record(scope["method"], route, status, seconds)
                method, path = scope["method"][:SHOWN_CHARACTERS], scope["path"][:SHOWN_CHARACTERS]
                logger.info("%s %r %d %.3fs id=%s", method, path, status, seconds, request_id)


class ApiKeyAuth:
    """Without a key every path except the open ones answers 401, unknown paths too."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]):
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and route_path(scope) not in OPEN_PATHS and not self._allowed(Headers(scope=scope)):
            error = ApiError(
                401,
                "missing or wrong API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await error_response(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [key if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        digests = [hashlib.sha256(each.strip().encode("latin-1", "replace")).digest() for each in given]
        matches = [secrets.compare_digest(digest, known) for digest in digests for known in self._digests]
        return any(matches)  # all compared, in constant time; no key is empty
