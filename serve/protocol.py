"""OpenAI's request and response bodies, as far as they are served.

Numbers are strict (no `"5"`, no `true`), finite and bounded, lists have a greatest length, and the first wrong element
ends the check. `SamplingParams` checks what depends on several values, and the engine lengths against the context.

A parameter that would change the output and is not supported is an error, as is a name that is not known at all (it
might be a misspelt parameter); values that ask for nothing pass (`serve.tolerance`), and null is as if absent.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from typing_extensions import TypedDict  # which pydantic wants where Python has none of its own that it can read

from jaxspec.sampling.params import MAX_LOGPROBS, SamplingParams
from serve import tolerance
from serve.fields import MAX_PROMPTS, Count, Int64, LogitBias, Prompt, Stop, StopTokenIds, Tokens, invalid
from serve.structured import ResponseFormat, StructuredOutputs
from serve.tool_fields import ToolCalls, ToolChoice, Tools, Variables, required_names, without_marks

MAX_CHOICES = 16
MAX_OUTPUTS = 256  # choices times prompts of one call
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message

# Parameters that `SamplingParams` knows by the same name, where a request gives them.
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "num_speculative_tokens", "stop",
)  # fmt: skip
# Kinds of content parts that other servers take, and what they hold.
_OTHER_PARTS = {"image": "images are", "audio": "audio is", "video": "videos are", "file": "files are"}
_TEXT_PARTS = ("text", "input_text", "output_text")


def _describe(schema: dict[str, Any], model: type["Body"]) -> None:
    """Null is accepted wherever a field may be left out, and nothing but null under a name that is not known."""
    required = schema.get("required", [])
    properties = schema.setdefault("properties", {})
    for name, each in properties.items():
        if name not in required and {"type": "null"} not in each.get("anyOf", []):
            properties[name] = {"anyOf": [each, {"type": "null"}]}
    properties |= model.known.json_schema()
    schema["additionalProperties"] = {"type": "null"}
    schema |= model.conditions


class Body(BaseModel):
    """A request body, or an object in it. Extra fields must be `known`, or null."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow", json_schema_extra=_describe)
    known: ClassVar[tolerance.Known] = tolerance.Known()
    conditions: ClassVar[dict[str, Any]] = {}  # of the JSON schema: what fields ask of each other

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if value is not None}

    @model_validator(mode="after")
    def _check_extra_fields(self) -> "Body":
        self.known.check(self.model_extra or {}, type(self).model_fields)
        return self


class StreamOptions(Body):
    known = tolerance.STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """What completions and chat have in common."""

    known = tolerance.GENERATION

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: LogitBias | None = None
    min_tokens: Count | None = None
    num_speculative_tokens: Count | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    priority: Int64 = 0  # lower runs earlier
    cache_salt: str | None = Field(None, min_length=1, max_length=256)  # pages are shared under the same salt only
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    return_metrics: bool = False
    return_draft_runs: bool = False

    @model_validator(mode="after")
    def _check_combinations(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise invalid("needs stream to be true", ".stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("not supported together with stream", ".prompt_logprobs")
        if self.best_of not in (None, self.choices):
            raise invalid("not supported (only equal to n)", ".best_of")
        if self.response_format is not None and self.structured_outputs is not None:
            raise invalid("give either this or response_format", ".structured_outputs")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    def sampling_params(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        defaults: Mapping[str, float],
        prompt_logprobs: int | None = None,
    ) -> list[SamplingParams]:
        """Parameters of each choice: see `SamplingParams.choices`.

        Args:
            defaults: the model's own, for what the request leaves unsaid.

        Raises:
            InvalidRequestError: a value out of range.
        """
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "logit_bias": self.logit_bias or {},
            "structured_outputs": self.structured_outputs or self.response_format,
            **defaults,
            **given,
        }
        return list(SamplingParams(**options, n=self.choices, seed=self.seed).choices())


class CompletionBody(GenerationBody):
    known = tolerance.COMPLETION

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None  # 0 reads the prompt only
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_prompt(self) -> "CompletionBody":
        if len(self.prompts) * self.choices > MAX_OUTPUTS:
            raise invalid(
                f"too many prompts in one call: at most {MAX_PROMPTS}, and {MAX_OUTPUTS} prompts times n", ".prompt"
            )
        return self

    @property
    def scored(self) -> int | None:
        """`SamplingParams.prompt_logprobs`: echo with logprobs wants them too."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(Body):
    """A part of a message's content."""

    known = tolerance.TEXT_PART

    type: Literal["text", "input_text", "output_text"]
    text: str


def _part_text(part: Any, at: str) -> str:
    if not isinstance(part, dict):
        raise invalid("must be an object with type and text", at)
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        if isinstance(kind, str):
            for name, words in _OTHER_PARTS.items():
                if name in kind[:32]:
                    raise invalid(f"{words} not supported", at)
        raise invalid("the type must be 'text'", at)
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid("must be a text", f"{at}.text")
    extra = {name: value for name, value in part.items() if name not in ("type", "text")}
    TextPart.known.check(extra, ("type", "text"), at)
    return text


def content_text(value: Any) -> str:
    """As templates expect it: text parts are joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("must be a text or a list of text parts")
    if len(value) > MAX_PARTS:
        raise invalid(f"has {len(value)} parts, and at most {MAX_PARTS} are accepted")
    return "\n".join(_part_text(part, f"[{i}]") for i, part in enumerate(value))


Content = Annotated[
    str,
    PlainValidator(content_text, json_schema_input_type=str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]),
]


class Message(Body):
    known = tolerance.MESSAGE
    conditions = {
        "if": {"properties": {"role": {"not": {"const": "assistant"}}}},
        "then": {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="May be null or absent in a message of the assistant only.")
    name: str | None = None
    reasoning: str | None = Field(None, description="An earlier thought; `reasoning_content` is the same.")
    reasoning_content: str | None = None
    tool_calls: ToolCalls | None = Field(None, description="Of an assistant.")
    tool_call_id: str | None = Field(None, max_length=256, description="Of a tool's answer.")

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise invalid("must be a text or a list of text parts", ".content")
        if self.tool_calls and self.role != "assistant":
            raise invalid("only a message of the assistant has calls", ".tool_calls")
        return self

    def rendered(self) -> dict[str, Any]:
        """For a template."""
        thought = self.reasoning or self.reasoning_content
        others = {
            "name": self.name,
            "reasoning": thought,
            "reasoning_content": thought,
            "tool_calls": self.tool_calls,
            "tool_call_id": self.tool_call_id,
        }
        return {"role": self.role, "content": self.content or ""} | {n: v for n, v in others.items() if v}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(GenerationBody):
    known = tolerance.CHAT

    messages: Messages
    add_generation_prompt: bool = True
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Variables | None = None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Those that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def variables(self) -> dict[str, Any]:
        """What the template is given beside the messages."""
        return template_variables(self.callable_tools, self.reasoning_effort, self.chat_template_kwargs)

    @property
    def alternatives(self) -> int | None:
        """`SamplingParams.logprobs` of the two fields."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def required_tools(self) -> list[str] | None:
        """The functions of which one has to be called; None where none has to be."""
        return required_names(self.tool_choice, self.tools or [])

    @property
    def strict_tools(self) -> list[str]:
        """The functions whose calls are held to their schemas, whether or not one has to be called."""
        return [tool["function"]["name"] for tool in self.callable_tools if tool.get("strict")]

    @model_validator(mode="after")
    def _check_tool_choice(self) -> "ChatBody":
        """What is asked of an answer's text by `response_format` is nothing to an answer that has to be a call."""
        if self.required_tools and self.structured_outputs:
            raise invalid("a required call does not go with structured_outputs", ".tool_choice")
        return self

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise invalid("needs logprobs to be true", ".top_logprobs")
        return self

    @model_validator(mode="after")
    def _check_max_tokens(self) -> "ChatBody":
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("differs from max_tokens: give one of them", ".max_completion_tokens")
        return self


def template_variables(
    tools: list[dict[str, Any]] | None, effort: str | None, kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """Variables of a chat template. An effort also turns thinking on or off, by both names that templates have for that."""
    out: dict[str, Any] = {"tools": without_marks(tools)} if tools else {}
    if effort is not None:
        thinks = effort != "none"
        out |= {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    return out | (kwargs or {})


class TokenizeBody(Body):
    known = tolerance.TOKENIZE
    conditions = {
        "oneOf": [
            {"required": [name], "properties": {name: {"not": {"type": "null"}}, other: {"type": "null"}}}
            for name, other in (("prompt", "messages"), ("messages", "prompt"))
        ]
    }

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    tools: Tools | None = None
    chat_template_kwargs: Variables | None = None

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give either prompt or messages", ".prompt")
        return self


class DetokenizeBody(Body):
    known = tolerance.DETOKENIZE

    model: str | None = None
    tokens: Tokens


class PromptTokensDetails(TypedDict):
    cached_tokens: int  # found in the prefix cache


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculationMetrics(TypedDict):
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int


class RequestMetrics(TypedDict):
    """Times as `serve.request_metrics.RequestTimes` defines them; null where no token came."""

    queue_time_seconds: float | None
    prefill_time_seconds: float | None
    time_to_first_token_seconds: float | None
    decode_time_seconds: float | None
    preemption_time_seconds: float
    num_preemptions: int
    speculative_decoding: SpeculationMetrics | None


class CompletionLogprobs(TypedDict):
    """With `echo` the prompt's tokens come first; the very first one has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxspec"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
