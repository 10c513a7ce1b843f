"""Tool calls and reasoning of every family: read alike however the text is cut, and never lost."""

import itertools
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.grammar.thought import REASONING_NAMES, REASONING_PARSERS, ThinkTags, reasoning_parser
from serve.parsers.arguments import as_json, types_of
from serve.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from serve.parsers.output import OutputFormat, OutputParser
from serve.parsers.registry import TOOL_NAMES, TOOL_PARSERS, tool_parser
from tests.serve.parsers.cases import CASES, PLAIN, TOOLS, Case

TAGS = sorted({tag for form in TOOL_PARSERS.values() for tag in form.tokens} | {"<think>", "</think>"})


def form_of(parser: str, reasoning: str | None = None, **options: bool) -> OutputFormat:
    thoughts = REASONING_PARSERS[reasoning] if reasoning else None
    return OutputFormat(thoughts, TOOL_PARSERS[parser], TOOLS, **options)


def read(form: OutputFormat, pieces: list[str], prompt_end: str = "", *, cut: bool = False) -> list[Event]:
    ids = itertools.count()
    parser = OutputParser(form, prompt_end, make_id=lambda: f"call_{next(ids)}")
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.end(cut=cut)])


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case Content(), Content():
                out[-1] = Content(last.text + event.text)
            case Reasoning(), Reasoning():
                out[-1] = Reasoning(last.text + event.text)
            case CallArguments(), CallArguments():
                assert last.index == event.index
                out[-1] = CallArguments(last.index, last.text + event.text)
            case _:
                out.append(event)
    return out


def text_of(events: list[Event], kind: type) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    starts = [event for event in events if isinstance(event, CallStart)]
    return [
        (s.name, "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == s.index)) for s in starts
    ]


def cuts(text: str, seed: int, most: int = 6) -> list[str]:
    random_cuts = random.Random(seed)
    pieces = []
    while text:
        size = random_cuts.randint(1, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def names(case: Case) -> str:
    return f"{case.parser}-{case.text[:24]}"


@pytest.mark.parametrize("case", CASES, ids=names)
def test_what_a_family_writes_is_read(case):
    events = read(form_of(case.parser, case.reasoning_parser), [case.text], case.prompt_end)
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == case.calls
    assert text_of(events, Content) == case.content
    assert text_of(events, Reasoning) == case.reasoning
    starts = [event for event in events if isinstance(event, CallStart)]
    assert [start.index for start in starts] == list(range(len(case.calls)))
    assert [start.id for start in starts] == (case.ids or [f"call_{i}" for i in range(len(case.calls))])


@pytest.mark.parametrize("case", CASES, ids=names)
def test_tool_deltas_concatenate_at_every_split(case):
    form = form_of(case.parser, case.reasoning_parser)
    whole = read(form, [case.text], case.prompt_end)
    for i in range(len(case.text) + 1):
        assert read(form, [case.text[:i], case.text[i:]], case.prompt_end) == whole
    assert read(form, list(case.text), case.prompt_end) == whole
    for seed in range(10):
        assert read(form, cuts(case.text, seed, 30), case.prompt_end) == whole


@pytest.mark.parametrize(("parser", "text"), PLAIN)
def test_what_is_no_call_stays_a_text(parser, text):
    for pieces in ([text], list(text), cuts(text, 1)):
        assert read(form_of(parser), pieces) == [Content(text)]


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data())
def test_any_text_is_read_alike_however_it_is_cut(parser, data):
    """Tags, pieces of calls and words in any order: no exception, one reading, and every word comes out."""
    parts = [case.text[i : i + 12] for case in CASES if case.parser == parser for i in range(0, len(case.text), 12)]
    piece = st.sampled_from([*parts, *TAGS, "word", " ", "\n", "{", '"', "}", "\\"])
    text = "".join(data.draw(st.lists(piece, max_size=25)))
    thinks = data.draw(st.sampled_from([None, "qwen3", "deepseek_r1", "gpt-oss"]))
    cut = data.draw(st.booleans())
    form = form_of(parser, thinks)
    whole = read(form, [text], cut=cut)
    assert read(form, cuts(text, data.draw(st.integers(0, 99))), cut=cut) == whole
    assert read(form, list(text), cut=cut) == whole
    written = json.dumps([vars(event) for event in whole], ensure_ascii=False)
    assert written.count("word") == text.count("word")


@pytest.mark.parametrize("case", CASES, ids=names)
def test_arguments_of_a_cut_output_are_not_closed(case):
    """A client must not run a call whose end is missing: its arguments are no JSON."""
    form = form_of(case.parser, case.reasoning_parser)
    for i in range(len(case.text)):
        events = read(form, [case.text[:i]], case.prompt_end, cut=True)
        found = calls_of(events)
        for (name, arguments), expected in zip(found, case.calls, strict=False):
            assert name == expected[0]
            try:
                assert json.loads(arguments) == expected[1]
            except ValueError:
                assert found[-1] == (name, arguments)


def test_only_the_first_call_counts_where_calls_are_not_parallel():
    case = next(case for case in CASES if case.parser == "hermes" and len(case.calls) == 2)
    events = read(form_of("hermes", parallel=False), [case.text])
    assert [name for name, _ in calls_of(events)] == [case.calls[0][0]]
    assert text_of(events, Content) == case.content


THOUGHTS = [
    ("<think>\na\n\nb\n</think>\n\nyes", "", "a\n\nb", "yes"),
    ("a</think>yes", "<｜Assistant｜><think>\n", "a", "yes"),
    ("yes</think>", "<｜Assistant｜></think>", "", "yes</think>"),
    ("yes", "<think>\n\n</think>\n\n", "", "yes"),
    ("  yes <think>no</think>", "", "", "  yes <think>no</think>"),
    ("<think>\n\n</think>\n\nyes\n", "", "", "yes\n"),
    ("<think>never closed\n", "", "never closed", ""),
    ("<thin", "", "", "<thin"),
    ("", "", "", ""),
]


@pytest.mark.parametrize(("text", "prompt_end", "thought", "answer"), THOUGHTS)
def test_thoughts(text, prompt_end, thought, answer):
    form = OutputFormat(ThinkTags())
    for pieces in ([text], list(text), *(cuts(text, seed) for seed in range(5))):
        events = read(form, pieces, prompt_end)
        assert text_of(events, Reasoning) == thought
        assert text_of(events, Content) == answer


def test_a_model_that_always_thinks_needs_no_first_tag():
    form = OutputFormat(REASONING_PARSERS["deepseek_r1"])
    assert read(form, ["a\n</think>\n\nb"]) == [Reasoning("a"), Content("b")]
    assert read(form, ["b"], "</think>") == [Content("b")]


def test_text_goes_out_as_it_comes():
    parser = OutputParser(form_of("qwen3_coder", "qwen3"))
    assert parser.feed("<think>a") == [Reasoning("a")]
    assert parser.feed("b</think>\n\nc <") == [Reasoning("b"), Content("c")]
    assert parser.feed("d") == [Content(" <d")]
    assert parser.feed("<tool_call>\n<function=write_file>\n<parameter=text>\nlong ")[1:] == [
        CallArguments(0, '{"text": "long ')
    ]
    assert parser.feed('"text"') == [CallArguments(0, '\\"text\\"')]
    assert parser.reasoning_end == len("<think>ab</think>")


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.usefixtures("no_garbage_collection")
def test_reading_is_linear(parser):
    """Tags that begin nothing, many times: ten times the text takes about ten times as long."""
    form = TOOL_PARSERS[parser]
    tags = getattr(form, "opens", form.tokens)
    seconds = []
    for count in (300, 3000):
        text = "".join(f'{tags[i % len(tags)]} {{"name":"a{i}' for i in range(count))
        start = time.process_time()
        events = read(form_of(parser), cuts(text, 0, 40))
        seconds.append(time.process_time() - start)
        assert events
    assert seconds[1] < 40 * max(seconds[0], 0.01)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {"type": ["string", "integer"]}, "5"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("null", {"type": "string"}, "null"),
        ("True", {"type": "boolean"}, True),
        (" [1, 2] ", {"type": "array"}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ('{"a": 1}', {"anyOf": [{"type": "string"}, {"type": "object"}]}, {"a": 1}),
        ('{"a": 1}', {"$ref": "#/$defs/a"}, {"a": 1}),
        ("x", {"enum": ["x", "y"]}, "x"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1" * 5000, {"type": "integer"}, "1" * 5000),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("12", {}, 12),
        ("twelve", {}, "twelve"),
    ],
)
def test_values_have_the_type_of_the_schema(text, schema, value):
    root = {"$defs": {"a": {"type": "object"}}}
    assert json.loads(as_json(text, types_of(schema, root))) == value


def test_schemas_that_refer_to_themselves_end():
    root = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}}
    assert types_of({"$ref": "#/$defs/a"}, root) == {"string"}


SIGNS = [
    ("deepseek_v3", "'<｜tool▁call▁begin｜>' + t + '<｜tool▁sep｜>' + n + '\\n```json\\n'"),
    ("deepseek_v31", "'<｜tool▁call▁begin｜>' + n + '<｜tool▁sep｜>'"),
    ("deepseek_v32", "<｜DSML｜function_calls>"),
    ("kimi_k2", "<|tool_call_begin|>"),
    ("hermes", '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=example_function_name>"),
    ("llama3_json", '<|start_header_id|> with "name" and its "parameters"'),
    ("minimax_m2", "<minimax:tool_call>"),
    ("glm45", "<tool_call>{name}\n<arg_key>"),
    ("gpt-oss", "<|start|>assistant<|channel|>final<|message|>"),
]


@pytest.mark.parametrize(("name", "template"), SIGNS)
def test_a_model_chooses_its_parser(name, template):
    assert tool_parser(None, template) is TOOL_PARSERS[name]
    assert tool_parser("none", template) is None
    assert tool_parser("hermes", template) is TOOL_PARSERS["hermes"]


def test_names_of_parsers():
    assert tool_parser(None, "{{ messages }}") is reasoning_parser(None, "{{ messages }}") is None
    assert reasoning_parser(None, "{{ '<think>\n' }}") is REASONING_PARSERS["qwen3"]
    for chosen in TOOL_NAMES:
        assert (tool_parser(chosen, "") is None) == (chosen == "none")
    for chosen in REASONING_NAMES:
        assert (reasoning_parser(chosen, "") is None) == (chosen == "none")
