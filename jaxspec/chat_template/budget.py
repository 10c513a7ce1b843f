"""What one rendering of a chat template may cost.

A template is a program from a model folder. Everything in it whose cost is not constant is weighed before it is done,
in units of about one byte of text copied, and the rendering ends where its budget does: time and memory are bounded by
one number, the same on every machine.
"""

from collections.abc import ItemsView, KeysView, ValuesView
from contextvars import ContextVar
from typing import Any

# Units of evaluating one expression or statement, and of making one object.
NODE = 8
OBJECT = 64
# Templates of today's models spend 2000 units a message and 5 a byte.
_BASE = 16 * 2**20
_PER_BYTE = 16
_PER_MESSAGE = 8000
_PER_VALUE = 500

_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)


class TemplateTooExpensiveError(Exception):
    """The template asks for more than its budget."""


class Budget:
    """
    Args:
        num_messages: of the chat that is rendered.
        num_bytes: of all its texts.
        num_values: in its messages, tools and variables, at any depth.
    """

    def __init__(self, num_messages: int, num_bytes: int, num_values: int = 0):
        self._left = _BASE + _PER_MESSAGE * num_messages + _PER_BYTE * num_bytes + _PER_VALUE * num_values

    def spend(self, units: int) -> None:
        """Once exceeded, it stays so: no `except` in a filter can go on."""
        self._left -= units
        if self._left < 0:
            raise TemplateTooExpensiveError


_current: ContextVar[Budget] = ContextVar("budget of the template that is rendered")


def use(budget: Budget) -> Any:
    """Returns a token for `end`."""
    return _current.set(budget)


def end(token: Any) -> None:
    _current.reset(token)


def spend(units: int) -> None:
    _current.get().spend(units)


def text_size(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def extent(value: Any) -> tuple[int, int]:
    """How many values a value of JSON holds, and how many bytes their texts have, names of fields included."""
    count = size = 0
    waiting = [value]
    while waiting:
        each = waiting.pop()
        count += 1
        if isinstance(each, str):
            size += text_size(each)
        elif isinstance(each, dict):
            size += sum(map(text_size, each))
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    return count, size


def weigh(value: Any) -> None:
    """Pays for touching a value and, in a container, its elements, but not what is in these."""
    if isinstance(value, str):
        spend(text_size(value))
    elif isinstance(value, int):
        spend(NODE + value.bit_length() // 8)
    elif isinstance(value, (*_CONTAINERS, range)):
        spend(NODE * (2 + len(value)))
    else:
        spend(NODE)


def weigh_deep(value: Any) -> None:
    """Pays for walking through all that a value holds. A part that is held twice counts twice, as for whoever walks."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        weigh(each)
        if isinstance(each, dict):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, _CONTAINERS):
            waiting += each


def weigh_text(value: Any) -> None:
    """Pays for a value's text, in advance. Escapes may make that of a container longer: who makes it pays again."""
    weigh_deep(value)
    if isinstance(value, _CONTAINERS):
        weigh_deep(value)
