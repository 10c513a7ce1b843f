"""Types of the fields about tools and templates. As in `serve.fields`, the first wrong place is named, with one cause."""

import re
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from jaxspec.errors import SHOWN_CHARACTERS, shown
from serve.fields import invalid

MAX_TOOLS = 512
MAX_CALLS = 512  # of one message
MAX_VARIABLES = 64
_MAX_ID = 256
TOOL_NAME = r"[A-Za-z0-9_.:/-]{1,128}"
_NAME = re.compile(TOOL_NAME, re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)
# What templates are given by other fields, or by the model.
_TAKEN = frozenset(
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "sep_token",
        "cls_token",
        "mask_token",
    ]
)
# Fields of tools and calls that change nothing here.
_FUNCTION_NOTES = frozenset({"cache_control"})
_CALL_NOTES = frozenset({"index", "provider_specific_fields", "cache_control", "extra_content"})
CHOICES = ("none", "auto", "required")

Json = dict[str, Any]


def check_object(value: Any, at: str) -> Json:
    if not isinstance(value, dict):
        raise invalid("must be an object", at)
    return value


def check_name(value: Any, at: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise invalid("must be a name of 1 to 128 letters, digits and _ - . : /", at)
    return value


def check_text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise invalid("must be a text", at)
    return value


def check_id(value: Any, at: str) -> str:
    if not 0 < len(check_text(value, at)) <= _MAX_ID:
        raise invalid(f"must be a text of 1 to {_MAX_ID} characters", at)
    return value


def check_list(value: Any, most: int, what: str, at: str = "") -> list[Any]:
    if not isinstance(value, list):
        raise invalid("must be a list", at)
    if len(value) > most:
        raise invalid(f"has {len(value)} {what}, and at most {most} are accepted", at)
    return value


def only(value: Json, known: tuple[str, ...], notes: frozenset[str], at: str) -> None:
    """Refuses a field that is not known."""
    for name, each in value.items():
        if name not in known and name not in notes and each is not None:
            raise invalid("unknown parameter", f"{at}.{name[:SHOWN_CHARACTERS]}")


def function_tool(name: str, description: str | None, parameters: Json | None) -> Json:
    """A tool as templates are given it."""
    function: Json = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def read_function(function: Json, at: str) -> Json:
    """A tool of an object with name, description and parameters; where its calls are held to these, it is marked `strict`."""
    name = check_name(function.get("name"), f"{at}.name")
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None:
        check_text(description, f"{at}.description")
    if parameters is not None:
        check_object(parameters, f"{at}.parameters")
    tool = function_tool(name, description, parameters)
    return tool | {"strict": True} if _is_strict(function, at) else tool


def _is_strict(value: Json, at: str) -> bool:
    strict = value.get("strict")
    if strict not in (None, True, False):
        raise invalid("must be true or false", f"{at}.strict")
    return bool(strict)


def without_marks(tools: list[Json]) -> list[Json]:
    """Tools as templates are given them."""
    return [{"type": "function", "function": tool["function"]} for tool in tools]


def unique_names(tools: list[Json]) -> list[Json]:
    seen = set()
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            raise invalid("is the name of an earlier tool too", f"[{i}]")
        seen.add(name)
    return tools


def _tools(value: Any) -> list[Json]:
    found = []
    for i, tool in enumerate(check_list(value, MAX_TOOLS, "tools")):
        check_object(tool, f"[{i}]")
        if tool.get("type") != "function":
            raise invalid("must be 'function'", f"[{i}].type")
        only(tool, ("type", "function", "strict"), _FUNCTION_NOTES, f"[{i}]")
        at = f"[{i}].function"
        function = check_object(tool.get("function"), at)
        only(function, ("name", "description", "parameters", "strict"), _FUNCTION_NOTES, at)
        found.append(read_function(function | {"strict": True} if _is_strict(tool, f"[{i}]") else function, at))
    return unique_names(found)


def named_choice(name: str) -> Json:
    """The choice of one function, in a chat's words."""
    return {"type": "function", "function": {"name": name}}


def _tool_choice(value: Any) -> str | Json:
    if isinstance(value, dict):
        if value.get("type") != "function":
            raise invalid("must be 'function'", ".type")
        only(value, ("type", "function"), frozenset(), "")
        function = check_object(value.get("function"), ".function")
        only(function, ("name",), frozenset(), ".function")
        return named_choice(check_name(function.get("name"), ".function.name"))
    if value not in CHOICES:
        raise invalid("must be 'none', 'auto', 'required' or a function")
    return value


def required_names(choice: str | Json | None, tools: list[Json]) -> list[str] | None:
    """The functions of which one has to be called; None where none has to be.

    Raises:
        PydanticCustomError: there is no such tool.
    """
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if name not in names:
            raise invalid(f"there is no tool {shown(name)}", ".tool_choice")
        return [name]
    if choice != "required":
        return None
    if not names:
        raise invalid("'required' needs tools", ".tool_choice")
    return names


def _tool_calls(value: Any) -> list[Json]:
    """As templates are given them, but with the arguments as the client wrote them."""
    found = []
    for i, call in enumerate(check_list(value, MAX_CALLS, "calls")):
        at = f"[{i}]"
        check_object(call, at)
        if call.get("type", "function") != "function":
            raise invalid("must be 'function'", f"{at}.type")
        only(call, ("type", "id", "function"), _CALL_NOTES, at)
        function = check_object(call.get("function"), f"{at}.function")
        only(function, ("name", "arguments"), _CALL_NOTES, f"{at}.function")
        name = check_name(function.get("name"), f"{at}.function.name")
        arguments = check_text(function.get("arguments"), f"{at}.function.arguments")
        made = {"type": "function", "function": {"name": name, "arguments": arguments}}
        found.append(({"id": check_id(call["id"], f"{at}.id")} if call.get("id") is not None else {}) | made)
    return found


def _variables(value: Any) -> Json:
    if len(check_object(value, "")) > MAX_VARIABLES:
        raise invalid(f"has {len(value)} variables, and at most {MAX_VARIABLES} are accepted")
    for name in value:
        if not _VARIABLE.fullmatch(name):
            raise invalid("must have names of 1 to 64 letters, digits and _ as keys")
        if name in _TAKEN:
            raise invalid("is set by the server or by another field", f".{name}")
    return value


_NAME_SCHEMA = {"type": "string", "pattern": f"^{TOOL_NAME}$"}
_OBJECT = {"type": "object"}
FUNCTION_SCHEMA: Json = {
    "type": "object",
    "properties": {
        "name": _NAME_SCHEMA,
        "description": {"type": "string"},
        "parameters": {"type": "object", "description": "A JSON schema."},
        "strict": {
            "anyOf": [{"type": "boolean"}, {"type": "null"}],
            "description": "Calls are held to the schema; where a call is required they always are.",
        },
    },
    "required": ["name"],
}
_CALL_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "minLength": 1, "maxLength": _MAX_ID},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _NAME_SCHEMA, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
Tools = Annotated[
    list[Json],
    PlainValidator(_tools),
    WithJsonSchema(
        {
            "type": "array",
            "maxItems": MAX_TOOLS,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "function"}, "function": FUNCTION_SCHEMA},
                "required": ["type", "function"],
            },
        }
    ),
]
_NAMED_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": _NAME_SCHEMA}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
ToolChoice = Annotated[
    str | Json,
    PlainValidator(_tool_choice),
    WithJsonSchema(
        {"anyOf": [{"enum": [*CHOICES]}, _NAMED_SCHEMA], "description": "A function must be one of `tools`."}
    ),
]
ToolCalls = Annotated[
    list[Json],
    PlainValidator(_tool_calls),
    WithJsonSchema({"type": "array", "maxItems": MAX_CALLS, "items": _CALL_SCHEMA}),
]
Variables = Annotated[
    Json,
    PlainValidator(_variables),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_VARIABLES,
            "propertyNames": {
                "pattern": "^[A-Za-z][A-Za-z0-9_]{0,63}$",
                "not": {"enum": sorted(_TAKEN)},
            },
        }
    ),
]
