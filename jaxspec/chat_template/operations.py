"""What a chat template may do with values, and what that costs: filters, tests, methods, arithmetic.

Only what is listed is available, so nothing comes in unweighed with a new version of Jinja or Python.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from jaxspec.chat_template.budget import NODE, OBJECT, spend, text_size, weigh, weigh_deep, weigh_text

# Numbers of more bits are nothing that a chat needs, and slow.
_MAX_BITS = 4096
_MAX_INDENT = 16
_MAX_FORMAT = 64
# Of what a template says when it rejects a chat.
MAX_MESSAGE = 200

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# A width, a precision or a `*` in a printf format makes any text of any value.
_WIDTH = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d{3,}|\d*\.\d{3,}|[\d.]*\*)")
_DATE_FORMAT = re.compile(r"([^%]|%-?[A-Za-z%])*")


def _weigh_number(value: Any) -> None:
    """Pays for what has as many parts as a number says."""
    if isinstance(value, int):
        spend(OBJECT * max(value, 0))
    else:
        weigh_text(value)


# Methods


def _pieces(text: str, separator: Any, most: Any = -1) -> None:
    """Pays for splitting a text."""
    count = text.count(separator) if separator else len(text) // 2
    if isinstance(most, int) and most >= 0:
        count = min(count, most)
    spend(text_size(text) + OBJECT * (count + 1))


def _split(text: str, sep: Any = None, maxsplit: Any = -1) -> None:
    _pieces(text, sep, maxsplit)


def _splitlines(text: str, keepends: Any = False) -> None:  # noqa: ARG001 - the signature of the method
    spend(text_size(text) + OBJECT * (1 + sum(map(text.count, _LINE_ENDS))))


def _weigh_replacing(text: str, old: Any, new: Any, count: Any = -1) -> None:
    hits = text.count(old) if old else len(text) + 1
    if isinstance(count, int) and count >= 0:
        hits = min(hits, count)
    spend(2 * text_size(text) + hits * (NODE + text_size(new)))


def _join(text: str, values: Any) -> None:
    weigh_deep(values)
    spend((OBJECT + text_size(text)) * len(values))


def _linear(text: str, *arguments: Any) -> None:
    spend(NODE + 2 * text_size(text))
    for each in arguments:
        weigh_text(each)


def _padded(text: str, width: Any, *fill: Any) -> None:
    _linear(text, *fill)
    _weigh_number(width)


def _at_an_end(text: str, affix: Any, *_bounds: Any) -> None:  # noqa: ARG001 - the signature of the method
    weigh_deep(affix)


def _constant(_value: Any, *_arguments: Any) -> None:
    spend(NODE)


def _hashed(_value: Any, key: Any, *_arguments: Any) -> None:
    weigh_deep(key)


def _searched(value: Any, *arguments: Any) -> None:
    weigh_deep(value)
    weigh_deep(arguments)


def _copied(value: Any) -> None:
    weigh(value)


_Weigh = Callable[..., None]
_TEXT_METHODS: dict[str, _Weigh] = {
    **dict.fromkeys(("startswith", "endswith", "removeprefix", "removesuffix"), _at_an_end),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("split", "rsplit"), _split),
    **dict.fromkeys(
        ("capitalize", "casefold", "count", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
         "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower", "lstrip",
         "partition", "rfind", "rindex", "rpartition", "rstrip", "strip", "swapcase", "title", "upper"),
        _linear,
    ),
    "splitlines": _splitlines,
    "replace": _weigh_replacing,
    "join": _join,
}  # fmt: skip
_METHODS: dict[type, dict[str, _Weigh]] = {
    str: _TEXT_METHODS,
    list: {"index": _searched, "count": _searched, "copy": _copied},
    tuple: {"index": _searched, "count": _searched},
    dict: {"get": _hashed, "items": _constant, "keys": _constant, "values": _constant, "copy": _copied},
}


def weigh_method(owner: Any, name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Pays for calling a method of a value.

    Raises:
        SecurityError: it is not available.
    """
    weigh_this = _METHODS.get(type(owner), {}).get(name)
    if weigh_this is None:
        raise SecurityError(f"the method {type(owner).__name__}.{name} is not available in chat templates")
    weigh_this(owner, *arguments, **named)


# Arithmetic


def _check_printf(text: str, values: Any) -> None:
    if _WIDTH.search(text):
        raise TemplateRuntimeError("a format with a width of over 99 is not available in chat templates")
    for _ in range(text.count("%") + 1):
        weigh_text(values)
        spend(text_size(text))


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def weigh_operation(operator: str, left: Any, right: Any) -> None:
    """Pays for `left operator right`.

    Raises:
        TemplateRuntimeError: the result is a number or a text that nothing needs.
    """
    weigh(left)
    weigh(right)
    if operator == "%" and isinstance(left, str):
        _check_printf(left, right)
    elif operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
        many, times = (right, left) if isinstance(left, int) else (left, right)
        for_one = text_size(many) if isinstance(many, str) else NODE * len(many) if hasattr(many, "__len__") else NODE
        spend(for_one * max(times, 0) if isinstance(times, int) else NODE)
    elif operator == "-" and not isinstance(left, int | float):
        weigh_deep((left, right))
    elif operator in ("*", "**"):
        bits = _bits(left) * abs(right) if operator == "**" else _bits(left) + _bits(right)
        if isinstance(left, int) and isinstance(right, int) and bits > _MAX_BITS:
            raise TemplateRuntimeError("the template computes too large a number")


# Filters


def _listed(value: Any) -> Any:
    """What a filter makes lazily, all at once, so that it is paid for here."""
    if isinstance(value, str) or hasattr(value, "__len__") or not isinstance(value, Iterable):
        return value
    out = []
    for each in value:
        spend(OBJECT)
        out.append(each)
    return out


def _for_text(value: Any, *arguments: Any, **named: Any) -> None:
    for each in (value, value, *arguments, *named.values()):
        weigh_text(each)


def _for_one(_value: Any, *_arguments: Any, **_named: Any) -> None:
    spend(NODE)


def _for_list(value: Any, *arguments: Any, **named: Any) -> None:
    weigh(value)
    spend(OBJECT * len(value) if hasattr(value, "__len__") else OBJECT)
    for each in (*arguments, *named.values()):
        weigh_text(each)


def _for_ordering(value: Any, *arguments: Any, **named: Any) -> None:
    _for_list(value, *arguments, **named)
    for _ in range(max(len(value).bit_length(), 1) if hasattr(value, "__len__") else 1):
        weigh_deep(value)


def _for_parts(value: Any, *arguments: Any, **named: Any) -> None:
    """As many parts, or elements of a part, as a number says."""
    _for_list(value, *arguments, **named)
    for each in (*arguments, *named.values()):
        _weigh_number(each)


def _for_sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    _for_list(value, attribute)
    if not isinstance(start, int | float):
        raise TemplateRuntimeError("sum is only available for numbers in chat templates")


def _for_replace(value: Any, old: Any, new: Any, count: Any = None) -> None:
    for each in (value, old, new):
        weigh_text(each)
    _weigh_replacing(str(value), str(old), str(new), count)


def _for_join(value: Any, d: Any = "", attribute: Any = None) -> None:
    for each in (value, d, attribute):
        weigh_text(each)
    spend((OBJECT + text_size(str(d))) * (len(value) if hasattr(value, "__len__") else 1))


def _for_indent(value: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:  # noqa: ARG001 - Jinja's
    weigh_text(value)
    weigh_text(width)
    text = str(value)
    spend((1 + text.count("\n")) * (abs(width) if isinstance(width, int) else text_size(str(width))) + text_size(text))


def _for_padding(value: Any, width: Any = 80) -> None:
    weigh_text(value)
    _weigh_number(width)


def _for_printf(value: Any, *values: Any, **named: Any) -> None:
    weigh_text(value)
    _check_printf(str(value), named or values)


def _for_rounding(value: Any, precision: Any = 0, method: Any = "common") -> None:  # noqa: ARG001 - Jinja's
    weigh(value)
    if isinstance(precision, int) and abs(precision) > _MAX_FORMAT:
        raise TemplateRuntimeError("the template rounds to too many digits")


_FILTERS: dict[str, _Weigh] = {
    **dict.fromkeys(
        ("capitalize", "escape", "e", "float", "forceescape", "int", "lower", "string", "title", "trim", "truncate",
         "upper", "wordcount"),
        _for_text,
    ),
    **dict.fromkeys(("abs", "attr", "count", "d", "default", "first", "items", "last", "length"), _for_one),
    **dict.fromkeys(("list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"), _for_list),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _for_ordering),
    **dict.fromkeys(("batch", "slice"), _for_parts),
    "center": _for_padding,
    "format": _for_printf,
    "indent": _for_indent,
    "join": _for_join,
    "replace": _for_replace,
    "round": _for_rounding,
    "sum": _for_sum,
}  # fmt: skip


def _passed(function: Any, context: Context) -> tuple[Any, ...]:
    """What a function of Jinja's wants before its arguments."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    given = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
    return (given[wanted],) if wanted else ()


def _filter(name: str, weigh_this: _Weigh) -> Callable[..., Any]:
    function: Any = FILTERS[name]

    # A filter that wants the context is not called while the template is compiled, before there is a budget.
    @pass_context
    def run(context: Context, value: Any, *arguments: Any, **named: Any) -> Any:
        value = _listed(value)
        arguments = tuple(map(_listed, arguments))
        named = {key: _listed(each) for key, each in named.items()}
        weigh_this(value, *arguments, **named)
        out = _listed(function(*_passed(function, context), value, *arguments, **named))
        weigh(out)
        return str(out) if isinstance(out, str) else out

    return run


def _test(name: str) -> Callable[..., Any]:
    function: Any = TESTS[name]

    @pass_context
    def run(context: Context, value: Any, *arguments: Any) -> Any:
        if arguments or name in ("lower", "upper"):
            weigh_deep((value, arguments))
        return function(*_passed(function, context), value, *arguments)

    return run


@pass_context
def _safe(_context: Context, value: Any) -> Any:
    """Nothing is escaped, so there is nothing to mark."""
    return value


@pass_context
def _tojson(
    _context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: without escapes for HTML."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= _MAX_INDENT):
        raise TemplateRuntimeError(f"tojson is available with an indent of at most {_MAX_INDENT} in chat templates")
    for each in separators or ():
        if len(each) > _MAX_INDENT:
            raise TemplateRuntimeError("tojson is not available with long separators in chat templates")
    weigh_text(value)
    for _ in range(indent or 0):
        weigh_deep(value)
    out = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    weigh(out)
    return out


def filters() -> dict[str, Callable[..., Any]]:
    return {
        **{name: _filter(name, weigh_this) for name, weigh_this in _FILTERS.items()},
        "safe": _safe,
        "tojson": _tojson,
    }


def tests() -> dict[str, Callable[..., Any]]:
    return {name: _test(name) for name in TESTS}


# Globals


class TemplateNamespace(Namespace):
    """Its text says nothing of what it holds, which may be itself."""

    def __repr__(self) -> str:
        return "<namespace>"


class TemplateDict:
    """`dict(...)`"""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        for each in arguments:
            weigh_deep(each)
        return dict(*arguments, **named)


class TemplateRejectionError(TemplateError):
    """The template itself rejects the chat, in words of its own."""


def raise_exception(message: Any) -> None:
    weigh_text(message)
    raise TemplateRejectionError(str(message))


def strftime_now(form: str) -> str:
    if len(form) > _MAX_FORMAT or not _DATE_FORMAT.fullmatch(form):
        raise TemplateRuntimeError("strftime_now is available with plain formats such as '%d %b %Y' only")
    return datetime.now().strftime(form)
