"""Random JSON schemas of the kinds that people send: those of JSONSchemaBench's sets, in small."""

import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs

WORDS = ("name", "size", "kind", "items", "city", "unit", "date", "id", "tags", "note", "price", "open")
PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^(red|green|blue)$", "^[a-z]{1,8}@[a-z]{1,8}\\.com$", "^\\d{4}-\\d{2}$", "^x{0,9}$")
FORMATS = ("date", "ipv4", "ipv6", "uuid")
# These have no end of their own. So long, they also keep to what RFCs say of their parts (64 characters before an @, 63
# between two dots), which llguidance does not count: see tests/test_grammar.py.
LONG_FORMATS = ("date-time", "time", "email", "hostname", "uri", "duration")
LONG = 40
DRAFT_7 = "http://json-schema.org/draft-07/schema#"

# What llguidance does not express: the keyword that an error has to name, and a schema with it.
UNSUPPORTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("not", {"not": {"type": "integer"}}),
    ("if", {"if": {"type": "integer"}, "then": {"minimum": 1}}),
    ("then", {"then": {"minimum": 1}}),
    ("else", {"else": {"minimum": 1}}),
    ("oneOf", {"oneOf": [{"type": "number"}, {"type": "integer"}]}),
    ("contains", {"type": "array", "contains": {"type": "null"}}),
    ("minContains", {"type": "array", "minContains": 1}),
    ("maxContains", {"type": "array", "maxContains": 1}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"minProperties": 2}}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("patternProperties", {"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {"type": "boolean"}}}),
    ("patternProperties", {"type": "object", "patternProperties": {"^(?!a)": {}}}),
    ("minProperties", {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}),
    ("maxProperties", {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}),
    ("pattern", {"type": "string", "pattern": "(?=a)b"}),
    ("pattern", {"type": "string", "pattern": "\\bword\\b"}),
    ("format", {"type": "string", "format": "uri-reference"}),
    ("multipleOf", {"type": "number", "multipleOf": 0}),
    ("$ref", {"$ref": "https://example.com/schema.json"}),
    ("$ref", {"$ref": "#/$defs/none"}),
    ("$dynamicRef", {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "null"}}}),
    ("$recursiveRef", {"$recursiveRef": "#"}),
)


def random_schema(seed: int) -> dict[str, Any]:
    """An object's schema; its values end by themselves, so that an output does too. Of draft 2020-12, or of 7."""
    rng = random.Random(seed)
    schema = _object(rng, depth=rng.choice((1, 1, 2, 3)))
    draft_7 = rng.random() < 0.2
    if rng.random() < 0.2:
        place = "definitions" if draft_7 else rng.choice(("$defs", "definitions"))
        anchored = not draft_7 and rng.random() < 0.5
        node = "#node" if anchored else f"#/{place}/node"
        schema[place] = {"node": _tree(rng, node) | ({"$anchor": "node"} if anchored else {})}
        schema["properties"]["tree"] = {"$ref": node}
        schema["required"] = [*schema.get("required", []), "tree"]
        for limit in {"minProperties", "maxProperties"} & schema.keys():
            schema[limit] += 1
    return {"$schema": DRAFT_7} | _as_draft_7(schema) if draft_7 else schema


def validator_for(schema: Any) -> Any:
    """An independent validator of all that a schema says, formats included.

    Of dates and times it lets pass what RFC 3339's grammar does and a calendar does not: see `EVERY_YEAR`.
    """
    return jsonschema_rs.validator_for(schema, validate_formats=True, formats=FORMATS_OF_ANY_CALENDAR)


# llguidance's dates and times know neither which years have a 29th of February nor which minutes have a 61st second.
EVERY_YEAR = ((re.compile("-02-29"), "-02-28"), (re.compile("(:[0-9]{2}):60"), r"\1:59"))


def _of_any_calendar(name: str) -> Callable[[str], bool]:
    strict = jsonschema_rs.validator_for({"format": name}, validate_formats=True)

    def check(value: str) -> bool:
        for odd, usual in EVERY_YEAR:
            value = odd.sub(usual, value, count=1)
        return strict.is_valid(value)

    return check


FORMATS_OF_ANY_CALENDAR = {name: _of_any_calendar(name) for name in ("date", "time", "date-time")}


def _as_draft_7(schema: Any) -> Any:
    """The same schema, with positions of arrays as draft 7 writes them."""
    if isinstance(schema, list):
        return [_as_draft_7(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {"prefixItems": "items", "items": "additionalItems"} if "prefixItems" in schema else {}
    return {renamed.get(key, key): _as_draft_7(value) for key, value in schema.items()}


def _tree(rng: random.Random, node: str) -> dict[str, Any]:
    """Recursive: `node` refers to it."""
    children = {"type": "array", "items": {"$ref": node}, "maxItems": rng.choice((1, 2))}
    return {
        "type": "object",
        "properties": {"value": _scalar(rng), "children": children},
        "required": ["value"],
        "additionalProperties": False,
    }


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.15:
        return _counted(rng, depth)
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


def _counted(rng: random.Random, depth: int) -> dict[str, Any]:
    """With properties of other names, and limits of how many there are.

    llguidance knows such limits only where all that are named are required. It also lets a name come twice, which is one
    property to a validator; so no more than one other is asked for.
    """
    names = rng.sample(WORDS, rng.randint(0, 2))
    schema: dict[str, Any] = {
        "type": "object", "properties": {name: _value(rng, depth - 1) for name in names}, "required": names,
        "minProperties": len(names) + rng.choice((0, 1)), "maxProperties": len(names) + rng.choice((1, 2)),
    }  # fmt: skip
    if rng.random() < 0.3:
        return schema | {"additionalProperties": _scalar(rng)}
    others = {"^x_[a-z]{1,3}$": _scalar(rng)} | ({"^[0-9]{1,4}$": _scalar(rng)} if rng.random() < 0.5 else {})
    return schema | {"patternProperties": others, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth > 0 and rng.random() < 0.5:
        return rng.choice((_object, _array, _union))(rng, depth)
    return _scalar(rng)


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.2:
        rest = rng.choice(({"items": False}, {"items": _scalar(rng), "maxItems": 3}))
        return {"type": "array", "prefixItems": [_scalar(rng), _scalar(rng)], "minItems": rng.choice((1, 2))} | rest
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
            {"type": "string", "format": rng.choice(LONG_FORMATS), "maxLength": LONG},
        )
    )
