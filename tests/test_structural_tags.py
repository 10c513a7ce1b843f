"""Structural tags: which texts a tree of formats accepts, and which trees are refused with which words."""

import itertools
import re

import pytest

from jaxspec.errors import InvalidRequestError
from jaxspec.sampling.structured import StructuredOutputsParams
from tests.serve.mock_engine import EOS
from tests.test_grammar import GRAMMARS, ids, masks, rule_for

ONE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": ONE}
TEXT = {"type": "any_text"}


def const(value):
    return {"type": "const_string", "value": value}


def tag(begin, content, end, **others):
    return {"type": "tag", "begin": begin, "content": content, "end": end, **others}


def triggered(*tags, triggers=("<f",), **options):
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **options}


def separated(*tags, **options):
    return {"type": "tags_with_separator", "tags": list(tags), "separator": ", ", **options}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def asked(form):
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})


def accepts(form, text: str) -> bool:
    """Whether the masks let all of a text through, and its end then."""
    rule = rule_for(asked(form))
    for token in [*ids(text), EOS]:
        if token not in masks(rule, [], n=1)[0]:
            return False
        if token != EOS:
            assert rule.feed([token], None).error is None
    return True


F, G = tag("<f=x>", JSON, "</f>"), tag("<g>", {"type": "regex", "pattern": "[a-z/]+"}, ["</g>", "<end>"])
CALL, WRONG = '<f=x>{"a": 1}</f>', '<f=x>{"b": 1}</f>'
CASES = {
    "const_string": (const('say "é"\n'), ['say "é"\n'], ["", "say", 'say "é"\n.']),
    "json_schema": (JSON | {"style": "json"}, ['{"a": 3}', '{"a":3}'], ["{}", '{"a": "3"}', "3"]),
    "regex": ({"type": "regex", "pattern": "a/b|[0-9]{2}\\/"}, ["a/b", "12/"], ["a", "1/"]),
    "any_text": (TEXT, ["", "so: <f=x>\n"], []),
    "sequence": (sequence(const("x"), JSON, const("!"), TEXT), ['x{"a": 1}!', 'x{"a": 1}! so'], ['{"a": 1}!', "x!"]),
    "text in a sequence": (sequence(TEXT, F, const(".")), [f"so: {CALL}."], [f"so: {CALL}", f"so: {WRONG}.", "so."]),
    "text in front of a text": (sequence(TEXT, const("END"), JSON), ['ENENEND{"a": 1}'], ["ENEN", "so END so"]),
    "or": ({"type": "or", "elements": [const("yes"), JSON]}, ["yes", '{"a": 1}'], ["no", 'yes{"a": 1}']),
    "optional": (sequence({"type": "optional", "content": const("x")}, const("y")), ["y", "xy"], ["x", "xxy"]),
    "star": ({"type": "star", "content": F}, ["", CALL, CALL + CALL], [CALL + WRONG, "x"]),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "aba"]),
    "tag": (F, [CALL], [WRONG, f" {CALL}", f"{CALL} "]),
    "tag with two ends": (G, ["<g>ab</g>", "<g>a/b<end>"], ["<g></g>", "<g>A</g>", "<g>a"]),
    "text in a tag": (tag("<t>", TEXT, "</t>"), ["<t></t>", "<t>a</b> < </t>"], ["<t>a", "<t>a</t>b</t>"]),
    "text and an answer": (sequence(tag("<t>", TEXT, "</t>"), JSON), ['<t>{"b"</t>{"a": 1}'], ["<t></t>", '{"a": 1}']),
    "choice in a tag": (
        tag("<t>", {"type": "or", "elements": [const("yes"), TEXT]}, "</t>"),
        ["<t>yes</t>", "<t>no</t>"],
        ["<t>", "<t>yes</t></t>"],
    ),
    "triggered_tags": (triggered(F), ["", "so", f"so {CALL} and {CALL}{CALL}"], [WRONG, f"{CALL}{WRONG}", "so <f="]),
    "two triggers": (
        triggered(F, tag("<f=y>", const("z"), "</f>"), G, triggers=("<f=", "<g")),
        [f"<f=y>z</f> {CALL} <g>a<end>", "< f <"],
        ["<f=z>", "<f=y>x</f>", "so <g>", "<gg>"],
    ),
    "at least one": (triggered(F, at_least_one=True), [CALL, f"{CALL} so {CALL}"], ["", "so", f"so {CALL}"]),
    "one at most": (triggered(F, stop_after_first=True), ["", "so", f"so {CALL}"], [f"{CALL} ", CALL + CALL]),
    "just one": (triggered(F, at_least_one=True, stop_after_first=True), [CALL], ["", f"{CALL}.", f"so {CALL}"]),
    "triggers in a tag": (
        tag("<t>", triggered(F, excludes=[]), "</t>"),
        ["<t></t>", f"<t>so {CALL} </t>", f"<t>{CALL}{CALL}</t>"],
        [f"<t>{CALL}", f"<t>{WRONG}</t>", "<t></t> "],
    ),
    "one trigger in a tag": (
        tag("<t>", triggered(F, stop_after_first=True), "</t>"),
        ["<t>so</t>", f"<t>so {CALL}</t>"],
        [f"<t>{CALL} </t>", "<t>so"],
    ),
    "tags_with_separator": (separated(F, G), ["", CALL, f"{CALL}, <g>a</g>"], [f"{CALL}, ", f"{CALL}{CALL}", "so"]),
    "at least one tag": (separated(F, at_least_one=True), [CALL, f"{CALL}, {CALL}"], ["", f", {CALL}"]),
    "one tag": (separated(F, at_least_one=True, stop_after_first=True), [CALL], ["", f"{CALL}, {CALL}"]),
    "no separator": (separated(F) | {"separator": ""}, ["", CALL + CALL], [f"{CALL} {CALL}"]),
}


@pytest.mark.parametrize(("form", "good", "bad"), CASES.values(), ids=CASES)
def test_what_a_format_accepts(form, good, bad):
    for text in good:
        assert accepts(form, text), text
    for text in bad:
        assert not accepts(form, text), text


def test_trees_of_formats():
    """Pieces in a sequence of tags, with an alternative: exactly the texts of the pieces, in their order."""
    pieces = {
        "ab": const("ab"),
        "<x>(7|8)</x>": tag("<x>", {"type": "regex", "pattern": "7|8"}, "</x>"),
        "(yes|no)": {"type": "or", "elements": [const("yes"), const("no")]},
        "(cd)*": {"type": "star", "content": const("cd")},
    }
    texts, found = ["ab", "<x>7</x>", "no", "cdcd", ""], 0
    for chosen in itertools.permutations(pieces, 3):
        form = sequence(*(pieces[name] for name in chosen))
        for parts in itertools.product(texts, repeat=2):
            text = "".join(parts) + texts[len(parts[0]) % 3]
            wanted = re.fullmatch("".join(chosen), text) is not None
            assert accepts(form, text) == wanted, (chosen, text)
            found += wanted
    assert found > len(pieces)


BAD = {
    "no format": ({"type": "structural_tag", "format": 3}, "format must be an object"),
    "other field": ({"format": TEXT, "strict": True}, "strict is not supported"),
    "type": ({"format": {"type": "token", "token": 3}}, 'format.type "token" is not supported'),
    "no type": ({"format": {}}, 'format.type "" is not supported'),
    "field": ({"format": TEXT | {"max_tokens": 3}}, "format.max_tokens is not supported with this value"),
    "excludes": ({"format": triggered(F, excludes=["x"])}, "format.excludes is not supported with this value"),
    "style": (
        {"format": sequence(JSON | {"style": "qwen_xml"})},
        "format.elements[0].style is not supported with this",
    ),
    "unknown field": ({"format": tag("<", TEXT, ">", x=1)}, "format.x is not supported"),
    "empty": ({"format": sequence()}, "format.elements must be a list that is not empty"),
    "no bound": ({"format": sequence(TEXT, JSON)}, "format.elements[1].type must be const_string or tag"),
    "repeated text": ({"format": {"type": "star", "content": TEXT}}, "text without a bound cannot be repeated"),
    "no end": ({"format": tag("<", TEXT, "")}, "format.end must not be empty"),
    "token": ({"format": tag({"type": "token", "token": 3}, TEXT, ">")}, "format.begin must be a text"),
    "trigger": ({"format": triggered(G)}, "format.tags[0].begin starts with none of the triggers"),
    "keyword": ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, 'Unimplemented keys: ["not"]'),
    "regex": ({"format": {"type": "regex", "pattern": "("}}, "cannot be compiled"),
}


@pytest.mark.parametrize(("value", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_held_to_is_one_error(value, words):
    with pytest.raises(InvalidRequestError) as caught:
        GRAMMARS.compile(StructuredOutputsParams(structural_tag=value))
    assert words in str(caught.value)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 420


@pytest.mark.parametrize("depth", [400, 5000])
def test_a_deep_tree_is_refused(depth):
    form = TEXT
    for _ in range(depth):
        form = tag("<", form, ">")
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        GRAMMARS.compile(asked(form))
