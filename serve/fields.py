"""Types of fields whose values are lists, or one of several things.

pydantic reports an error for each wrong element of a list and for each branch of a union. These report the first wrong
element, by its index, and one cause: a list of a million wrong elements costs what one costs.
"""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from jaxspec.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_STRING_LENGTH, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

MAX_PROMPTS = 256
MAX_ID = 2**31 - 1
INT64 = (-(2**63), 2**63 - 1)

# Other threads run between two slices of a long list.
_SLICE = 2**14
# An object's keys are strings. The length bounds the number that they are read as.
_TOKEN_ID = re.compile(r"[0-9]{1,9}", re.ASCII)
_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MAX_ID}
_IDS_SCHEMA = {"type": "array", "items": _ID_SCHEMA, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}


def invalid(text: str, at: str = "") -> PydanticCustomError:
    """An error at `at` inside the value that is being checked: `[3]`, `.name`."""
    # The text goes through as a value, not as a template: it may hold braces.
    return PydanticCustomError("invalid_value", "{text}", {"text": text, "at": at})


def check_ids(ids: Sequence[Any], at: str = "", least: int = 0, most: int = MAX_ID) -> None:
    """Raises at the first element that is no integer in the range."""
    for start in range(0, len(ids), _SLICE):
        part = ids[start : start + _SLICE]
        if set(map(type, part)) == {int} and min(part) >= least and max(part) <= most:
            continue
        wrong = next(i for i, each in enumerate(part) if type(each) is not int or not least <= each <= most)
        raise invalid(f"must be an integer from {least} to {most}", f"{at}[{start + wrong}]")


def _check_text(value: Any, at: str) -> None:
    if not isinstance(value, str):
        raise invalid("must be a text, as the first of the list is", at)
    if not value:
        raise invalid("must not be empty", at)


def _check_id_list(value: Any, at: str) -> None:
    if not isinstance(value, list):
        raise invalid("must be a list of token ids, as the first of the list is", at)
    if not value:
        raise invalid("must not be empty", at)
    check_ids(value, at)


def _prompt(value: Any) -> str | list[str] | list[int] | list[list[int]]:
    if not isinstance(value, str | list):
        raise invalid("must be a text, a list of texts, a list of token ids, or a list of lists of token ids")
    if not value:
        raise invalid("must not be empty")
    if isinstance(value, str):
        return value
    if type(value[0]) is int:
        check_ids(value)
        return value
    if len(value) > MAX_PROMPTS:
        raise invalid(f"has {len(value)} prompts, and at most {MAX_PROMPTS} are accepted in one call")
    checks: dict[type, Callable[[Any, str], None]] = {str: _check_text, list: _check_id_list}
    check = checks.get(type(value[0]))
    if check is None:
        raise invalid("must be a text, a token id, or a list of token ids", "[0]")
    for i, each in enumerate(value):
        check(each, f"[{i}]")
    return value


def _tokens(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise invalid("must be a list of token ids")
    check_ids(value, "", *INT64)
    return value


def _stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise invalid("must be a text or a list of texts")
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid(f"at most {MAX_STOP_STRINGS} strings are accepted")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_STRING_LENGTH:
            at = f"[{i}]" if isinstance(value, list) else ""
            raise invalid(f"must be a text of 1 to {MAX_STOP_STRING_LENGTH} characters", at)
    return stops


def _stop_token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"must be a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    check_ids(value)
    return value


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise invalid(f"must be an object of at most {MAX_LOGIT_BIAS} token ids and their values")
    for name, bias in value.items():
        if not _TOKEN_ID.fullmatch(name):
            raise invalid("must have token ids as keys")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise invalid("must be a number from -100 to 100", f"[{name}]")
    return {int(name): bias for name, bias in value.items()}


Prompt = Annotated[
    Any,
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
_INT64_SCHEMA = {"type": "integer", "minimum": INT64[0], "maximum": INT64[1]}
Tokens = Annotated[list[int], PlainValidator(_tokens), WithJsonSchema({"type": "array", "items": _INT64_SCHEMA})]
_STOP_SCHEMA = {**_TEXT_SCHEMA, "maxLength": MAX_STOP_STRING_LENGTH}
Stop = Annotated[
    list[str],
    PlainValidator(_stop),
    WithJsonSchema({"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOP_STRINGS}]}),
]
StopTokenIds = Annotated[
    list[int],
    PlainValidator(_stop_token_ids),
    WithJsonSchema({"type": "array", "items": _ID_SCHEMA, "maxItems": MAX_STOP_TOKEN_IDS}),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]
Int64 = Annotated[int, Field(ge=INT64[0], le=INT64[1])]
# What goes to the device is 32 bits wide.
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
