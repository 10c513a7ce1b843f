"""Structured outputs without an engine: what a matcher's masks say, and which grammars are refused with which words."""

import json

import jsonschema_rs
import numpy as np
import pytest

from bench.harness.vocabulary import made_up_tokenizer
from jaxspec.engine.output import FinishReason
from jaxspec.errors import InvalidRequestError
from jaxspec.grammar.compiler import MAX_KEPT, GrammarCompiler, grammar_text
from jaxspec.grammar.rule import CompiledGrammar, GrammarRule, output_rule
from jaxspec.grammar.thought import NO_PREFACE, Preface, Thought
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.structured import MAX_CHOICES, StructuredOutputsParams
from tests.schemas import FORMATS, LONG, LONG_FORMATS, random_schema, validator_for
from tests.serve.mock_engine import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
V = TOKENIZER.vocab_size + 40  # a model's vocabulary is padded
GRAMMARS = GrammarCompiler(TOKENIZER, V, [EOS])
ABC = StructuredOutputsParams(regex="ab+c")
# Nothing before, a thought that the prompt has opened, one that the model may open.
PREFACES = (NO_PREFACE, Preface(Thought((), "b")), Preface(Thought((("a", "x"),), "b")))
ONE_KEY = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def rule_for(asked, preface=NO_PREFACE) -> GrammarRule:
    return GrammarRule(GRAMMARS.compile(asked, preface), output_rule(TOKENIZER, [], SamplingParams()))


def masks(rule, drafts, n=4):
    """Sets of the allowed ids of each row."""
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (n, -(-V // 32))).astype(np.int32)
    rule.constraint.fill_masks(drafts, words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def ids(text):
    return TOKENIZER.encode(text)


def test_masks_along_the_drafts():
    rule = rule_for(ABC)
    a, b, c = (set(ids(x)) for x in "abc")
    assert masks(rule, ids("abb")) == [a, b, b | c, b | c]
    assert masks(rule, ids("abb")) == [a, b, b | c, b | c], "asking changes nothing"
    rule.feed(ids("ab"), None)
    assert masks(rule, ids("c"))[:2] == [b | c, {EOS}]


def test_rows_behind_illegal_draft_are_refilled():
    rule = rule_for(ABC)
    everything = set(range(32 * -(-V // 32)))
    assert masks(rule, ids("abb"))[3] != everything
    assert masks(rule, ids("xbb")) == [set(ids("a")), everything, everything, everything]
    assert masks(rule, ids("axb"))[2:] == [everything, everything]


def test_finished_matcher_allows_only_eos():
    rule = rule_for(ABC)
    rule.feed(ids("abc"), None)
    assert masks(rule, [EOS, *ids("ab")])[0] == {EOS}
    assert masks(rule, ids("ab"))[0] == {EOS}
    result = rule.feed([EOS], FinishReason.STOP)
    assert result.error is None


def test_padded_vocabulary_is_masked():
    """Every id that a free text may hold, but none past the tokenizer's."""
    allowed = masks(rule_for(StructuredOutputsParams(regex="(.|\n)*")), [], n=1)[0]
    assert allowed >= {EOS, *ids("abcxyz ABC 0123 {}<>\n")}
    assert max(allowed) < TOKENIZER.vocab_size


def test_advance_ends_at_stop():
    """A stop string that ends the output inside a window, and an end-of-text id: what comes after is not consumed."""
    grammar = GRAMMARS.compile(ABC)
    rule = output_rule(TOKENIZER, [], SamplingParams(stop=("b",), structured_outputs=ABC), grammar)
    result = rule.feed(ids("abb"), None)
    assert (result.keep, result.error) == (2, None)
    rule = output_rule(TOKENIZER, [], SamplingParams(structured_outputs=ABC), grammar)
    assert rule.feed([*ids("abc"), EOS], FinishReason.STOP).text == "abc"
    assert masks(rule, [], n=1) == [{EOS}]


def test_an_id_that_the_grammar_forbids_is_an_error():
    """It cannot come from a masked step."""
    assert "matcher failed" in rule_for(ABC).feed(ids("xyz"), None).error


def test_a_matcher_that_fails_in_a_mask_is_an_error():
    """Its mask allows the end of the text, which is not the end of what was asked for."""
    from llguidance import LLMatcher, LLParserLimits
    from llguidance.hf import from_tokenizer

    tree = from_tokenizer(TOKENIZER.hugging_face, n_vocab=V, eos_token=[EOS])
    limits = LLParserLimits(verbose_errors=False, step_lexer_fuel=50)
    matcher = LLMatcher(tree, grammar_text(StructuredOutputsParams(json_object=True)), log_level=0, limits=limits)
    rule = GrammarRule(CompiledGrammar(matcher, 0), output_rule(TOKENIZER, [], SamplingParams()))
    for token in ids('{"abc": [1, {"x": "y"}]'):
        if masks(rule, [], n=1) == [{EOS}]:
            break
        assert rule.feed([token], None).error is None
    else:
        raise AssertionError("it did not fail")
    assert "matcher failed" in rule.feed([EOS], FinishReason.STOP).error


def test_masks_of_many_are_those_of_each(monkeypatch):
    """At any points of their outputs, with any drafts, in threads; also beside a matcher that fails then and there."""
    monkeypatch.setattr("jaxspec.grammar.rule.MASK_THREADS", 2)
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, (8, 4, -(-V // 32))).astype(np.int32)
    for _ in range(20):
        rows = []
        for i in range(len(words)):
            rule = rule_for(ABC, PREFACES[i % 3]) if i else rule_that_fails()
            if i > 1:
                start = "" if i % 3 == 0 else "xb" if i % 3 == 1 else rng.choice(["", "axxb"])
                rule.feed(ids(start + "ab" + "b" * rng.integers(0, 3)), None)
            rows.append((rule, ids("".join(rng.choice(list("abbc"), rng.integers(0, 4))))))
        filled = GrammarRule.fill_many(rows, words)
        for each, words_nM in zip(filled, words, strict=True):
            words_nM[each.masks :] = -1
        got = words.copy()
        assert "matcher failed" in rows[0][0].feed([EOS], None).error
        rows[0] = (rule_that_fails(), rows[0][1])
        for (rule, drafts), words_nM in zip(rows, words, strict=True):
            words_nM[:] = rng.integers(-(2**31), 2**31, words_nM.shape)
            rule.fill_masks(drafts, words_nM)
        np.testing.assert_array_equal(got, words)


def test_masks_of_many_that_take_too_long():
    """The first mask of each rule is there, and each later one that was begun in time."""
    rng = np.random.default_rng(0)
    shape = (6, 4, -(-V // 32))
    seen = set()
    for _ in range(20):
        rows = []
        for i in range(shape[0]):
            rule = rule_for(ABC, PREFACES[i % 3])
            if i > 1:
                rule.feed(ids("xb" if i % 3 == 1 else "") + ids("ab" if i % 2 else "a"), None)
            rows.append((rule, ids("".join(rng.choice(list("abbbc"), rng.integers(0, 4))))))
        late = int(rng.integers(0, 4))
        answers = iter([True] * late + [False] * 4)
        words = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
        filled = GrammarRule.fill_many(rows, words, lambda _waiting, answers=answers: next(answers))
        whole = np.zeros_like(words)
        for (_, drafts), part, all_filled, got, want in zip(
            rows, filled, GrammarRule.fill_many(rows, whole), words, whole, strict=True
        ):
            assert all_filled.verified == len(drafts), "asking changes nothing"
            seen.add((late, len(drafts) - part.verified))
            assert part.masks <= all_filled.masks
            assert part.verified == (len(drafts) if part.masks == all_filled.masks else part.masks - 1)
            np.testing.assert_array_equal(got[: part.masks], want[: part.masks])
    assert {(0, 3), (1, 2), (2, 1), (3, 0)} <= seen


def rule_that_fails() -> GrammarRule:
    """In its first mask."""
    from llguidance import LLMatcher, LLParserLimits
    from llguidance.hf import from_tokenizer

    tree = from_tokenizer(TOKENIZER.hugging_face, n_vocab=V, eos_token=[EOS])
    limits = LLParserLimits(verbose_errors=False, step_lexer_fuel=1)
    text = grammar_text(StructuredOutputsParams(json_object=True))
    matcher = LLMatcher(tree, text, log_level=0, limits=limits)
    return GrammarRule(CompiledGrammar(matcher, 0), output_rule(TOKENIZER, [], SamplingParams()))


def test_one_grammar_serves_many_requests():
    """Each goes its own way."""
    params = SamplingParams(structured_outputs=ABC)
    grammar = GRAMMARS.compile(ABC)
    first, second = (output_rule(TOKENIZER, [], params, grammar) for _ in range(2))
    first.feed(ids("ab"), None)
    assert masks(second, [], n=1) == [set(ids("a"))]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("built", ["when needed", "before"])
def test_a_grammar_is_compiled_once_a_tree(threads, built, monkeypatch):
    """What uses one tree cannot fill masks at the same time: requests take by turns what there is, and so do grammars."""
    monkeypatch.setattr("jaxspec.grammar.compiler.MASK_THREADS", threads)
    compiler = GrammarCompiler(TOKENIZER, V, [EOS])
    if built == "before":
        assert not compiler.grow(), "there is no first tree"
        compiler.prepare()
        assert [compiler.grow() for _ in range(threads)] == [*[True] * (threads - 2), *[False] * min(threads, 2)]
    given = []
    for _ in range(4 * threads):
        given.append(compiler.compile(StructuredOutputsParams(regex="ab+c")))
        for other in range(threads - 1):  # whose turns are theirs
            compiler.compile(StructuredOutputsParams(regex=f"{other}+"))
    assert len(set(map(id, given[:threads]))) == threads
    assert {grammar.tree for grammar in given[:threads]} == set(range(threads))
    later = [given[i : i + threads] for i in range(threads, len(given), threads)]
    assert all(set(map(id, turn)) == set(map(id, given[:threads])) for turn in later)
    others = [compiler.compile(StructuredOutputsParams(regex=f"x{i}")).tree for i in range(threads)]
    assert set(others) == set(range(threads))


def test_few_grammars_are_kept():
    compiler = GrammarCompiler(TOKENIZER, V, [EOS])
    first = compiler.compile(ABC)
    for i in range(MAX_KEPT):
        compiler.compile(StructuredOutputsParams(choice=[f"text {i}"]))
    assert compiler.compile(ABC) is not first


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"choice": ['say "hi"', "yes"]}, 'say "hi"', "no"),
        ({"choice": ["yes", "yes/no\\"]}, "yes/no\\", "yess"),
        ({"regex": "[0-9]{3}"}, "123", "12a"),
        ({"grammar": 'start: "x" num\nnum: /[0-9]+/'}, "x12", "12"),
        ({"json_object": True}, '{"a": [1, null]}', "[1]"),
        ({"json": ONE_KEY}, '{"a": 1}', '{"b": 1}'),
        ({"json": json.dumps(ONE_KEY)}, '{"a":\n 1}', "{}"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "<f=x>", "schema": ONE_KEY, "end": "</f>"}],
                    "triggers": ["<f="],
                }
            },
            'so: <f=x>{"a": 2}</f> ok',
            "so: <f=y>",
        ),
    ],
)
def test_each_kind(asked, good, bad):
    rule = rule_for(StructuredOutputsParams(**asked))
    for token in [*ids(good), EOS]:
        assert token in masks(rule, [], n=1)[0], (good, chr(token))
        if token != EOS:
            assert rule.feed([token], None).error is None
    rule = rule_for(StructuredOutputsParams(**asked))
    wrong = [*ids(bad), EOS]
    for token in wrong:
        if token not in masks(rule, [], n=1)[0]:
            break
        rule.feed([token], None)
    else:
        raise AssertionError(f"{bad!r} was allowed")


def is_allowed(schema, text):
    """Whether a matcher lets a text of JSON come, and end there."""
    matcher = GRAMMARS.compile(StructuredOutputsParams(json=schema)).matcher.deep_copy()
    written = [*ids(text), EOS]
    return matcher.validate_tokens(written) == len(written)


def random_text(schema, rng, most):
    """JSON of characters that are drawn from the masks; None where it has not ended after so many."""
    matcher = GRAMMARS.compile(StructuredOutputsParams(json=schema)).matcher.deep_copy()
    written = []
    while len(written) < most:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits)))
        if token == EOS:
            return TOKENIZER.decode(written)
        written.append(token)
        assert matcher.consume_token(token)
    return None


def test_random_texts_obey_random_schemas():
    """Of all keywords that are supported, by an independent validator: nothing in them is overlooked."""
    rng, ended = np.random.default_rng(0), 0
    for seed in range(150):
        schema = random_schema(seed)
        text = random_text(schema, rng, 400)
        if text is not None:
            ended += 1
            assert validator_for(schema).is_valid(json.loads(text)), (seed, schema, text)
    assert ended > 130


def with_format(name):
    return {"type": "string", "format": name} | ({"maxLength": LONG} if name in LONG_FORMATS else {})


@pytest.mark.parametrize("name", [*FORMATS, *LONG_FORMATS])
def test_random_texts_have_their_format(name):
    rng, schema = np.random.default_rng(0), with_format(name)
    validator = validator_for(schema)
    for _ in range(50):
        text = random_text(schema, rng, 300)
        assert validator.is_valid(json.loads(text)), text
    assert not validator.is_valid("no such thing, 1")


DATES = {"date": "2023-02-29", "time": "12:30:60Z", "date-time": "2023-02-29T12:30:60Z"}
LONG_TEXTS = {"email": "a" * 65 + "@b.c", "hostname": "a" + ".abcdefghi" * 26}


@pytest.mark.parametrize(("name", "value"), (DATES | LONG_TEXTS).items())
def test_what_formats_allow_beyond_rfcs(name, value):
    """Why `validator_for` tolerates some dates, and emails are short: what llguidance refuses needs neither."""
    schema = {"type": "string", "format": name}
    assert is_allowed(schema, json.dumps(value))
    assert not jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value)
    assert validator_for(schema).is_valid(value) == (name in DATES)


def test_other_names_may_come_twice():
    """Why random schemas ask for no more than one of them; those that the schema lists come once."""
    others = {"patternProperties": {"^x[a-z]$": {"type": "null"}}, "additionalProperties": False, "minProperties": 2}
    assert is_allowed(others, '{"xa": null, "xb": null}')
    assert is_allowed(others, '{"xa": null, "xa": null}')
    assert not is_allowed(others, '{"xa": null}')
    listed = {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}}
    assert is_allowed(listed, '{"a": 1, "b": null}')
    assert not is_allowed(listed, '{"a": null, "a": null}')


def test_white_space_ends():
    """A model that likes line ends must not write them for ever."""
    rule = rule_for(StructuredOutputsParams(json_object=True))
    rule.feed(ids("{"), None)
    rule.feed(ids("\n" + " " * 32), None)
    assert masks(rule, [], n=1) == [set(ids('"}'))]


BAD = {
    "no field": ({}, "exactly one of json, regex"),
    "two fields": ({"regex": "a", "json_object": True}, "got regex and json_object"),
    "nothing asked": ({"json_object": False}, "got none"),
    "no choices": ({"choice": []}, f"from 1 to {MAX_CHOICES} texts"),
    "empty choice": ({"choice": ["a", ""]}, "that are not empty"),
    "one text": ({"choice": "yes"}, "a list of texts"),
    "many choices": ({"choice": list(map(str, range(MAX_CHOICES + 1)))}, f"from 1 to {MAX_CHOICES} texts"),
    "long": ({"regex": "a" * 2**19}, "structured_outputs.regex is longer than"),
    "deep": ({"json": json.loads('{"items":' * 900 + "{}" + "}" * 900)}, "structured_outputs.json"),
    "deep text": ({"json": '{"items":' * 9000 + "{}" + "}" * 9000}, "nested too deeply"),
    "no JSON": ({"json": "{"}, "structured_outputs.json cannot be compiled: it is not JSON"),
    "no object": ({"json": "[1]"}, "it must be an object"),
    "keyword": ({"json": {"not": {"type": "integer"}}}, 'cannot be compiled: Unimplemented keys: ["not"]'),
    "keyword inside": ({"json": {"properties": {"a": {"uniqueItems": True, "type": "array"}}}}, "uniqueItems"),
    "format": ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
    "reference": ({"json": {"$ref": "http://example.com/x"}}, "example.com"),
    "type": ({"json": {"type": 3}}, "type must be a string"),
    "unsatisfiable": ({"json": {"type": "object", "required": ["a"], "additionalProperties": False}}, "nsatisfiable"),
    "regex": ({"regex": "("}, "structured_outputs.regex cannot be compiled: at 1(8): invalid regex"),
    "lookahead": ({"regex": "a(?=b)"}, "structured_outputs.regex cannot be compiled"),
    "lark": ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    "deep lark": ({"grammar": "start: " + "(" * 9999 + '"a"' + ")" * 9999}, "too deeply nested"),
    "tag": ({"structural_tag": {"a": 1}}, "it must be {"),
    "tag without trigger": (
        {"structural_tag": {"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["<"]}},
        "starts with none of the triggers",
    ),
}


@pytest.mark.parametrize(("asked", "words"), BAD.values(), ids=BAD)
def test_bad_grammar_is_one_error(asked, words):
    with pytest.raises(InvalidRequestError) as caught:
        GRAMMARS.compile(StructuredOutputsParams(**asked))
    assert words in str(caught.value)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 420
    assert "\n" not in str(caught.value)


def test_what_structured_outputs_need():
    with pytest.raises(InvalidRequestError, match="this model has no tokenizer"):
        GrammarCompiler(None, V, [EOS]).compile(ABC)
    with pytest.raises(InvalidRequestError, match="no end-of-text id"):
        GrammarCompiler(TOKENIZER, V, []).compile(ABC)
    with pytest.raises(InvalidRequestError, match="ignore_eos does not go with structured_outputs"):
        SamplingParams(structured_outputs=ABC, ignore_eos=True)


@pytest.mark.parametrize("schema", [{"type": "string", "maxLength": 31}, {"type": "object"}], ids=str)
def test_slices_change_no_mask(schema):
    """Along a random output, beside the library's own slices, for a vocabulary of words."""
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    tokenizer, vocab_size = made_up_tokenizer(3000), 3040
    eos = tokenizer.hugging_face.eos_token_id
    asked = StructuredOutputsParams(json=schema)
    ours = GrammarCompiler(tokenizer, vocab_size, [eos]).compile(asked).matcher.deep_copy()
    tree = from_tokenizer(tokenizer.hugging_face, n_vocab=vocab_size, eos_token=[eos])
    matchers = ours, LLMatcher(tree, grammar_text(asked), log_level=0)
    words = np.zeros((2, vocab_size // 32), np.int32)
    rng = np.random.default_rng(0)
    for _ in range(40):
        for matcher, row in zip(matchers, words, strict=True):
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        np.testing.assert_array_equal(*words)
        allowed = np.flatnonzero(np.unpackbits(words[0].view(np.uint8), bitorder="little"))
        longer = allowed[allowed > 256]  # characters of strings
        chosen = int(rng.choice(longer if len(longer) else allowed))
        for matcher in matchers:
            assert matcher.consume_token(chosen)
        if chosen == eos:
            break
