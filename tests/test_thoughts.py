"""Grammars behind a thought: it is free, whoever opens it, and the grammar begins right behind it, at any cut of the text."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from jaxspec.engine.output import FinishReason
from jaxspec.grammar.compiler import GrammarCompiler
from jaxspec.grammar.rule import GrammarRule, output_rule
from jaxspec.grammar.thought import (
    NO_PREFACE,
    REASONING_PARSERS,
    Preface,
    answer_preface,
)
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.structured import StructuredOutputsParams
from jaxspec.text import Tokenizer

N = 4  # rows of a window
ABC = StructuredOutputsParams(regex="(ab+c)|(<b+c)|(\nb+c)")
# Tokens that have a part of a tag, and what is before it or behind it.
PIECES = ("<th", "ink>", "k>", "k>a", ">a", ">ab", "</", "</think>", "<think>", "think>hm", "bb", "bc", "\n<", "hm")
TAGS = ("<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
END = "<eos>"


def tokenizer_of(kind: str) -> Tokenizer:
    """Bytes, and tags that are special tokens, or added tokens that are not special, or texts of bytes and of pieces."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [alphabet.pre_tokenize_str(piece)[0][0] for piece in PIECES if kind == "text"]
    vocab = {piece: i for i, piece in enumerate([*sorted(alphabet.alphabet()), *pieces])}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer, rust.decoder = alphabet, decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    added = [AddedToken(tag, special=kind == "special", normalized=False) for tag in TAGS if kind != "text"]
    rust.add_tokens(added)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


TOKENIZERS = {kind: tokenizer_of(kind) for kind in ("special", "added", "text")}
EOS = {kind: next(iter(each.ids_of([END]))) for kind, each in TOKENIZERS.items()}
GRAMMARS = {kind: GrammarCompiler(each, each.vocab_size + 40, [EOS[kind]]) for kind, each in TOKENIZERS.items()}
NAMES = {kind: {each.token_bytes(i): i for i in range(each.vocab_size)} for kind, each in TOKENIZERS.items()}


def rule_for(kind: str, preface: Preface, asked=ABC) -> GrammarRule:
    rule = output_rule(
        TOKENIZERS[kind], [], SamplingParams(structured_outputs=asked), GRAMMARS[kind].compile(asked, preface)
    )
    assert isinstance(rule, GrammarRule)
    return rule


def masks(rule, drafts=(), n=1):
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (n, 10)).astype(np.int32)
    rule.constraint.fill_masks(drafts, words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def ids(kind, text):
    return TOKENIZERS[kind].encode(text, add_special_tokens=False)


def cut(kind, text, rng) -> list[int]:
    """One of the ways to write a text in tokens; an added token is never spelt in another way."""
    names, rest, found = NAMES[kind], text.encode(), []
    while rest:
        starts = [name for name in names if rest.startswith(name)]
        name = rng.choice(starts) if kind == "text" else max(starts, key=len)
        found.append(names[name])
        rest = rest.removeprefix(name)
    return found


def thinks(name: str, prompt: str = "", **variables) -> Preface:
    return answer_preface(REASONING_PARSERS[name], prompt, variables)


HARMONY = ("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>")
# What may stand in front of the grammar, an opening and the end of a thought, and the answer's header after it and without it.
CASES = {
    "qwen3": (thinks("qwen3"), "<think>", "</think>", "", ""),
    "glm45": (thinks("glm45"), "\n<think>", "</think>", "", ""),
    "opened": (thinks("qwen3", "<think>\n"), "", "</think>", "", None),
    "deepseek_r1": (thinks("deepseek_r1"), "", "</think>", "", None),
    "gpt-oss": (thinks("gpt-oss"), *HARMONY[:2], f"<|start|>assistant{HARMONY[2]}", HARMONY[2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_reasoning_boundary_in_window(name, kind, seed, data):
    """Along an output with a thought or without, written in any tokens, fed in any pieces, with any window of drafts."""
    preface, opening, close, after, without = CASES[name]
    thought = data.draw(st.sampled_from(["", "hm", "<think> </think >k> <|", "\n日本"]))
    before = f"{opening}{thought}{close}{after}"
    text = f"{without if without is not None and data.draw(st.booleans()) else before}abbc"
    tokens = [*cut(kind, text, random.Random(seed)), EOS[kind]]
    rule, expected, reached = rule_for(kind, preface), [], 0
    for token in tokens:
        expected += masks(rule)
        if token not in expected[-1]:  # forced text has one spelling
            break
        reached += 1
        assert rule.feed([token], FinishReason.STOP if token == EOS[kind] else None).error is None
    start = data.draw(st.integers(0, min(reached, len(tokens) - 1)))
    rule = rule_for(kind, preface)
    fed = 0
    while fed < start:
        count = data.draw(st.integers(1, start - fed))
        assert rule.feed(tokens[fed : fed + count], None).error is None
        fed += count
    drafts = tokens[start : start + N - 1]
    seen = min(len(drafts), len(expected) - 1 - start) + 1
    assert masks(rule, drafts, N)[:seen] == expected[start : start + seen]
    assert masks(rule, drafts, N)[:seen] == expected[start : start + seen], "asking changes nothing"


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", CASES)
def test_the_thought_is_free_and_the_answer_is_not(name, kind):
    preface, opening, close, after, without = CASES[name]
    plain, tokenizer = rule_for(kind, NO_PREFACE), TOKENIZERS[kind]
    rule = rule_for(kind, preface)
    if without == "":  # the model may answer or think
        (first,) = masks(plain)
        openings = [opening.encode(), opening.strip().encode()]
        spelt = {i for name, i in NAMES[kind].items() if any(each.startswith(name) for each in openings)}
        (either,) = masks(rule)
        assert first | {ids(kind, opening)[0]} <= either <= first | spelt
        rule.feed(ids(kind, "ab"), None)
        plain.feed(ids(kind, "ab"), None)
        assert masks(rule, ids(kind, "b"), 2) == masks(plain, ids(kind, "b"), 2)
    is_token = bool(tokenizer.ids_of([close]))
    for said in ("", "so: ", f"so: {opening}", "so </", close[:-1]):
        rule = rule_for(kind, preface)
        assert rule.feed(ids(kind, opening + said), None).error is None
        (free,) = masks(rule)
        for token in range(tokenizer.vocab_size):
            text = said + tokenizer.token_text(token)
            if not text.endswith("\ufffd"):  # a part of a character
                wanted = token != EOS[kind] and (is_token or close not in text[:-1])
                assert (token in free) == wanted, text
    rule = rule_for(kind, preface)
    for token in cut(kind, opening + "so" + close + after, random.Random(0)):
        assert rule.feed([token], None).error is None
    plain = rule_for(kind, NO_PREFACE)
    for token in ids(kind, "abc"):
        assert masks(rule) == masks(plain)
        rule.feed([token], None)
        plain.feed([token], None)
    assert masks(rule) == [{EOS[kind]}]
