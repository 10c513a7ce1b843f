"""OpenAI's request and response bodies, as far as they are served.

Numbers are strict (no `"5"`, no `true`) and finite. Ranges of sampling parameters are checked by `SamplingParams`, and
lengths against the context by the engine: here are only types, and limits on how much one call may ask for.

A parameter that would change the output and is not supported is an error, as is a name that is not known at all (it
might be a misspelt parameter); neutral values such as `suffix: ""` pass.
"""

import difflib
import re
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from jaxspec.sampling.params import MAX_LOGPROBS, SamplingParams

MAX_CHOICES = 16
MAX_PROMPTS = 32
MAX_OUTPUTS = 64  # choices times prompts of one call
MAX_MESSAGES = 4096

# Parameters that are known but not supported, with the values that change no output.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "reasoning_effort": ("none",),
    "refusal": ("",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
# Parameters that do not touch the output.
IGNORED = frozenset(
    (
        "include_obfuscation",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)


# Parameters that `SamplingParams` knows by the same name, where a request gives them.
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "num_speculative_tokens", "stop",
)  # fmt: skip
# An object's keys are strings. The length bounds the number that they are read as.
_TOKEN_ID = re.compile(r"[0-9]{1,9}", re.ASCII)


def _invalid(param: str, message: str) -> PydanticCustomError:
    # The message goes through as a value, not as a template: it may hold braces.
    return PydanticCustomError("invalid_parameter", "{text}", {"text": message, "param": param})


class Body(BaseModel):
    """A request body. Extra fields must be neutral, ignored or null."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    @model_validator(mode="after")
    def _check_extra_fields(self) -> "Body":
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED or (name in NEUTRAL and value in NEUTRAL[name]):
                continue
            if name in NEUTRAL:
                neutral = " or ".join(map(repr, NEUTRAL[name]))
                raise _invalid(name, f"{name} is not supported yet" + (f" (only {neutral})" if neutral else ""))
            close = difflib.get_close_matches(name, [*type(self).model_fields, *NEUTRAL], n=1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise _invalid(name[:64], f"unknown parameter {name[:64]!r}{hint}")
        return self


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    num_speculative_tokens: int | None = None
    priority: int = Field(0, ge=-(2**63), lt=2**63)  # lower runs earlier
    cache_salt: str | None = Field(None, min_length=1, max_length=256)  # pages are shared under the same salt only
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    return_metrics: bool = False

    @model_validator(mode="after")
    def _check_combinations(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise _invalid("stream_options", "stream_options needs stream to be true")
        if self.best_of not in (None, self.choices):
            raise _invalid("best_of", "best_of is not supported (only equal to n)")
        if not all(_TOKEN_ID.fullmatch(name) for name in self.logit_bias or {}):
            raise _invalid("logit_bias", "logit_bias must have token ids as keys")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> list[SamplingParams]:
        """Parameters of each choice. With a seed, choice i uses seed + i: choice 0 is what n = 1 would give.

        Raises:
            InvalidRequestError: a value out of range.
        """
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "logit_bias": bias,
            **given,
        }
        if self.seed is None:
            return [SamplingParams(**options)] * self.choices
        first = SamplingParams(**options, seed=self.seed)
        seeds = ((self.seed + i) % 2**64 for i in range(1, self.choices))
        return [first, *(SamplingParams(**options, seed=seed) for seed in seeds)]


class CompletionBody(GenerationBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> "CompletionBody":
        if self.echo and self.logprobs is not None:
            raise _invalid("echo", "echo together with logprobs is not supported yet")
        if not self.prompt:
            raise _invalid("prompt", "prompt must not be empty")
        if len(self.prompts) > MAX_PROMPTS or len(self.prompts) * self.choices > MAX_OUTPUTS:
            limits = f"at most {MAX_PROMPTS} prompts, and {MAX_OUTPUTS} prompts times n"
            raise _invalid("prompt", f"too many prompts in one call ({limits})")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def rendered(self) -> dict[str, str]:
        """As templates expect it: text parts are joined by line ends."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name is not None else {})


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def alternatives(self) -> int | None:
        """`SamplingParams.logprobs` of the two fields."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise _invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def _check_max_tokens(self) -> "ChatBody":
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _invalid("max_completion_tokens", "max_tokens and max_completion_tokens differ: give one of them")
        return self


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise _invalid("prompt", "give either prompt or messages")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


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
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


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
