"""What all chat endpoints do: from a chat to choices of the engine, and from their output to what is in it."""

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxspec.engine.output import FinishReason
from jaxspec.errors import InvalidRequestError
from jaxspec.grammar.thought import (
    NO_PREFACE,
    Preface,
    ReasoningFormat,
    ThinkTags,
    answer_preface,
    prompt_end,
    reasoning_parser,
)
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.structured import StructuredOutputsParams
from jaxspec.text import Tokenizer
from serve.generation import Choice, Delta
from serve.parsers.events import Event, Reasoning
from serve.parsers.grammar import ANYTHING, held_calls, required_calls
from serve.parsers.output import Harmony, OutputFormat, OutputParser
from serve.parsers.registry import tool_parser
from serve.protocol import ChatBody
from serve.service import Service


@dataclass(frozen=True)
class ChatRun:
    """
    Attributes:
        parsers: of each choice, by its index.
        thinks: thoughts are told from answers.
    """

    tokenizer: Tokenizer
    choices: Sequence[Choice]
    parsers: Sequence[OutputParser]
    thinks: bool
    include_reasoning: bool

    def events(self, choice: Choice, delta: Delta) -> list[Event]:
        """What is in the newest output of a choice, and at its end what had been held back."""
        parser = self.parsers[choice.index]
        found = parser.feed(delta.text)
        if delta.finish_reason is not None:
            found += parser.end(cut=delta.finish_reason is FinishReason.LENGTH)
        return [event for event in found if self.include_reasoning or not isinstance(event, Reasoning)]

    def reasoning_tokens(self, choice: Choice, offsets: Sequence[int]) -> int:
        """How many tokens of an output belong to its thought. `offsets`: of each, the characters before it."""
        return bisect.bisect_left(offsets, self.parsers[choice.index].reasoning_end)

    def finish_reason(self, choice: Choice, delta: Delta) -> str | None:
        if delta.finish_reason is FinishReason.STOP and self.parsers[choice.index].num_calls:
            return "tool_calls"
        return delta.finish_reason.value if delta.finish_reason else None


def chat_params(service: Service, body: ChatBody) -> list[SamplingParams]:
    """Parameters of each choice; without a limit they go on to the end of the context."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    defaults = service.model().sampling_defaults
    return body.sampling_params(
        max_tokens=max_tokens, logprobs=body.alternatives, defaults=defaults, prompt_logprobs=body.prompt_logprobs
    )


async def prepare_chat(
    service: Service, body: ChatBody, params: Sequence[SamplingParams], *, arrival: float
) -> ChatRun:
    """Renders and encodes the chat.

    Raises:
        InvalidRequestError: the template rejects it, or it is too long, or the format of the model's calls is not known, or
            a schema that they are to be held to cannot be.
        ApiError: too much text is in work, or a deadline has passed.
    """
    tokenizer = service.tokenizer()
    form, tags = output_format(service, body)
    prompt = await encode_chat(service, body)
    end = prompt_end(tokenizer, prompt)
    asked, names, held = params[0].structured_outputs, body.required_tools, list[str]()
    if names is not None or (asked is not None and body.callable_tools):
        await service.compiled_grammar(asked)  # so that an error names the right schema
        instead = asked if names is None else None
        names = list(form.schemas) if names is None else names
        parallel = body.parallel_tool_calls and len(names) > 1
        calls = _calls_grammar(tokenizer, form, names, parallel=parallel, instead=instead)
        params = [replace(each, structured_outputs=calls) for each in params]
    elif held := body.strict_tools:
        calls = _held_grammar(tokenizer, form, held, end)
        params = [replace(each, structured_outputs=calls) for each in params]
    preface = NO_PREFACE if held else _preface(service, body, form, end, calls=names is not None)
    grammar = await service.compiled_grammar(
        params[0].structured_outputs, preface, param="tools" if names or held else None
    )
    choices = service.make_choices(
        [prompt],
        params,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        arrival_time=arrival,
        grammar=grammar,
        shown=tokenizer.ids_of(tags),
    )
    parsers = [OutputParser(form, end) for _ in choices]
    return ChatRun(tokenizer, choices, parsers, form.reasoning is not None, body.include_reasoning)


def _calls_grammar(
    tokenizer: Tokenizer,
    form: OutputFormat,
    names: Sequence[str],
    *,
    parallel: bool,
    instead: StructuredOutputsParams | None,
) -> StructuredOutputsParams:
    """The grammar of an answer that calls at least one of the functions.

    Args:
        instead: what an answer without calls has to be; None: there has to be a call.

    Raises:
        InvalidRequestError: the schemas are too long, or `instead` is no JSON.
    """
    assert form.tools is not None
    schemas = {name: form.schemas[name] for name in names}
    answer = None if instead is None else _answer_schema(instead)
    text = required_calls(form.tools, schemas, tokenizer.special_id, parallel=parallel, instead=answer)
    return StructuredOutputsParams(grammar=text)


def _held_grammar(
    tokenizer: Tokenizer, form: OutputFormat, strict: Sequence[str], prompt_end: str
) -> StructuredOutputsParams:
    """The grammar of an answer that may call functions, of which those of these names fit their schemas.

    Raises:
        InvalidRequestError: the schemas are too long.
    """
    schemas = {name: schema if name in strict else ANYTHING for name, schema in form.schemas.items()}
    thoughts, calls = form.reasoning, form.calls
    assert calls is not None
    thought, inside = None, False
    if isinstance(thoughts, ThinkTags) and not form.calls_end_thoughts:
        thought, inside = thoughts.tokens, thoughts.begins_inside(prompt_end)
    text = held_calls(calls, schemas, tokenizer.special_id, tokenizer.special_ids, thought=thought, inside=inside)
    return StructuredOutputsParams(grammar=text)


def _answer_schema(asked: StructuredOutputsParams) -> Mapping[str, Any]:
    """
    Raises:
        InvalidRequestError: what is asked is no JSON.
    """
    match asked.kind:
        case "json":
            return json.loads(asked.source)
        case "json_object":
            return {"type": "object"}
    raise InvalidRequestError(
        f"structured_outputs.{asked.kind} together with tools is not supported: ask for JSON, or set tool_choice to none",
        param="structured_outputs",
    )


def _preface(service: Service, body: ChatBody, form: OutputFormat, prompt_end: str, *, calls: bool) -> Preface:
    """What may come before what a grammar holds: a thought, also where it stays in the text, and an answer's header.

    Args:
        calls: the grammar has the headers of its calls.
    """
    preface = answer_preface(_thoughts(service), prompt_end, body.variables)
    if not calls:
        return preface
    thought, tools = preface.thought, form.tools
    if thought is not None and tools is not None and not isinstance(tools, Harmony) and tools.ends_reasoning:
        thought = replace(thought, answers=frozenset(tools.opens))
    return Preface(thought)


def _thoughts(service: Service) -> ReasoningFormat | None:
    return reasoning_parser(service.settings.reasoning_parser, service.tokenizer().chat_template)


async def encode_chat(service: Service, body: ChatBody) -> list[int]:
    """The prompt's ids; raises as `prepare_chat` does."""
    messages = [m.rendered() for m in body.messages]
    service.reject_too_long((m["content"] for m in messages), "messages")
    return await service.in_pool(
        service.tokenizer().apply_chat_template,
        messages,
        add_generation_prompt=body.add_generation_prompt,
        limit=service.model().engine.max_model_len,
        variables=body.variables,
    )


def output_format(service: Service, body: ChatBody) -> tuple[OutputFormat, frozenset[str]]:
    """How outputs are to be read, and the tags that their text must have for that.

    Raises:
        InvalidRequestError: tools, and nothing says how the model calls them.
    """
    template = service.tokenizer().chat_template
    thoughts = _thoughts(service)
    form = OutputFormat(thoughts if body.separate_reasoning else None, parallel=body.parallel_tool_calls)
    tags = frozenset(thoughts.tokens if thoughts else ())  # also where the thought stays in the answer
    if not body.callable_tools:
        return form, tags
    tools = tool_parser(service.settings.tool_call_parser, template)
    if tools is None:
        raise InvalidRequestError(
            "how this model calls tools is not known: start the server with --tool-call-parser", param="tools"
        )
    functions = [tool["function"] for tool in body.callable_tools]
    form = replace(form, tools=tools, schemas={f["name"]: f["parameters"] for f in functions})
    return form, tags | form.tokens
