"""Typed reading of a model folder's JSON: each key is checked before its value is used.

Whoever wrote the file may be hostile: a number may be 10**30 or NaN, a list may stand where a number belongs. A value that
is not usable is a `ModelFormatError` of one line that names the key, the file and what the value must be. `null` means
that the key is absent, as in Hugging Face's own files.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import ModelFormatError, shown

CONFIG = "config.json"


def wrong(key: str, must: str, value: object, where: str = CONFIG) -> ModelFormatError:
    return ModelFormatError(f"{key} in {where} must be {must}, got {shown(value)}")


def with_defaults(values: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The object with values for keys that are absent."""
    return dict(values) | {key: value for key, value in defaults.items() if values.get(key) is None}


def require(values: Mapping[str, Any], *keys: str, where: str = CONFIG) -> None:
    """Raises `ModelFormatError` where one of the keys is absent or null; the text names all that are."""
    missing = [key for key in keys if values.get(key) is None]
    if missing:
        raise ModelFormatError(f"{where} lacks {', '.join(missing)}")


def whole(values: Mapping[str, Any], key: str, least: int, most: int, *, where: str = CONFIG) -> int:
    """A whole number that must be there. 64.0 is one too: some writers compute sizes in floating point."""
    require(values, key, where=where)
    return check_whole(values[key], key, least, most, where=where)


def whole_or(values: Mapping[str, Any], key: str, default: int, least: int, most: int, *, where: str = CONFIG) -> int:
    """A whole number, or `default` where the key is absent."""
    return default if values.get(key) is None else whole(values, key, least, most, where=where)


def check_whole(value: object, key: str, least: int, most: int, *, where: str = CONFIG) -> int:
    """`value` as an int from `least` to `most`."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= most:  # bool is a subclass of int
        raise wrong(key, f"a whole number from {least} to {most}", value, where)
    return value


def real(values: Mapping[str, Any], key: str, least: float, most: float, *, where: str = CONFIG) -> float:
    """A finite number that must be there."""
    require(values, key, where=where)
    value = values[key]
    # Compared before it is converted: an int of many digits has no float.
    if type(value) not in (int, float) or not least <= value <= most or not math.isfinite(value):
        raise wrong(key, f"a number from {least:g} to {most:g}", value, where)
    return float(value)


def real_or(
    values: Mapping[str, Any], key: str, default: float, least: float, most: float, *, where: str = CONFIG
) -> float:
    """A finite number, or `default` where the key is absent."""
    return default if values.get(key) is None else real(values, key, least, most, where=where)


def real_or_none(
    values: Mapping[str, Any], key: str, least: float, most: float, *, where: str = CONFIG
) -> float | None:
    return None if values.get(key) is None else real(values, key, least, most, where=where)


def flag(values: Mapping[str, Any], key: str, *, default: bool = False, where: str = CONFIG) -> bool:
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(key, "true or false", value, where)
    return value


def text_or(values: Mapping[str, Any], key: str, default: str, *, where: str = CONFIG) -> str:
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong(key, "a text", value, where)
    return value


def section(values: Mapping[str, Any], key: str, *, where: str = CONFIG) -> dict[str, Any]:
    """An object inside the object; {} where the key is absent."""
    value = values.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(key, "an object", value, where)
    return value


def whole_list(value: object, key: str, *, items: int, least: int, most: int, where: str = CONFIG) -> tuple[int, ...]:
    """At most `items` whole numbers."""
    if not isinstance(value, list) or len(value) > items:
        raise wrong(key, f"a list of at most {items} whole numbers", value, where)
    return tuple(check_whole(item, f"{key}[{i}]", least, most, where=where) for i, item in enumerate(value))


def real_list(
    values: Mapping[str, Any], key: str, items: int, least: float, most: float, *, where: str = CONFIG
) -> tuple[float, ...]:
    """Exactly `items` finite numbers, which must be there."""
    require(values, key, where=where)
    value = values[key]
    if not isinstance(value, list) or len(value) != items:
        raise wrong(key, f"a list of {items} numbers", value, where)
    return tuple(real({key: item}, key, least, most, where=where) for item in value)


def text_list(values: Mapping[str, Any], key: str, *, where: str = CONFIG) -> Sequence[str]:
    """Texts; none where the key is absent."""
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise wrong(key, "a list of texts", value, where)
    return value
