"""Random JSON schemas of the kinds that people send: those of JSONSchemaBench's sets, in small."""

import random
from typing import Any

WORDS = ("name", "size", "kind", "items", "city", "unit", "date", "id", "tags", "note", "price", "open")
PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^(red|green|blue)$", "^[a-z]{1,8}@[a-z]{1,8}\\.com$", "^\\d{4}-\\d{2}$", "^x{0,9}$")
FORMATS = ("date", "ipv4", "ipv6", "uuid")
# These have no end of their own, and RFCs limit their parts' lengths, which llguidance does not.
LONG_FORMATS = ("date-time", "time", "email", "hostname", "uri", "duration")


def random_schema(seed: int) -> dict[str, Any]:
    """An object's schema; its values end by themselves, so that an output does too."""
    rng = random.Random(seed)
    schema = _object(rng, depth=rng.choice((1, 1, 2, 3)))
    if rng.random() < 0.15:
        schema["$defs"] = {"node": _tree(rng)}
        schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
        schema["required"] = [*schema.get("required", []), "tree"]
    return schema


def checkable(schema: Any) -> Any:
    """The schema without the formats of which llguidance allows more than RFCs do (a 61st second, a long local part)."""
    if isinstance(schema, dict):
        loose = schema.get("format") in LONG_FORMATS if isinstance(schema.get("format"), str) else False
        return {key: checkable(value) for key, value in schema.items() if not (loose and key == "format")}
    return [checkable(each) for each in schema] if isinstance(schema, list) else schema


def _tree(rng: random.Random) -> dict[str, Any]:
    """Recursive."""
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": rng.choice((1, 2))}
    return {
        "type": "object",
        "properties": {"value": _scalar(rng), "children": children},
        "required": ["value"],
        "additionalProperties": False,
    }


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}}
    required = [name for name in names if rng.random() < 0.7]
    if required:
        schema["required"] = required
    if rng.random() < 0.97:  # else any key may follow, for as long as the model likes
        schema["additionalProperties"] = False
    elif rng.random() < 0.5:
        schema["additionalProperties"] = {"type": "boolean"}
    if rng.random() < 0.1:
        schema["description"] = "An object."
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth > 0 and rng.random() < 0.5:
        return rng.choice((_object, _array, _union))(rng, depth)
    return _scalar(rng)


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_scalar(rng), _scalar(rng)], "items": False, "minItems": 2}
    least = rng.choice((0, 0, 1, 2))
    return {
        "type": "array", "items": _value(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(1, 3),
    }  # fmt: skip


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.4:
        return {"anyOf": [_value(rng, depth - 1), {"type": "null"}]}
    if kind < 0.7:
        return {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]}
    first = {"type": "object", "properties": {"a": _scalar(rng)}, "required": ["a"]}
    second = {"type": "object", "properties": {"b": _scalar(rng)}, "required": ["b"]}
    if rng.random() < 0.3:
        return {"allOf": [first, second]}
    return {"anyOf": [first | {"additionalProperties": False}, second | {"additionalProperties": False}]}


def _scalar(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(1, 500)},
            {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 40, "multipleOf": rng.choice((2, 3, 5))},
            {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"], "maxLength": 8},
            {"const": rng.choice(("fixed", 7, None, True, [1, "x"], {"k": 1}))},
            {"enum": rng.sample(("red", "green", 3, None, "ünï", 'a"b', "\\"), 3)},
            {"type": "string", "maxLength": rng.randint(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"type": "string", "format": rng.choice(LONG_FORMATS), "maxLength": 40},
        )
    )
