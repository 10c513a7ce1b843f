"""`response_format` and `structured_outputs` of a request."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from jaxspec.errors import InvalidRequestError, shown
from jaxspec.sampling.structured import MAX_CHOICES, StructuredOutputsParams
from serve.fields import invalid

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_FIELDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# vLLM's, where what they ask for is what is done anyway.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (False,),
    "disable_fallback": (True, False),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid("must be an object")
    return {name: each for name, each in value.items() if each is not None}


def _made(**fields: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**fields)
    except InvalidRequestError as error:
        raise invalid(str(error)) from None


def _response_format(value: Any) -> StructuredOutputsParams | None:
    given = _object(value)
    kind = given.pop("type", None)
    if kind not in _FORMATS:
        raise invalid(f"must be one of {', '.join(_FORMATS)}", ".type")
    if kind == "structural_tag":
        return _made(structural_tag=value)
    wanted = given.pop("json_schema", None) if kind == "json_schema" else None
    if given:
        raise invalid("unknown parameter", f".{shown(next(iter(given)))}")
    if kind == "text":
        return None
    if kind == "json_object":
        return _made(json_object=True)
    if not isinstance(wanted, dict):
        raise invalid("must be an object with name and schema", ".json_schema")
    if not isinstance(wanted.get("name"), str) or not wanted["name"]:
        raise invalid("must be a text", ".json_schema.name")
    if wanted.get("strict") not in (None, True, False):
        raise invalid("must be true or false", ".json_schema.strict")
    schema = wanted.get("schema")
    if schema is None:
        return _made(json_object=True)
    if not isinstance(schema, dict):
        raise invalid("must be an object", ".json_schema.schema")
    return _made(json=schema)


def _structured_outputs(value: Any) -> StructuredOutputsParams:
    given = _object(value)
    for name in [name for name in given if name in _HARMLESS]:
        if given.pop(name) not in _HARMLESS[name]:
            raise invalid("not supported", f".{name}")
    if unknown := [name for name in given if name not in _FIELDS]:
        raise invalid("unknown parameter", f".{shown(unknown[0])}")
    types: Mapping[str, tuple[type, ...]] = {
        "json": (str, dict), "structural_tag": (str, dict), "choice": (list,), "json_object": (bool,),
    }  # fmt: skip
    for name, each in given.items():
        if not isinstance(each, types.get(name, (str,))):
            raise invalid(f"must be {_words(types.get(name, (str,)))}", f".{name}")
    return _made(**given)


def _words(types: tuple[type, ...]) -> str:
    words = {str: "a text", dict: "an object", list: "a list of texts", bool: "true or false"}
    return " or ".join(words[each] for each in types)


_SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "schema": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
}

ResponseFormat = Annotated[
    StructuredOutputsParams | None,
    PlainValidator(_response_format),
    WithJsonSchema(
        {
            "oneOf": [
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"enum": ["text", "json_object"]}},
                    "additionalProperties": {"type": "null"},
                },
                {
                    "type": "object",
                    "required": ["type", "json_schema"],
                    "properties": {"type": {"const": "json_schema"}, "json_schema": _SCHEMA},
                    "additionalProperties": {"type": "null"},
                },
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"const": "structural_tag"}},
                    "anyOf": [{"required": ["format"]}, {"required": ["structures", "triggers"]}],
                },
            ]
        }
    ),
]

_STRUCTURED = {
    "json": {"anyOf": [{"type": "string"}, {"type": "object"}]},
    "regex": {"type": "string"},
    "choice": {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "minItems": 1,
        "maxItems": MAX_CHOICES,
    },
    "grammar": {"type": "string"},
    "json_object": {"const": True},
    "structural_tag": {"anyOf": [{"type": "string"}, {"type": "object"}]},
}

StructuredOutputs = Annotated[
    StructuredOutputsParams,
    PlainValidator(_structured_outputs),
    WithJsonSchema(
        {
            "oneOf": [
                {
                    "type": "object",
                    "required": [name],
                    "properties": {name: schema},
                    "additionalProperties": {"type": "null"},
                }
                for name, schema in _STRUCTURED.items()
            ]
        }
    ),
]
