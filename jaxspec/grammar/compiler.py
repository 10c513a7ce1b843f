"""Grammars of structured outputs, compiled by llguidance for a model's vocabulary."""

import collections
import itertools
import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import InvalidRequestError, ModelFormatError, shown
from jaxspec.grammar.rule import MASK_THREADS, CompiledGrammar, CompiledThought
from jaxspec.grammar.structural_tag import structural_tag_grammar
from jaxspec.grammar.thought import NO_PREFACE, Pieces, Preface, Thought
from jaxspec.sampling.structured import StructuredOutputsParams
from jaxspec.text import Tokenizer

logger = logging.getLogger(__name__)

# Compiled grammars that are kept, for requests with the same one.
MAX_KEPT = 64
# Between two tokens of JSON: a space, or a line's end and the next one's indentation. Without a bound a model that likes
# white space never ends.
WHITESPACE = r" |\r?\n( {0,32}|\t{0,8})"
# llguidance allows the tokens of a group at once where all of them may come: here words of a string, by their longest. With
# its own groups (10, 30, any) a mask inside a string that may have 29 more characters looks at every word of 11 or more.
_CHARACTERS = r'[^"\\\x00-\x1F\x7F]'
_LONGEST = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30)
SLICES = (r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTERS}{{1,{n}}}" for n in _LONGEST), f"{_CHARACTERS}+")
# What llguidance says of a schema without naming the keyword that it is about.
_UNNAMED = {
    "regex parse error": "pattern or patternProperties",
    "lookarounds not supported": "pattern or patternProperties",
    "patternProperty regexes": "patternProperties",
    "min/maxProperties": "minProperties or maxProperties",
    "Resource '": "$ref",
    "Pointer '": "$ref",
    "Anchor '": "$ref",
    "invalid multiple of": "multipleOf",
}
# Of a schema inside a grammar it tells the place, and then the grammar's lines, which are seldom the client's own.
_INSIDE = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*?)\n +\d+ \| .*", re.DOTALL)
# A message may quote the schema.
_MESSAGE_CHARACTERS = 300


class GrammarCompiler:
    """Compiles grammars; from any thread.

    Whatever uses one tree of the vocabulary shares a lock, so there are `MASK_THREADS` trees, which grammars take by
    turns. Those that `prepare` and `grow` have not built are built when they are needed; nothing else in Python runs meanwhile,
    for about a second with 160,000 ids and half of that for each further tree.

    Args:
        tokenizer: None where the model has none: then every grammar is refused.
        vocab_size: V, rows of the model's logits; ids that the tokenizer does not know are never allowed.
        eos_token_ids: what may come where a grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._lock = threading.Lock()
        self._trees: list[Any] = []
        self._turns = itertools.count()
        self._kept: collections.OrderedDict[tuple[str, str, Preface], collections.deque[CompiledGrammar]] = (
            collections.OrderedDict()
        )

    def prepare(self) -> None:
        """Builds the first tree, where the model has a tokenizer and an end of text; where it cannot, requests are told why."""
        if self._tokenizer is None or not self._eos:
            return
        try:
            with self._lock:
                self._tree(0)
        except ModelFormatError as error:
            logger.warning("structured outputs will be refused: %s", error)

    def grow(self) -> bool:
        """Builds a further tree, where there is a first: for a moment at which nothing else wants to run.

        Returns:
            Whether another may come.
        """
        with self._lock:
            if 0 < len(self._trees) < MASK_THREADS:
                self._tree(len(self._trees))
            return 0 < len(self._trees) < MASK_THREADS

    def compile(self, params: StructuredOutputsParams, preface: Preface = NO_PREFACE) -> CompiledGrammar:
        """Others may be given the same one. A grammar that is asked for again and again is compiled once for each tree.

        Args:
            preface: what comes in front of what is asked.

        Raises:
            InvalidRequestError: the grammar is wrong, uses what llguidance does not support, or is too large.
        """
        key = (params.kind, params.source, preface)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and len(kept) >= MASK_THREADS:
                self._kept.move_to_end(key)
                kept.rotate()  # each grammar takes its own turns
                return kept[0]
            number = (kept[-1].tree + 1 if kept else next(self._turns)) % MASK_THREADS
            tree = self._tree(number)
        # Outside the lock: llguidance drops the GIL, and other requests go on meanwhile.
        made = self._compile(tree, number, params, preface)
        with self._lock:
            kept = self._kept.setdefault(key, collections.deque())
            kept.append(made)  # perhaps one too many, where others have compiled it meanwhile
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return made

    def _compile(self, tree: Any, number: int, params: StructuredOutputsParams, preface: Preface) -> CompiledGrammar:
        assert self._tokenizer is not None, "there is a tree"
        thought = None if preface.thought is None else self._compile_thought(tree, preface.thought)
        try:
            text = grammar_text(params)
            if preface.headers:
                text = _with_headers(text, [_symbols(self._tokenizer, header) for header in preface.headers])
            matcher = _matcher(tree, text)
        except ValueError as error:
            raise _refused(params, str(error)) from None
        if matcher.is_error():
            raise _refused(params, matcher.get_error())
        if not any(matcher.compute_bitmask()):
            raise _refused(params, "nothing satisfies it")
        return CompiledGrammar(matcher, number, thought)

    def _compile_thought(self, tree: Any, thought: Thought) -> CompiledThought:
        tokenizer, opening, closing = self._tokenizer, None, None
        assert tokenizer is not None, "there is a tree"
        if thought.openings:
            opening = _matcher(tree, "start: " + " | ".join(_symbols(tokenizer, each) for each in thought.openings))
        close = next(iter(tokenizer.ids_of([thought.close])), None)
        if close is None:
            # Special tokens may come in a thought as anything else may; no text spells them.
            special = ",".join(map(str, sorted(tokenizer.special_ids.difference(self._eos))))
            others = f"(ANY_TEXT <[{special}]>)* " if special else ""
            ends = f"end[lazy]: ANY_TEXT {json.dumps(thought.close)}"
            closing = _matcher(tree, f"%llguidance {{}}\nstart: {others}end\n{ends}\nANY_TEXT: /(.|\\n)*/\n")
        for matcher in (opening, closing):
            assert matcher is None or not matcher.is_error(), matcher.get_error()
        eos = tuple(token for token in self._eos if token != close)
        return CompiledThought(opening, close, closing, tokenizer.ids_of(thought.answers), eos)

    def _tree(self, number: int) -> Any:
        if not self._trees:
            self._trees.append(self._build_tree())
        while len(self._trees) <= number:
            self._trees.append(self._trees[0].with_slices(list(SLICES)))
        return self._trees[number]

    def _build_tree(self) -> Any:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "this model has no tokenizer: structured outputs need one", param="structured_outputs"
            )
        if not self._eos:
            raise InvalidRequestError(
                "this model has no end-of-text id: structured outputs could not end", param="structured_outputs"
            )
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(
                self._tokenizer.hugging_face, n_vocab=self._vocab_size, eos_token=self._eos, slices=list(SLICES)
            )
        except Exception as error:
            raise ModelFormatError(f"llguidance cannot read this tokenizer: {shown(str(error))}") from error


def _matcher(tree: Any, text: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tree, text, log_level=0, limits=LLParserLimits(verbose_errors=False))


def _symbols(tokenizer: Tokenizer, pieces: Pieces) -> str:
    """A text for a grammar of llguidance's Lark: the ids of added tokens, and strings."""
    ids = [next(iter(tokenizer.ids_of([piece])), None) for piece in pieces]
    return " ".join(json.dumps(p) if i is None else f"<[{i}]>" for p, i in zip(pieces, ids, strict=True))


def _with_headers(text: str, headers: Sequence[str]) -> str:
    """A grammar, in llguidance's own form, behind one of the headers.

    Raises:
        ValueError: it is JSON, and no grammar.
    """
    loaded = json.loads(text) if text.startswith("{") else {"grammars": [{"lark_grammar": text}]}
    match loaded:
        case {"grammars": [Mapping() as answer, *others]}:
            start = {"lark_grammar": f"start: ({' | '.join(headers)}) @answer"}
            return json.dumps({"grammars": [start, {**answer, "name": "answer"}, *others]})
    raise ValueError("it is JSON, but no grammar")


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own form.

    Raises:
        ValueError: it is not what its field says.
    """
    from llguidance import LLMatcher, StructTag

    json_options: Any = {"whitespace_pattern": WHITESPACE}
    match params.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(_loaded(params), overrides=json_options)
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=json_options)
        case "regex":
            return LLMatcher.grammar_from_regex(params.source)
        case "choice":
            assert params.choice is not None
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in params.choice))
        case "grammar":
            return LLMatcher.grammar_from_lark(params.source)
    if "format" in (loaded := _loaded(params)):
        return structural_tag_grammar(loaded, json_options)
    structures, triggers = _structures(loaded)
    tags = [
        StructTag(trigger=_trigger_of(each, triggers), begin=each["begin"], grammar=each["schema"], end=each["end"])
        for each in structures
    ]
    return StructTag.to_grammar(tags, assume_special=False)


def _loaded(params: StructuredOutputsParams) -> Any:
    """
    Raises:
        ValueError: it is not an object.
    """
    value = getattr(params, params.kind)
    try:
        loaded = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(loaded, Mapping):
        raise ValueError("it must be an object")
    return dict(loaded)


def _structures(loaded: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Of the older form."""
    structures: Any = loaded.get("structures")
    triggers: Any = loaded.get("triggers")
    sound = (
        isinstance(structures, list)
        and structures
        and isinstance(triggers, list)
        and all(isinstance(t, str) and t for t in triggers)
        and all(
            isinstance(s, Mapping)
            and isinstance(s.get("begin"), str)
            and isinstance(s.get("schema"), Mapping)
            and isinstance(s.get("end"), str)
            for s in structures
        )
    )
    if not sound:
        older = '{"structures": [{"begin": str, "schema": object, "end": str}, ...], "triggers": [str, ...]}'
        raise ValueError(f'it must be {{"type": "structural_tag", "format": object}} or {older}')
    return structures, triggers


def _trigger_of(structure: Mapping[str, Any], triggers: Sequence[str]) -> str:
    for trigger in triggers:
        if structure["begin"].startswith(trigger):
            return trigger
    raise ValueError(f"the begin {shown(structure['begin'])} starts with none of the triggers")


def _refused(params: StructuredOutputsParams, why: str) -> InvalidRequestError:
    words = " ".join(_INSIDE.sub(r"\1", why).split())
    keyword = next((keyword for start, keyword in _UNNAMED.items() if words.startswith(start)), None)
    if keyword is not None:
        words = f"{keyword}: {words}"
    if len(words) > _MESSAGE_CHARACTERS:
        words = words[:_MESSAGE_CHARACTERS] + "..."
    return InvalidRequestError(
        f"structured_outputs.{params.kind} cannot be compiled: {words}", param="structured_outputs"
    )
