"""What a parser makes of text, and where it puts it."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of a tool. `index` counts the calls of an output."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments, which together are the text of a JSON object if the model wrote one."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class Sink:
    """Takes what a parser has found, in order. White space beside tags belongs to the format and not to the text.

    Args:
        parallel: all calls count; else the first one only, and the others are left out.
        trims: calls may come, so white space at the end of a text waits for what follows.
        make_id: of a call, where the model names none.

    Attributes:
        num_calls: that have begun.
    """

    def __init__(self, *, parallel: bool = True, trims: bool = True, make_id: Callable[[], str] = new_call_id):
        self._parallel = parallel
        self._trims = trims
        self._make_id = make_id
        self._events: list[Event] = []
        self._thought = False
        self._lines = ""  # line ends after a thought
        self._gap = ""  # white space after a text
        self._after_thought = False
        self._after_call = False
        self._empty_arguments = False
        self.num_calls = 0

    def take(self) -> list[Event]:
        """The events since the last call, pieces of one text joined."""
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        if not self._thought:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        if kept:
            self._add(Reasoning(self._lines + kept))
            self._lines = ""
            self._thought = True
        if self._thought:
            self._lines += text[len(kept) :]

    def end_of_reasoning(self) -> None:
        """After the tag that closes a thought: the line ends in front of the answer belong to the tag."""
        self._lines = "\n" if self._thought else ""  # before another thought
        self._after_thought = True

    def content(self, text: str) -> None:
        if self._after_thought:
            text = text.lstrip("\n")
            self._after_thought = not text
        kept = text.rstrip() if self._trims else text
        if kept:
            self._add(Content(self._gap + kept))
            self._gap = ""
            self._after_call = False
        self._gap += text[len(kept) :]

    def call(self, name: str, call_id: str | None = None) -> None:
        self._gap = ""
        self._after_thought = False
        self._after_call = True
        self._empty_arguments = True
        self.num_calls += 1
        if self._counts:
            self._events.append(CallStart(self.num_calls - 1, call_id or self._make_id(), name))

    def arguments(self, text: str) -> None:
        if self._empty_arguments:
            text = text.lstrip()
        if text:
            self._empty_arguments = False
            if self._counts:
                self._add(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """A call without arguments has an empty object."""
        if self._empty_arguments:
            self.arguments("{}")

    def end(self) -> None:
        """White space at the end is part of a text, but not of what follows a call."""
        if self._gap and not self._after_call:
            self._add(Content(self._gap))
        self._gap = ""

    @property
    def _counts(self) -> bool:
        return self._parallel or self.num_calls == 1

    def _add(self, event: Content | Reasoning | CallArguments) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, type(event)) and getattr(last, "index", 0) == getattr(event, "index", 0):
            self._events[-1] = replace(last, text=last.text + event.text)
        else:
            self._events.append(event)
