"""The host rule of a request with a grammar: it says which ids may come next, and passes the text on."""

import functools
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.engine.host_rule import Constraint, FilledMasks, RuleResult
from jaxspec.engine.output import FinishReason
from jaxspec.sampling.params import SamplingParams
from jaxspec.text import TextStream, Tokenizer, text_stream

# That fill the masks of a step, and trees of the vocabulary (150 MB each with 160,000 ids). One mask in 25 of JSON with short
# strings takes 1 to 4 ms (near a string's end), the others 0.03 to 0.1, and the step waits for all. On H200s' hosts the masks
# of a step took as long in the mean with eight threads as with four; by a simulation the slowest steps gain.
MASK_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
# A matcher, and the row of its rule's masks that it is to fill before the next one.
_Masks = Generator[tuple[Any, int], None, int]


class CompiledThought(NamedTuple):
    """A thought with which an output begins, or may begin (`jaxspec.grammar.thought.Thought`).

    Attributes:
        opening: an `llguidance.LLMatcher` of what opens it, at its start; None: the output begins inside.
        close: the id that ends it. None: its end is no token of the vocabulary.
        closing: then a matcher of the thought up to its end.
        answers: ids that end the thought too, where the grammar begins with them.
        eos: the only ids that may not come in it: an output that ended there would not be what was asked for.
    """

    opening: Any = None
    close: int | None = None
    closing: Any = None
    answers: frozenset[int] = frozenset()
    eos: tuple[int, ...] = ()


class CompiledGrammar(NamedTuple):
    """A grammar that requests follow.

    Attributes:
        matcher: an `llguidance.LLMatcher` at its start, to be copied.
        tree: number of the vocabulary's tree that it and the thought use. Masks of one tree are computed one after another.
        thought: what may come before it.
    """

    matcher: Any
    tree: int
    thought: CompiledThought | None = None


def output_rule(
    tokenizer: Tokenizer | None,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    grammar: CompiledGrammar | None = None,
    *,
    shown: frozenset[int] = frozenset(),
) -> "GrammarRule | TextStream | None":
    """The host rule that a request needs: for its text, its stop strings and its grammar.

    Args:
        grammar: `params.structured_outputs`, where they are given (`GrammarCompiler.compile`). It is not changed.
        shown: special tokens that are part of the text also where it leaves the others out.

    Raises:
        InvalidRequestError: the model has no tokenizer for what is asked.
    """
    assert (grammar is None) == (params.structured_outputs is None)
    text = text_stream(tokenizer, prompt_ids, params, shown)
    if grammar is None:
        return text
    assert text is not None, "the grammar was compiled for a tokenizer"
    return GrammarRule(grammar, text)


class _Before(NamedTuple):
    """An output that has not begun its answer. Its matchers are copied when they read on.

    Until it is clear whether a thought is opened, the output is read both ways: both may begin alike.

    Attributes:
        opening: has read the output as the opening of a thought; None: the thought has begun.
        answer: has read it as the answer; None: it is none, or the thought has begun.
        closing: has read the thought, where its end is no token.
    """

    opening: Any = None
    answer: Any = None
    closing: Any = None


class GrammarRule(Constraint):
    """A `HostRule` and its `Constraint`: follows the output with a matcher. Fed by the engine alone.

    Args:
        grammar: it is not changed.
        text: gives the request its text.
    """

    needs_readback = True

    def __init__(self, grammar: CompiledGrammar, text: TextStream):
        matcher, self._tree, self._thought = grammar
        self._matcher = matcher.deep_copy()
        self._text = text
        self._before: _Before | None = None
        if self._thought is not None:
            opening = self._thought.opening
            begun = _Before(closing=self._thought.closing)
            self._before = begun if opening is None else _Before(opening, self._matcher)
        self._error = ""

    @property
    def constraint(self) -> "GrammarRule":
        return self

    def feed(self, ids: Sequence[int], ended: FinishReason | None) -> RuleResult:
        """Advances the matcher by the newest ids, but not by the id that ended the output."""
        told = list(ids[:-1] if ended is FinishReason.STOP else ids)
        result = self._text.feed(ids, ended)
        if result.keep is not None:  # the output is over
            return result
        while told and self._before is not None:
            self._before, self._matcher = self._read_on(self._before, told.pop(0))
        if told:
            self._matcher.consume_tokens(told)
        # It may also have failed while masks were filled. These then allow the end alone, which nobody may take for one.
        self._note_error(self._matcher)
        if self._error:
            return result._replace(error=f"the grammar's matcher failed: {self._error}")
        return result

    def fill_masks(self, drafts: Sequence[int], words: np.ndarray) -> None:
        """See `Constraint`. Rows after an illegal draft allow everything, since no one reads them."""
        (filled,) = self.fill_many([(self, drafts)], words[None])
        words[filled.masks :] = -1

    @classmethod
    def fill_many(
        cls,
        rows: Sequence[tuple["GrammarRule", Sequence[int]]],
        words: np.ndarray,
        may_begin: Callable[[int], bool] = lambda _rows: True,
    ) -> list[FilledMasks]:
        """See `Constraint`. One mask of each rule at a time, in the library's threads, which take neighbours: those of a tree
        are together, so that no thread waits for another's.
        """
        n, nbytes = words.shape[1], words[0, 0].nbytes
        assert words.flags.c_contiguous
        filled: dict[int, FilledMasks] = {}
        going = [(x, rule._masks_to_fill(drafts, words[x])) for x, (rule, drafts) in enumerate(rows)]
        going.sort(key=lambda each: rows[each[0]][0]._tree)
        while True:
            steps = [(x, masks, *_next_mask(masks)) for x, masks in going]
            after_drafts = sum(matcher is not None and row > 0 for _, _, matcher, row in steps)
            late = after_drafts > 0 and not may_begin(after_drafts)
            wanted, going = [], []
            for x, masks, matcher, row in steps:
                if matcher is None:
                    filled[x] = FilledMasks(row, len(rows[x][1]))
                elif late and row > 0:
                    masks.close()
                    filled[x] = FilledMasks(row, row - 1)
                else:
                    wanted.append((matcher, x * n + row))
                    going.append((x, masks))
            if not wanted:
                return [filled[x] for x in range(len(rows))]
            if len(wanted) == 1 or MASK_THREADS == 1:  # threads have to be woken
                for matcher, row in wanted:
                    matcher.unsafe_compute_mask_ptr(words.ctypes.data + row * nbytes, nbytes)
            else:
                _executor().unsafe_compute_mask_ptr(wanted, words.ctypes.data, nbytes, len(rows) * n)

    def _masks_to_fill(self, drafts: Sequence[int], words: np.ndarray) -> _Masks:
        """Fills the rows that need no mask of the answer's matcher; gives each other one that counts, after the matcher that
        fills it. Returns how many rows count."""
        before, matcher, consumed, filled = self._before, self._matcher, 0, 0
        try:
            for row, words_M in enumerate(words):
                if before is None:
                    yield matcher, row
                    self._note_error(matcher)
                else:
                    yield from self._mask_before_answer(before, words_M, row)
                filled = row + 1
                if filled == len(words) or row >= len(drafts):
                    break
                draft = drafts[row]
                if not words_M[draft >> 5] >> (draft & 31) & 1:
                    break
                if before is not None:
                    before, matcher = self._read_on(before, draft)
                elif matcher.is_stopped() or matcher.try_consume_tokens([draft]) != 1:
                    break
                else:
                    consumed += 1
        finally:
            if consumed:
                matcher.rollback(consumed)
        return filled

    def _mask_before_answer(
        self, before: _Before, words_M: np.ndarray, row: int
    ) -> Generator[tuple[Any, int], None, None]:
        if before.opening is None and before.closing is None:
            assert self._thought is not None
            words_M[:] = -1
            bits = words_M.view(np.uint32)
            for token in self._thought.eos:
                bits[token >> 5] &= ~np.uint32(1 << (token & 31))
            return
        words_M[:] = 0
        if before.answer is not None:
            yield before.answer, row
            self._note_error(before.answer)
        more = np.empty_like(words_M)
        (before.opening or before.closing).unsafe_compute_mask_ptr(more.ctypes.data, more.nbytes)
        words_M |= more

    def _read_on(self, before: _Before, token: int) -> tuple[_Before | None, Any]:
        """What follows an id before the answer; None once the answer has begun. Second, the answer's matcher."""
        assert self._thought is not None
        if before.opening is not None:
            opening, answer = (_after(matcher, token) for matcher in (before.opening, before.answer))
            if opening is None:
                return None, answer or _failed(before.opening, token)
            if opening.is_accepting():
                return _Before(closing=self._thought.closing), self._matcher
            return _Before(opening, answer), self._matcher
        if before.closing is None:
            if token == self._thought.close:
                return None, self._matcher
            begun = _after(self._matcher, token) if token in self._thought.answers else None
            return (before, self._matcher) if begun is None else (None, begun)
        closing = _after(before.closing, token)
        if closing is None:
            return None, _failed(before.closing, token)
        return None if closing.is_accepting() else _Before(closing=closing), self._matcher

    def _note_error(self, matcher: Any) -> None:
        if matcher.is_error():
            self._error = self._error or matcher.get_error()


def _next_mask(masks: _Masks) -> tuple[Any, int]:
    """The next matcher with its row; without another one None and the number of rows."""
    try:
        return next(masks)
    except StopIteration as stop:
        return None, stop.value


def _after(matcher: Any, token: int) -> Any:
    """A copy that has read one more id; None where it may not come, and where there is no matcher."""
    if matcher is None:
        return None
    copy = matcher.deep_copy()
    return copy if copy.try_consume_tokens([token]) == 1 else None


def _failed(matcher: Any, token: int) -> Any:
    """A matcher with the error that it has of an id that may not come."""
    copy = matcher.deep_copy()
    copy.consume_token(token)
    return copy


@functools.cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=MASK_THREADS)
