"""The parser of one output: its thought, then its answer with tool calls in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxspec.grammar.thought import HarmonyThoughts, ReasoningFormat, ThinkTags
from serve.parsers.arguments import Schemas
from serve.parsers.events import Event, Sink, new_call_id
from serve.parsers.formats import ToolFormat
from serve.parsers.grammar import CallGrammar, Frame
from serve.parsers.harmony import ENDS, STARTS, TOKENS, parse_harmony
from serve.parsers.source import Parsing, Source, attempt


@dataclass(frozen=True)
class Harmony:
    """gpt-oss's messages to functions."""

    tokens: tuple[str, ...] = TOKENS

    def frame(self, grammar: CallGrammar) -> Frame:
        """A message begins after a thought's end; the last call's end also ends the output, and is left to the model."""
        tag, text = grammar.tag, grammar.text
        start = f"{tag('<|start|>')} {text('assistant')}"
        final = f"{tag('<|channel|>')} {text('final')} {tag('<|message|>')}"
        return Frame(f"({start})?", f"{tag('<|call|>')} {start}", instead=f"({start})? {final}")

    def write_call(self, grammar: CallGrammar, name: str, parameters: Mapping[str, Any]) -> str:
        tag, text = grammar.tag, grammar.text
        to = text(f"commentary to=functions.{name} ")
        json_follows = f"{tag('<|constrain|>')} {text('json')} {tag('<|message|>')}"
        return f"{tag('<|channel|>')} {to} {json_follows} {grammar.value(parameters)}"

    def watch(self, grammar: CallGrammar, functions: Schemas) -> str:
        """Of a message's header: a text may say what it likes of functions."""
        tag, text = grammar.tag, grammar.text
        space, as_json = f"{text(' ')}?", f"{tag('<|constrain|>')} {text('json')}"
        kind = f"({space} {tag('<|channel|>')} {text('commentary')})? ({space} {as_json} | {text(' json')})? {space}"
        calls = [f"{text(name)} {kind} {tag('<|message|>')} {grammar.value(each)}" for name, each in functions.items()]
        others = grammar.others("<|message|>")
        before = f"(ANY_TEXT {others})*" if others else ""
        call = grammar.either([f"{before} {grammar.free('to=functions.')} {grammar.either(calls)}"])
        end = grammar.either(map(tag, ENDS))
        header = grammar.either([f"{before} {grammar.free('<|message|>')}", f"{call} {end}"])
        return grammar.watched(
            [(each, header) for each in STARTS], last=[f"{grammar.free(each)} {call}" for each in STARTS]
        )


@dataclass(frozen=True)
class OutputFormat:
    """How an output is to be read.

    Attributes:
        reasoning: None: a thought is part of the answer.
        tools: None: a call is a text.
        schemas: of the tools that may be called.
        parallel: more than one call counts.
    """

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | Harmony | None = None
    schemas: Schemas = field(default_factory=dict)
    parallel: bool = True

    @property
    def tokens(self) -> frozenset[str]:
        """Special tokens that the text must have."""
        return frozenset(tag for part in (self.reasoning, self.tools) if part for tag in part.tokens)

    @property
    def calls(self) -> ToolFormat | Harmony | None:
        """The format in which calls are read: messages have their own."""
        return Harmony() if self.tools and isinstance(self.reasoning, HarmonyThoughts) else self.tools

    @property
    def calls_end_thoughts(self) -> bool:
        """A call may come inside a thought, which it ends."""
        return self.calls is not None and (isinstance(self.calls, Harmony) or self.calls.ends_reasoning)


class OutputParser:
    """Fed with the text of one output in pieces; says what is in it.

    Args:
        prompt_end: the last characters of the prompt.

    Attributes:
        reasoning_end: how many characters of the text had been read when the thought ended.
    """

    def __init__(self, form: OutputFormat, prompt_end: str = "", make_id: Callable[[], str] = new_call_id):
        self.reasoning_end = 0
        self._form = form
        self._source = Source()
        self._sink = Sink(parallel=form.parallel, trims=form.tools is not None, make_id=make_id)
        self._reading = self._read(prompt_end)
        self._ended = False

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def feed(self, text: str) -> list[Event]:
        self._source.add(text)
        return self._go_on()

    def end(self, *, cut: bool = False) -> list[Event]:
        """What was held back.

        Args:
            cut: the output would have gone on.
        """
        self._source.end(cut=cut)
        self._go_on()
        self._sink.end()
        return self._sink.take()

    def _go_on(self) -> list[Event]:
        if not self._ended:
            self._ended = next(self._reading, True) is True
        return [] if self._source.ended else self._sink.take()

    def _read(self, prompt_end: str) -> Parsing[None]:
        form = self._form
        if isinstance(form.reasoning, HarmonyThoughts) or isinstance(form.tools, Harmony):
            self.reasoning_end = yield from parse_harmony(
                self._source, self._sink, tools=form.tools is not None, reasoning=form.reasoning is not None
            )
            return
        tag = None
        if form.reasoning is not None:
            tag = yield from self._thought(form.reasoning, inside=form.reasoning.begins_inside(prompt_end))
        yield from self._answer(form.tools, tag)

    def _thought(self, tags: ThinkTags, *, inside: bool) -> Parsing[str | None]:
        """Returns the tag of a call that has ended it."""
        source, form = self._source, self._form
        opened = yield from attempt(source, _opening(source, tags.open))
        if opened is None and not inside:
            return None
        ends = (
            form.tools.opens if form.tools and not isinstance(form.tools, Harmony) and form.calls_end_thoughts else ()
        )
        tag = yield from source.until(self._sink.reasoning, tags.close, *ends)
        self.reasoning_end = source.consumed
        self._sink.end_of_reasoning()
        return tag if tag in ends else None

    def _answer(self, tools: ToolFormat | None, tag: str | None) -> Parsing[None]:
        source, sink, schemas = self._source, self._sink, self._form.schemas
        if tools and tools.bare and tag is None:
            yield from tools.calls(source, sink, "", schemas)
        while True:
            tag = tag or (yield from source.until(sink.content, *(tools.opens if tools else ())))
            if tag is None or tools is None:
                return
            if not (yield from tools.calls(source, sink, tag, schemas)):
                sink.content(tag)
            tag = None


def _opening(source: Source, tag: str) -> Parsing[str | None]:
    yield from source.spaces()
    return (yield from source.literal(tag))
