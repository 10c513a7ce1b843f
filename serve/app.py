"""The FastAPI application: its routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from jaxspec import __version__
from serve import errors
from serve.body import JsonRoute
from serve.chat import create_chat_completion
from serve.completions import create_completion
from serve.cors import CorsMiddleware
from serve.engine_thread import Phase
from serve.messages.body import CountBody, MessagesBody
from serve.messages.handlers import count_tokens, create_message
from serve.middleware import OPEN_PATHS, ApiKeyAuth, RequestContext, RootPath
from serve.openapi import (
    ASKS,
    READS,
    AnthropicErrorBody,
    ChatCompletion,
    Completion,
    Detokenization,
    Message,
    ResponseObject,
    Status,
    TokenCount,
    Tokenization,
    TokenizerInfo,
    answers,
    describe,
)
from serve.page import page_response
from serve.protocol import ChatBody, CompletionBody, DetokenizeBody, ModelCard, ModelList, TokenizeBody
from serve.responses.body import ResponsesBody
from serve.responses.handlers import create_response
from serve.server_info import ServerInfo, describe_server
from serve.service import Service
from serve.tokenization import describe_tokenizer, detokenize, tokenize
from serve.version import version


def create_app(service: Service) -> FastAPI:
    """The application. Its lifespan starts the engine thread, which loads the model while requests get 503."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    # No /docs: its page loads scripts from another site. /openapi.json is served, and needs the key.
    app = FastAPI(title="jaxspec", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # a redirect would repeat the Host that the client sent
    app.state.body_bytes = service.body_bytes
    errors.install(app)
    app.include_router(_openai_routes(service))
    app.include_router(_anthropic_routes(service))
    app.include_router(_operations_routes(service))
    describe(app, needs_key=bool(service.settings.api_keys), open_paths=OPEN_PATHS)
    if service.settings.api_keys:
        app.add_middleware(ApiKeyAuth, api_keys=service.settings.api_keys)
    app.add_middleware(RequestContext, service=service)
    if service.settings.cors.origins:
        app.add_middleware(CorsMiddleware, cors=service.settings.cors)  # outside: errors too can be read by a page
    if service.settings.root_path:
        app.add_middleware(RootPath, root_path=service.settings.root_path)
    return app


def route_names(app: FastAPI) -> list[str]:
    """Method and path of each route, for the log."""
    paths = app.openapi()["paths"].items()
    return sorted(f"{method.upper()} {path}" for path, methods in paths for method in methods)


def _openai_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", responses=answers(*READS, ok=Completion, stream=True))
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await create_completion(service, request, body)

    @router.post("/v1/chat/completions", responses=answers(*READS, ok=ChatCompletion, stream=True))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await create_chat_completion(service, request, body)

    @router.post("/v1/responses", responses=answers(*READS, ok=ResponseObject, stream=True))
    async def responses(body: ResponsesBody, request: Request) -> Response:
        return await create_response(service, request, body)

    @router.post("/tokenize", responses=answers(*READS, ok=Tokenization))
    async def tokenize_text(body: TokenizeBody) -> Response:
        return await tokenize(service, body)

    @router.post("/detokenize", responses=answers(*READS, ok=Detokenization))
    async def detokenize_ids(body: DetokenizeBody) -> Response:
        return await detokenize(service, body)

    @router.get("/tokenizer_info", responses=answers(*ASKS, 400, ok=TokenizerInfo))
    async def tokenizer_info() -> Response:
        return describe_tokenizer(service)

    def card(name: str) -> ModelCard:
        return ModelCard(id=name, created=service.created, max_model_len=service.model().engine.max_model_len)

    @router.get("/v1/models", responses=answers(*ASKS))
    async def models() -> ModelList:
        return ModelList(data=[card(name) for name in service.settings.names])

    @router.get("/v1/models/{name:path}", responses=answers(*ASKS, 404))
    async def model(name: str) -> ModelCard:
        return card(service.resolve_name(name))

    return router


def _anthropic_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    of_messages = answers(*READS, ok=Message, stream=True, error=AnthropicErrorBody)

    @router.post("/v1/messages", responses=of_messages)
    async def messages(body: MessagesBody, request: Request) -> Response:
        return await create_message(service, request, body)

    @router.post("/v1/messages/count_tokens", responses=answers(*READS, ok=TokenCount, error=AnthropicErrorBody))
    async def count(body: CountBody) -> Response:
        return await count_tokens(service, body)

    return router


def _operations_routes(service: Service) -> APIRouter:
    router = APIRouter()
    states = answers(ok=Status) | {503: {"model": Status, "description": "Not now: `status` says why."}}
    versions = version()  # once, and of the code that was loaded: a checkout may change under a running server

    @router.get("/health", responses=states)
    async def health() -> Response:
        """Liveness: 503 means that the process should be restarted."""
        if service.engine_thread.healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the engine has failed or is stuck"}, 503)

    @router.get("/ready", responses=states)
    async def ready() -> Response:
        """Readiness: warm-up is done and the server is not shutting down."""
        engine = service.engine_thread
        if service.draining:
            return JSONResponse({"status": "draining"}, 503)
        if engine.phase is Phase.READY and engine.healthy:
            return JSONResponse({"status": "ready"})
        status: dict[str, Any] = {"status": engine.phase.value}
        if engine.phase is Phase.LOADING and engine.progress is not None:
            status["done"], status["total"], status["what"] = engine.progress
        return JSONResponse(status, 503)

    @router.get("/version", responses=answers(401, 500))
    async def show_versions() -> dict[str, str]:
        return {"version": __version__, **versions}

    @router.get("/", response_class=HTMLResponse, responses=answers(500))
    async def page() -> Response:
        """A chat in a browser, and what the engine does. It loads nothing from anywhere else."""
        return page_response()

    @router.get("/server_info", responses=answers(*ASKS))
    async def server_info() -> ServerInfo:
        return describe_server(service)

    @router.get("/metrics", response_class=PlainTextResponse, responses=answers(401, 500))
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
