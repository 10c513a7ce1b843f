"""Requests with real grammars over the tiny model's vocabulary, beside free ones: for tests of the engine."""

import json
import re
import string
from collections.abc import Callable, Sequence

import jsonschema_rs
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from jaxspec.engine.request import Request
from jaxspec.grammar.compiler import GrammarCompiler
from jaxspec.grammar.rule import GrammarRule, output_rule
from jaxspec.grammar.thought import Preface, Thought
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.structured import StructuredOutputsParams
from jaxspec.text import Tokenizer
from tests.engine.tiny import EOS, VOCAB, cached

THOUGHT_END = EOS + 1
# A tag with which a model may open a thought, if two letters follow.
OPENING = "<s1>"
# Printable ASCII, and what some tokens say at once; the model's last ids belong to no token.
PIECES = (
    *sorted(string.digits + string.ascii_letters + string.punctuation), " ", "\n",
    '{"', '":', '",', '"}', ', "', "true", "false", "null", "red", "green", "alpha", "beta", "ab", "bc", "cab", "00",
    "12", "-1", "-2", "[]", "],", "}]", "aa", "xyz",
)  # fmt: skip


@cached
def tokenizer() -> Tokenizer:
    special = [f"<s{i}>" for i in range(EOS)] + ["<end>", "</think>"]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [alphabet.pre_tokenize_str(piece)[0][0] for piece in PIECES]
    vocab = {piece: i for i, piece in enumerate([*special, *pieces])}
    assert len(vocab) == len(special) + len(PIECES) < VOCAB
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer, rust.decoder = alphabet, decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


@cached
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB, [EOS])


OBJECT = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["red", "green", None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["size", "kind", "tags"],
    "additionalProperties": False,
}
CHOICES = ("alpha", "alphabet", "beta [ab]")
REGEX = "[a-c]{30,40}(-[0-9]{2}){2,8}"


def fits_object(text: str) -> bool:
    return jsonschema_rs.validator_for(OBJECT).is_valid(json.loads(text))


def fits_regex(text: str) -> bool:
    return re.fullmatch(REGEX, text) is not None


def fits_choice(text: str) -> bool:
    return text in CHOICES


# What is asked for, and what an output that ended has to be.
KINDS: dict[str, tuple[StructuredOutputsParams, Callable[[str], bool]]] = {
    "object": (StructuredOutputsParams(json=OBJECT), fits_object),
    "regex": (StructuredOutputsParams(regex=REGEX), fits_regex),
    "choice": (StructuredOutputsParams(choice=CHOICES), fits_choice),
}


def constrained(
    name: str, prompt: Sequence[int], asked: StructuredOutputsParams, *, thought: Thought | None = None, **options
) -> Request:
    """A request whose rule is the product's own."""
    params = SamplingParams(structured_outputs=asked, **options)
    grammar = compiler().compile(asked, Preface(thought))
    rule = output_rule(tokenizer(), prompt, params, grammar)
    assert isinstance(rule, GrammarRule)
    return Request(name, prompt, params, rule)


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(THOUGHT_END + 1, THOUGHT_END + len(PIECES), length).tolist()


def grammar_requests() -> list[Request]:
    """Of every kind, after a thought or not, beside free ones; prompts of one chunk and of several."""
    rng = np.random.default_rng(3)

    def prompt(length: int) -> list[int]:
        return prompt_of(rng, length)

    def sampled(i: int) -> dict:  # seeded, so that the text does not depend on the draft
        return {"temperature": 1.0, "seed": i, "max_tokens": 90}

    greedy = {"temperature": 0.0, "max_tokens": 90}
    (an_object, _), (a_regex, _), (a_choice, _) = KINDS.values()
    opened, may_open = Thought((), "</think>"), Thought(((OPENING, "ab"),), "</think>")
    soon = {"logit_bias": {THOUGHT_END: 6.0}}
    (opening,) = tokenizer().ids_of([OPENING])
    opens, never_opens = {"logit_bias": {opening: 5.0, THOUGHT_END: 7.0}}, {"logit_bias": {opening: -100.0}}
    made = [
        constrained("object 0", prompt(3), an_object, **greedy),
        Request("free 0", prompt(70), SamplingParams(**greedy | {"max_tokens": 50, "ignore_eos": True})),
        constrained("regex 1", prompt(64), a_regex, **greedy),
        constrained("object 2", prompt(100), an_object, **sampled(2)),
        Request("free 1", prompt(33), SamplingParams(**sampled(4) | {"max_tokens": 40})),
        constrained("thought, object 3", prompt(10), an_object, thought=opened, **sampled(5), **soon),
        constrained("choice 4", prompt(129), a_choice, **greedy | {"min_tokens": 60}),
        constrained("thought, regex 5", prompt(1), a_regex, thought=opened, **greedy, **soon),
        constrained("object 6", prompt(20), an_object, **sampled(7) | {"max_tokens": 9}),
        constrained("object 7", prompt(8), an_object, **greedy | {"stop": ['"kind']}),
        constrained("regex 8", prompt(66), a_regex, **sampled(9), repetition_penalty=1.3),
        constrained(
            "thought, opened by the model, choice 9", prompt(12), a_choice, thought=may_open, **greedy, **opens
        ),
        constrained(
            "thought, opened by the model, object 10", prompt(5), an_object, thought=may_open, **sampled(10), **opens
        ),
        constrained("choice 11", prompt(7), a_choice, thought=may_open, **greedy, **never_opens),
    ]
    for i, request in enumerate(made):
        request.arrival_time = float(i)
    return made


def fits(request: Request, ids: Sequence[int], end: str) -> bool:
    """Whether an output is what its request's grammar wants, or the beginning of such a one where it was cut."""
    output = list(ids)
    name = request.id
    if name.startswith("thought"):
        if THOUGHT_END not in output:
            return end == "length" or output[-1] == EOS  # the thought may be the whole text
        opened = output[0] == next(iter(tokenizer().ids_of([OPENING])))
        assert opened == ("opened by the model" in name)
        output = output[output.index(THOUGHT_END) + 1 :]
        name = name.rpartition(", ")[2]
    if end == "stop" and not request.params.stop:
        assert output.pop() == EOS
        return KINDS[name.split()[0]][1](tokenizer().decode(output))
    matcher = compiler().compile(KINDS[name.split()[0]][0]).matcher.deep_copy()
    return matcher.validate_tokens(output) == len(output)
