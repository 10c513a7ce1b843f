"""Required and held calls of every family: whatever a grammar lets through, its parser reads as calls that fit."""

import json
import random

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import AddedToken

from jaxspec.grammar.compiler import GrammarCompiler
from jaxspec.grammar.rule import output_rule
from jaxspec.grammar.thought import HarmonyThoughts, ThinkTags
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.structured import StructuredOutputsParams
from serve.parsers.events import CallArguments, CallStart, Content
from serve.parsers.grammar import ANYTHING, held_calls, required_calls
from serve.parsers.output import Harmony, OutputFormat, OutputParser
from serve.parsers.registry import TOOL_PARSERS
from tests.serve.mock_engine import byte_tokenizer
from tests.serve.parsers.cases import TOOLS

# Another one than the mock engine's, which is a tag of gpt-oss.
EOS = 256
SHORT = {"type": "string", "maxLength": 6}
FUNCTIONS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Köln", "a b"]}, "days": {"type": "integer", "minimum": 1, "maximum": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "write_file": {
        "type": "object",
        "properties": {
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 2},
            "append": {"type": "boolean"},
            "mode": {"type": ["object", "null"], "properties": {"k": SHORT}, "additionalProperties": False},
        },
        "required": ["lines", "append"],
        "additionalProperties": False,
        "$defs": {"line": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}


def tokenizer_of(form, *, special: bool):
    tokenizer = byte_tokenizer()
    if special:
        tags = [AddedToken(tag, special=True, normalized=False) for tag in (*form.tokens, *ThinkTags().tokens)]
        tokenizer.hugging_face.backend_tokenizer.add_special_tokens(tags)
        tokenizer = type(tokenizer)(tokenizer.hugging_face)
    return tokenizer


def special_id(tokenizer):
    added = {t.content: i for i, t in tokenizer.hugging_face.backend_tokenizer.get_added_tokens_decoder().items()}
    return added.get


def rule_for(name, schemas, *, special, parallel=True):
    form = TOOL_PARSERS[name]
    tokenizer = tokenizer_of(form, special=special)
    text = required_calls(form, schemas, special_id(tokenizer), parallel=parallel)
    return tokenizer, rule_of(tokenizer, text)


def held_rule(name, schemas, *, special, **thought):
    """Of an output that may call functions."""
    form = TOOL_PARSERS[name]
    tokenizer = tokenizer_of(form, special=special)
    text = held_calls(form, schemas, special_id(tokenizer), tokenizer.special_ids, **thought)
    return tokenizer, rule_of(tokenizer, text)


def rule_of(tokenizer, text):
    asked = StructuredOutputsParams(grammar=text)
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size, [EOS]).compile(asked)
    params = SamplingParams(structured_outputs=asked, skip_special_tokens=False)
    return output_rule(tokenizer, [], params, grammar)


def allowed(rule, tokenizer):
    words = np.empty((1, -(-tokenizer.vocab_size // 32)), np.int32)
    rule.constraint.fill_masks((), words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def calls_of(name, text, schemas, reasoning=None):
    form = TOOL_PARSERS[name]
    parser = OutputParser(OutputFormat(HarmonyThoughts() if isinstance(form, Harmony) else reasoning, form, schemas))
    events = [*parser.feed(text), *parser.end()]
    content = "".join(e.text for e in events if isinstance(e, Content))
    calls = [[e.name, ""] for e in events if isinstance(e, CallStart)]
    for event in events:
        if isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return content, [(call, json.loads(arguments)) for call, arguments in calls]


@pytest.mark.slow
@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "texts"])
@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_whatever_passes_is_calls_that_fit(name, special):
    """Random walks along the masks."""
    validators = {f: jsonschema_rs.validator_for(schema) for f, schema in FUNCTIONS.items()}
    seen = set()
    for seed in range(6):
        rng = random.Random(seed)
        parallel = seed % 2 == 0
        tokenizer, rule = rule_for(name, FUNCTIONS, special=special, parallel=parallel)
        text = ""
        for _ in range(1500):
            ids = allowed(rule, tokenizer)
            # White space is rare, lest arguments never end.
            token = EOS if EOS in ids and rng.random() < 0.5 else rng.choice(ids)
            if tokenizer.token_text(token).isspace() and len(ids) > 1 and rng.random() < 0.9:
                token = rng.choice(ids)
            if token == EOS:
                break
            result = rule.feed([token], None)
            assert result.error is None
            text += result.text
        else:
            raise AssertionError(f"no end: {text[-200:]!r}")
        content, calls = calls_of(name, text, FUNCTIONS)
        assert not content.strip(), text
        assert calls, text
        assert parallel or len(calls) == 1
        for called, arguments in calls:
            assert validators[called].is_valid(arguments), (text, arguments)
            seen.add(called)
    assert len(seen) > 1


_ARGUMENTS = '{"city": "a b", "days": 3}'
CANONICAL = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{_ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">a b</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>a b</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=functions.get_weather "
    f"<|constrain|>json<|message|>{_ARGUMENTS}",
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {_ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{_ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": f'{{"name": "get_weather", "parameters": {_ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">a b</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\na b\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "texts"])
@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_what_templates_teach_passes(name, special):
    """To the last character, where the output may end."""
    tokenizer, rule = rule_for(name, TOOLS, special=special)
    text = CANONICAL[name]
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed(rule, tokenizer), (text, tokenizer.token_text(token))
        rule.feed([token], None)
    assert EOS in allowed(rule, tokenizer)
    called = [call for call, _ in calls_of(name, text, TOOLS)[1]]
    assert called[0] == "get_weather"


# How a call begins in the middle of an answer, or at its beginning.
BEGINNINGS = {
    name: [*form.opens, *(['{"name": "get_weather", "parameters":', '{"arguments": '] if form.bare else [])]
    for name, form in TOOL_PARSERS.items()
    if not isinstance(form, Harmony)
} | {"gpt-oss": ["<|start|>assistant<|channel|>commentary to=functions.", "<|channel|>analysis to=functions."]}


def feed(tokenizer, rule, text):
    """How much of a text passes."""
    for i, token in enumerate(ids := tokenizer.encode(text, add_special_tokens=False)):
        if token not in allowed(rule, tokenizer):
            return tokenizer.decode(ids[:i], skip_special_tokens=False)
        assert rule.feed([token], None).error is None
    return text


@pytest.mark.slow
@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "texts"])
@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_whatever_is_called_fits(name, special):
    """Random walks: text, tags of all kinds, the beginnings of calls, and what is allowed then."""
    validators = {f: jsonschema_rs.validator_for(schema) for f, schema in FUNCTIONS.items()}
    form, seen = TOOL_PARSERS[name], set()
    for seed in range(6):
        rng = random.Random(seed)
        tokenizer, rule = held_rule(name, FUNCTIONS, special=special)
        texts = [
            *form.tokens,
            *ThinkTags().tokens,
            *BEGINNINGS[name],
            *BEGINNINGS[name],
            "so: ",
            "; ",
            "\n",
            '{"name": "x"',
        ]
        text, calls = rng.choice(BEGINNINGS[name]), 0
        assert feed(tokenizer, rule, text) == text
        for _ in range(20_000):
            ids = allowed(rule, tokenizer)
            if EOS in ids:  # nothing holds what comes next
                if calls == 8:
                    break
                piece, calls = rng.choice(texts), calls + 1
                text += feed(tokenizer, rule, piece)
                continue
            token = rng.choice(ids)
            if tokenizer.token_text(token).isspace() and len(ids) > 1 and rng.random() < 0.9:
                token = rng.choice(ids)
            text += rule.feed([token], None).text
        else:
            raise AssertionError(f"no end: {text[-200:]!r}")
        for called, arguments in calls_of(name, text, FUNCTIONS)[1]:
            assert validators[called].is_valid(arguments), (text, arguments)
            seen.add(called)
    assert len(seen) > 1


@pytest.mark.slow
@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "texts"])
@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_arguments_are_held_and_text_is_not(name, special):
    """What templates teach passes; arguments that a schema does not have stop, unless their function is held to nothing."""
    said = "" if name == "llama3_json" else "Let me <tool> {look}: to=functions.x; </s>\n"
    wrong = said + CANONICAL[name].replace("days", "hours")
    tokenizer, rule = held_rule(name, FUNCTIONS, special=special)
    everything = {tokenizer.encode(chr(code), add_special_tokens=False)[0] for code in range(128)}
    assert everything | tokenizer.special_ids <= set(allowed(rule, tokenizer))
    assert feed(tokenizer, rule, said + CANONICAL[name]) == said + CANONICAL[name]
    assert EOS in allowed(rule, tokenizer)
    tokenizer, rule = held_rule(name, FUNCTIONS, special=special)
    passed = feed(tokenizer, rule, wrong)
    assert len(said) < len(passed) <= wrong.index("hours")
    others = {f: schema if f == "now" else ANYTHING for f, schema in FUNCTIONS.items()}
    tokenizer, rule = held_rule(name, others, special=special)
    assert feed(tokenizer, rule, wrong) == wrong
    assert calls_of(name, wrong, others)[1][0][1].keys() == {"city", "hours"}


@pytest.mark.slow
@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "texts"])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "minimax_m2"])
def test_nothing_is_a_call_inside_a_thought(name, special):
    tags = ThinkTags()
    call = CANONICAL[name]
    wrong = call.replace("days", "hours")
    for opening in ("\n<think>", "<think>", ""):
        text = f"{opening}Not {wrong}, but</think>\n{call}"
        options = {"special": special, "thought": tags.tokens, "inside": not opening}
        tokenizer, rule = held_rule(name, FUNCTIONS, **options)
        assert feed(tokenizer, rule, text) == text
        if opening:
            assert calls_of(name, text, FUNCTIONS, tags)[1][0] == ("get_weather", {"city": "a b", "days": 3})
        for before in (f"{opening}{call}</think>", *(["Well. "] if opening else [])):
            tokenizer, rule = held_rule(name, FUNCTIONS, **options)
            assert feed(tokenizer, rule, before + wrong) != before + wrong
