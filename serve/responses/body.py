"""Bodies of /v1/responses, read into a chat."""

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from serve import tolerance
from serve.fields import invalid
from serve.protocol import Body, ChatBody, Effort
from serve.responses.items import read_input
from serve.tool_fields import (
    CHOICES,
    FUNCTION_SCHEMA,
    MAX_TOOLS,
    Json,
    check_list,
    check_name,
    check_object,
    check_text,
    named_choice,
    only,
    read_function,
    unique_names,
)

_MAX_INCLUDED = 16
_NO_MEMORY = "this server keeps no responses: send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"


def _tools(value: Any) -> list[Json]:
    """Functions, as templates are given them. Tools of other kinds run in OpenAI's servers: nobody here could call them."""
    found = []
    for i, tool in enumerate(check_list(value, MAX_TOOLS, "tools")):
        kind = check_text(check_object(tool, f"[{i}]").get("type"), f"[{i}].type")
        if kind == "function":
            found.append(read_function(tool, f"[{i}]"))
    return unique_names(found)


def _refuse(_value: Any) -> None:
    raise invalid(_NO_MEMORY)


def _tool_choice(value: Any) -> str | Json:
    if isinstance(value, dict):
        if value.get("type") != "function":
            raise invalid("must be 'function'", ".type")
        only(value, ("type", "name"), frozenset(), "")
        return {"type": "function", "name": check_name(value.get("name"), ".name")}
    if value not in CHOICES:
        raise invalid("must be 'none', 'auto', 'required' or a function")
    return value


def _include(value: Any) -> list[str]:
    for i, each in enumerate(check_list(value, _MAX_INCLUDED, "names")):
        if check_text(each, f"[{i}]") == _LOGPROBS:
            raise invalid("log-probabilities are in chat completions only", f"[{i}]")
    return value


class ReasoningOptions(Body):
    known = tolerance.Known(ignored=frozenset({"summary", "generate_summary", "context"}))

    effort: Effort | None = None


def _text_format(value: Any) -> Json:
    """`response_format` of a chat: there the schema is an object of its own."""
    given = check_object(value, "")
    if given.get("type") not in ("text", "json_object", "json_schema"):
        raise invalid("must be 'text', 'json_object' or 'json_schema'", ".type")
    only(given, ("type", "name", "schema", "strict", "description"), frozenset(), "")
    if given["type"] != "json_schema":
        return {"type": given["type"]}
    check_object(given.get("schema"), ".schema")
    name = check_text(given.get("name"), ".name")
    return {"type": "json_schema", "json_schema": {"name": name, "schema": given["schema"]}}


_FORMAT_SCHEMA: Json = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "name": {"type": "string", "minLength": 1},
                "schema": {"type": "object"},
                "strict": {"type": "boolean"},
            },
            "required": ["type", "name", "schema"],
        },
    ]
}


class TextOptions(Body):
    known = tolerance.Known({"verbosity": ("medium", "low", "high")})

    format: Annotated[Json, PlainValidator(_text_format), WithJsonSchema(_FORMAT_SCHEMA)] | None = None


_CALL_ID: Json = {"type": "string", "minLength": 1, "maxLength": 256}
_PARTS: Json = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["input_text", "output_text", "text"]},
                    "text": {"type": "string"},
                },
                "required": ["type", "text"],
                "additionalProperties": False,
            },
        },
    ]
}


def _item(kind: str, **fields: Json) -> Json:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **fields},
        "required": [*fields, *(["type"] if kind != "message" else [])],
    }


_ITEMS = [
    _item("message", role={"enum": ["user", "assistant", "system", "developer"]}, content=_PARTS),
    _item(
        "function_call",
        call_id=_CALL_ID,
        name={"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
        arguments={"type": "string"},
    ),
    _item("function_call_output", call_id=_CALL_ID, output=_PARTS),
]
Input = Annotated[
    list[Json],
    PlainValidator(read_input),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"anyOf": _ITEMS}}]}),
]
_FUNCTION = {
    **FUNCTION_SCHEMA,
    "properties": {"type": {"const": "function"}, **FUNCTION_SCHEMA["properties"]},
    "required": ["type", "name"],
}
Tools = Annotated[
    list[Json],
    PlainValidator(_tools),
    WithJsonSchema(
        {
            "type": "array",
            "maxItems": MAX_TOOLS,
            "items": _FUNCTION,
            "description": "Tools of other types than `function` are left out.",
        }
    ),
]
ToolChoice = Annotated[
    str | Json,
    PlainValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": [*CHOICES]},
                {
                    "type": "object",
                    "properties": {"type": {"const": "function"}, "name": _FUNCTION["properties"]["name"]},
                    "required": ["type", "name"],
                },
            ],
            "description": "A function must be one of `tools`.",
        }
    ),
]
NoMemory = Annotated[None, PlainValidator(_refuse), WithJsonSchema({"type": "null"})]
Included = Annotated[
    list[str],
    PlainValidator(_include),
    WithJsonSchema({"type": "array", "maxItems": _MAX_INCLUDED, "items": {"type": "string"}}),
]


class ResponsesBody(Body):
    known = tolerance.RESPONSES

    model: str | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    include: Included | None = None
    previous_response_id: NoMemory = None
    conversation: NoMemory = None

    def chat(self) -> ChatBody:
        """The chat that is meant. What the developer says first is one system message: templates want one at most."""
        rest, choice = list(self.input), self.tool_choice
        first = [self.instructions] if self.instructions else []
        while rest and rest[0]["role"] in ("system", "developer"):
            first.append(rest.pop(0)["content"])
        system = [{"role": "system", "content": "\n\n".join(first)}] if first else []
        return ChatBody.model_validate(
            {
                "messages": [*system, *rest],
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tools": self.tools,
                "tool_choice": named_choice(choice["name"]) if isinstance(choice, dict) else choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
                "response_format": self.text.format if self.text else None,
            }
        )
