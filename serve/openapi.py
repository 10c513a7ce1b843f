"""The OpenAPI description: what each route answers, errors included. What it says is tested against the server."""

from typing import Any, Literal, NotRequired

from fastapi import FastAPI
from pydantic import BaseModel
from typing_extensions import TypedDict

from serve.drafts import DraftRun
from serve.protocol import ChatTokenLogprob, CompletionLogprobs, PromptTokenLogprob, RequestMetrics, Usage

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
_ERRORS = {
    400: "A value is wrong, or not supported: `param` names the field. Also a prompt that exceeds the context "
    "(`code` is `context_length_exceeded`), and a body that is no JSON (`invalid_json`).",
    401: "The server wants an API key, and there was none or a wrong one.",
    404: "There is no model of that name.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The content type is not `application/json`.",
    429: "The queue is full. `Retry-After` says when to try again.",
    500: "The server failed this request.",
    503: "The model is loading, the server shuts down, or the engine has stopped. `Retry-After` says when to try again.",
    504: "A deadline has passed: `--request-timeout` or `--queue-timeout`. `X-Should-Retry` is `false`.",
}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error, in streams too."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """Every error of Anthropic's paths."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptTokenLogprob] | None]]
    metrics: NotRequired[RequestMetrics]
    draft_runs: NotRequired[list[DraftRun]]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    synthetic_acceptance_length: NotRequired[float]


class CalledFunction(TypedDict):
    name: str
    arguments: str  # JSON, if the model wrote it so


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None  # null where there are only calls
    refusal: None
    reasoning: NotRequired[str | None]  # of a model that thinks
    reasoning_content: NotRequired[str | None]  # the same
    tool_calls: NotRequired[list[ToolCall]]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: NotRequired[list[int]]
    metrics: NotRequired[RequestMetrics]
    draft_runs: NotRequired[list[DraftRun]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[list[dict[str, PromptTokenLogprob] | None]]
    usage: Usage
    synthetic_acceptance_length: NotRequired[float]


class TokenizerInfo(TypedDict):
    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class Tokenization(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenization(TypedDict):
    prompt: str


class MessageUsage(TypedDict):
    input_tokens: int  # those that the prefix cache had are not among them
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(TypedDict):
    """Anthropic's; blocks are of the types text, thinking and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    synthetic_acceptance_length: NotRequired[float]


class TokenCount(TypedDict):
    input_tokens: int


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseObject(TypedDict):
    """OpenAI's response; items of output are of the types message, reasoning and function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    background: bool
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: str
    usage: ResponseUsage
    synthetic_acceptance_length: NotRequired[float]


class Status(TypedDict):
    status: str
    done: NotRequired[int]
    total: NotRequired[int]
    what: NotRequired[str]


# Of one event; FastAPI describes its own streams in the same way.
_EVENT = {
    "type": "object",
    "description": "With `stream`: the API's events.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_STREAM = {"text/event-stream": {"itemSchema": _EVENT}}
# What every route that reads a body may answer, and what every route may that needs the model.
READS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
ASKS = (401, 500, 503)


def answers(
    *errors: int, ok: Any = None, stream: bool = False, description: str = "", error: type[BaseModel] = ErrorBody
) -> dict[int | str, Any]:
    """The `responses` of a route."""
    success: dict[str, Any] = {"description": description or "The answer."}
    if ok is not None:
        success["model"] = ok
    if stream:
        success["content"] = _STREAM
    out: dict[int | str, Any] = {200: success}
    for status in sorted(errors):
        out[status] = {"model": error, "description": _ERRORS[status]}
        if status in (429, 503):
            out[status]["headers"] = _RETRY
    return out


def describe(app: FastAPI, *, needs_key: bool, open_paths: frozenset[str]) -> None:
    """Makes FastAPI's description say what is true: there is no 422, and most paths may need a key."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _correct(generate(), needs_key, open_paths)
        return generate()

    app.openapi = openapi  # type: ignore[method-assign]


def _correct(schema: dict[str, Any], needs_key: bool, open_paths: frozenset[str]) -> None:
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    if needs_key:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if needs_key and path not in open_paths:
                operation["security"] = [{"key": []}]
            for status, response in operation["responses"].items():
                if status >= "400":  # an error is JSON where the answer is not
                    response["content"] = {"application/json": next(iter(response["content"].values()))}
