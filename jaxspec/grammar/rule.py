"""The host rule of a request with a grammar: it says which ids may come next, and passes the text on."""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.engine.host_rule import Constraint, RuleResult
from jaxspec.engine.output import FinishReason
from jaxspec.sampling.params import SamplingParams
from jaxspec.text import TextStream, Tokenizer, text_stream

# That fill the masks of a step, and trees of the vocabulary (150 MB each with 160,000 ids). One mask in 25 of JSON with short
# strings takes nearly 2 ms (near a string's end), the others 0.03, and the step waits for all:
# eight threads took as long as four.
MASK_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


class CompiledGrammar(NamedTuple):
    """A grammar that requests follow.

    Attributes:
        matcher: an `llguidance.LLMatcher` at its start, to be copied.
        tree: number of the vocabulary's tree that it uses. Masks of one tree are computed one after another.
    """

    matcher: Any
    tree: int


def output_rule(
    tokenizer: Tokenizer | None,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    grammar: CompiledGrammar | None = None,
    *,
    shown: frozenset[int] = frozenset(),
    free_until: int | None = None,
) -> "GrammarRule | TextStream | None":
    """The host rule that a request needs: for its text, its stop strings and its grammar.

    Args:
        grammar: `params.structured_outputs`, where they are given (`GrammarCompiler.compile`). It is not changed.
        shown: special tokens that are part of the text also where it leaves the others out.
        free_until: as in `GrammarRule`.

    Raises:
        InvalidRequestError: the model has no tokenizer for what is asked.
    """
    assert (grammar is None) == (params.structured_outputs is None)
    text = text_stream(tokenizer, prompt_ids, params, shown)
    if grammar is None:
        return text
    assert text is not None, "the grammar was compiled for a tokenizer"
    return GrammarRule(grammar.matcher.deep_copy(), text, tree=grammar.tree, free_until=free_until)


class GrammarRule(Constraint):
    """A `HostRule` and its `Constraint`: follows the output with a matcher. Fed by the engine alone.

    Args:
        matcher: an `llguidance.LLMatcher` at its start; the rule's own.
        text: gives the request its text.
        tree: the number of the matcher's tree: see `CompiledGrammar`.
        free_until: where given, the grammar begins after the first of this id (the end of a thought); all ids may come
            before it.
    """

    needs_readback = True

    def __init__(self, matcher: Any, text: TextStream, *, tree: int = 0, free_until: int | None = None):
        self._matcher = matcher
        self._tree = tree
        self._text = text
        self._free_until = free_until
        self._free = free_until is not None

    @property
    def constraint(self) -> "GrammarRule":
        return self

    def feed(self, ids: Sequence[int], ended: FinishReason | None) -> RuleResult:
        """Advances the matcher by the newest ids, but not by the id that ended the output."""
        told = list(ids[:-1] if ended is FinishReason.STOP else ids)
        result = self._text.feed(ids, ended)
        if result.keep is not None:  # the output is over
            return result
        if self._free and self._free_until in told:
            told = told[told.index(self._free_until) + 1 :]
            self._free = False
        if not self._free and told:
            self._matcher.consume_tokens(told)
        # It may also have failed while masks were filled. These then allow the end alone, which nobody may take for one.
        if self._matcher.is_error():
            return result._replace(error=f"the grammar's matcher failed: {self._matcher.get_error()}")
        return result

    def fill_masks(self, drafts: Sequence[int], words: np.ndarray) -> None:
        """See `Constraint`. Rows after an illegal draft allow everything, since no one reads them."""
        self.fill_many([(self, drafts)], words[None])

    @classmethod
    def fill_many(cls, rows: Sequence[tuple["GrammarRule", Sequence[int]]], words: np.ndarray) -> None:
        """See `Constraint`. One mask of each rule at a time, in the library's threads, which take neighbours: those of a tree
        are together, so that no thread waits for another's.
        """
        n, nbytes = words.shape[1], words[0, 0].nbytes
        assert words.flags.c_contiguous
        going = [(rule._matcher, x * n, rule._rows_to_fill(drafts, words[x])) for x, (rule, drafts) in enumerate(rows)]
        going = [going[x] for x in sorted(range(len(rows)), key=lambda x: rows[x][0]._tree)]
        while True:
            steps = [(matcher, first, rows_of, next(rows_of, None)) for matcher, first, rows_of in going]
            wanted = [(matcher, first + row) for matcher, first, _, row in steps if row is not None]
            going = [(matcher, first, rows_of) for matcher, first, rows_of, row in steps if row is not None]
            if not wanted:
                return
            if len(wanted) == 1 or MASK_THREADS == 1:  # threads have to be woken
                for matcher, row in wanted:
                    matcher.unsafe_compute_mask_ptr(words.ctypes.data + row * nbytes, nbytes)
            else:
                _executor().unsafe_compute_mask_ptr(wanted, words.ctypes.data, nbytes, len(rows) * n)

    def _rows_to_fill(self, drafts: Sequence[int], words: np.ndarray) -> Iterator[int]:
        """Fills the rows that allow everything, and gives each other one when it is to get the matcher's mask."""
        drafts, row = list(drafts), 0
        if self._free:
            row = drafts.index(self._free_until) + 1 if self._free_until in drafts else len(words)
        words[:row] = -1
        consumed = 0
        while row < len(words):
            yield row
            row += 1
            if row == len(words) or row > len(drafts) or self._matcher.is_stopped():
                break
            draft = drafts[row - 1]
            if not words[row - 1, draft >> 5] >> (draft & 31) & 1 or self._matcher.try_consume_tokens([draft]) != 1:
                break
            consumed += 1
        words[row:] = -1
        if consumed:
            self._matcher.rollback(consumed)


@functools.cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=MASK_THREADS)
