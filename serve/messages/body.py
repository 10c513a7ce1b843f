"""Bodies of /v1/messages, read into OpenAI's messages and tools."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from serve import tolerance
from serve.fields import Count, Stop, invalid
from serve.protocol import MAX_MESSAGES, MAX_PARTS, Body, ChatBody
from serve.tool_fields import (
    MAX_TOOLS,
    Json,
    check_id,
    check_list,
    check_name,
    check_object,
    check_text,
    named_choice,
    read_function,
    unique_names,
)

# A line that a client puts in front of its system text; it changes with each request, so no prefix would be found again.
_BILLING = "x-anthropic-billing-header"
_NO_IMAGES = {"image": "images are not supported", "document": "documents are not supported"}


def _texts(value: Any, at: str, kinds: tuple[str, ...] = ("text",)) -> list[str]:
    """The texts of a content that is a text or a list of text blocks."""
    if isinstance(value, str):
        return [value]
    blocks = check_list(value, MAX_PARTS, "blocks", at)
    texts = []
    for i, block in enumerate(blocks):
        kind = check_object(block, f"{at}[{i}]").get("type")
        if kind not in kinds:
            raise _unknown(kind, f"{at}[{i}]")
        texts.append(check_text(block.get("text"), f"{at}[{i}].text"))
    return texts


def _unknown(kind: Any, at: str) -> Exception:
    return invalid(_NO_IMAGES.get(kind, "blocks of this type are not supported") if isinstance(kind, str) else
                   "must have a type", at)  # fmt: skip


def _system(value: Any) -> str:
    return "\n".join(text for text in _texts(value, "") if not text.startswith(_BILLING))


def _messages(value: Any) -> list[Json]:
    messages = check_list(value, MAX_MESSAGES, "messages")
    if not messages:
        raise invalid("must not be empty")
    found: list[Json] = []
    for i, message in enumerate(messages):
        role = check_object(message, f"[{i}]").get("role")
        at = f"[{i}].content"
        if role == "assistant":
            found.append(_assistant(message.get("content"), at))
        elif role == "user":
            found += _user(message.get("content"), at)
        elif role == "system":
            found.append({"role": "system", "content": "\n".join(_texts(message.get("content"), at))})
        else:
            raise invalid("must be 'user', 'assistant' or 'system'", f"[{i}].role")
    if found[-1]["role"] == "assistant":
        raise invalid("the last message is the assistant's: an answer that is begun cannot be continued")
    return found


def _user(content: Any, at: str) -> list[Json]:
    """Results of tools are messages of their own, in front of what the user says."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results, texts = [], []
    for i, block in enumerate(check_list(content, MAX_PARTS, "blocks", at)):
        here = f"{at}[{i}]"
        kind = check_object(block, here).get("type")
        if kind == "text":
            texts.append(check_text(block.get("text"), f"{here}.text"))
        elif kind == "tool_result":
            call = check_id(block.get("tool_use_id"), f"{here}.tool_use_id")
            given = block.get("content")
            text = "" if given is None else "\n".join(_texts(given, f"{here}.content"))
            results.append({"role": "tool", "tool_call_id": call, "content": text})
        else:
            raise _unknown(kind, here)
    return [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])]


def _assistant(content: Any, at: str) -> Json:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(check_list(content, MAX_PARTS, "blocks", at)):
        here = f"{at}[{i}]"
        kind = check_object(block, here).get("type")
        if kind == "text":
            texts.append(check_text(block.get("text"), f"{here}.text"))
        elif kind == "thinking":
            thoughts.append(check_text(block.get("thinking"), f"{here}.thinking"))
        elif kind == "tool_use":
            name = check_name(block.get("name"), f"{here}.name")
            arguments = json.dumps(check_object(block.get("input"), f"{here}.input"), ensure_ascii=False)
            call_id = check_id(block.get("id"), f"{here}.id")
            calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        elif kind != "redacted_thinking":  # nobody here can read that one
            raise _unknown(kind, here)
    message: Json = {"role": "assistant", "content": "\n".join(texts)}
    return message | ({"reasoning": "\n".join(thoughts)} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def _tools(value: Any) -> list[Json]:
    found = []
    for i, tool in enumerate(check_list(value, MAX_TOOLS, "tools")):
        check_object(tool, f"[{i}]")
        if tool.get("type") not in (None, "custom"):
            raise invalid("tools of the server are not supported: only such with an input_schema", f"[{i}].type")
        schema = check_object(tool.get("input_schema"), f"[{i}].input_schema")
        found.append(read_function({**tool, "parameters": schema}, f"[{i}]"))
    return unique_names(found)


_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}


def _tool_choice(value: Any) -> Json:
    kind = check_object(value, "").get("type")
    if kind not in _CHOICES:
        raise invalid(f"must be one of {', '.join(_CHOICES)}", ".type")
    choice: str | Json = _CHOICES[kind]
    if kind == "tool":
        choice = named_choice(check_name(value.get("name"), ".name"))
    single = value.get("disable_parallel_tool_use") or False
    if not isinstance(single, bool):
        raise invalid("must be true or false", ".disable_parallel_tool_use")
    return {"tool_choice": choice, "parallel_tool_calls": not single}


def _thinking(value: Any) -> bool:
    kind = check_object(value, "").get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid("must be 'enabled', 'adaptive' or 'disabled'", ".type")
    return kind != "disabled"


def _output_config(value: Any) -> Json:
    """Fields of a chat."""
    effort, form = check_object(value, "").get("effort"), value.get("format")
    if effort not in (None, "low", "medium", "high", "xhigh", "max"):
        raise invalid("must be 'low', 'medium', 'high', 'xhigh' or 'max'", ".effort")
    if form is None:
        return {"reasoning_effort": effort}
    if check_object(form, ".format").get("type") != "json_schema":
        raise invalid("must be 'json_schema'", ".format.type")
    schema = {"name": "output", "schema": check_object(form.get("schema"), ".format.schema")}
    return {"reasoning_effort": effort, "response_format": {"type": "json_schema", "json_schema": schema}}


def _blocks(*kinds: Json) -> Json:
    return {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": MAX_PARTS, "items": {"anyOf": [*kinds]}}]}


def _block(kind: str, **fields: Json) -> Json:
    required = [name for name, schema in fields.items() if not schema.pop("optional", False)]
    return {"type": "object", "properties": {"type": {"const": kind}, **fields}, "required": ["type", *required]}


_ID: Json = {"type": "string", "minLength": 1, "maxLength": 256}
_TEXT = _block("text", text={"type": "string"})
_RESULT = _block("tool_result", tool_use_id=_ID, content={**_blocks(_TEXT), "optional": True})
_USE = _block(
    "tool_use", id=_ID, name={"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}, input={"type": "object"}
)
_THOUGHT = _block("thinking", thinking={"type": "string"})
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": _blocks(_TEXT, _RESULT, _USE, _THOUGHT),
    },
    "required": ["role", "content"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
        "description": {"type": "string"},
        "input_schema": {"type": "object"},
    },
    "required": ["name", "input_schema"],
}
Messages = Annotated[
    list[Json],
    PlainValidator(_messages),
    WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGE}),
]
System = Annotated[str, PlainValidator(_system), WithJsonSchema(_blocks(_TEXT))]
Tools = Annotated[
    list[Json], PlainValidator(_tools), WithJsonSchema({"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL})
]


def _typed(*kinds: str, **fields: Json) -> Json:
    return {"type": "object", "properties": {"type": {"enum": [*kinds]}, **fields}, "required": ["type"]}


ToolChoice = Annotated[
    Json,
    PlainValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                _typed("auto", "none", "any", disable_parallel_tool_use={"type": "boolean"}),
                {
                    **_typed("tool", name={"type": "string"}, disable_parallel_tool_use={"type": "boolean"}),
                    "required": ["type", "name"],
                    "description": "The name must be one of `tools`.",
                },
            ]
        }
    ),
]
Thinking = Annotated[bool, PlainValidator(_thinking), WithJsonSchema(_typed("enabled", "adaptive", "disabled"))]
OutputConfig = Annotated[
    Json,
    PlainValidator(_output_config),
    WithJsonSchema({"type": "object", "properties": {"effort": {"enum": ["low", "medium", "high", "xhigh", "max"]}}}),
]


class CountBody(Body):
    """Of /v1/messages/count_tokens."""

    known = tolerance.MESSAGES

    model: str | None = None
    messages: Messages
    system: System | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="Turns thinking on or off; a budget is not kept to.")
    output_config: OutputConfig | None = None

    def chat(self, **fields: Any) -> ChatBody:
        """The chat that is meant."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        merged = [*system, *self.messages]
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking, "thinking": self.thinking}
        return ChatBody.model_validate(
            {
                "model": self.model,
                "messages": merged,
                "tools": self.tools,
                **(self.output_config or {}),
                **(self.tool_choice or {}),
                **fields,
            }
        )


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stream: bool = False
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Count | None = None
    stop_sequences: Stop | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def chat(self, **fields: Any) -> ChatBody:
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            # So it is known which of them has ended the answer.
            "include_stop_str_in_output": bool(self.stop_sequences),
        }
        return super().chat(**given, **fields)
