"""What steps of an H200 cost, by their bucket and by what is live in it: from a record of `bench step`.

A padding row reaches no expert and reads one page. So a step takes what was measured with all its rows live, less the time
in which the bytes of the rows that are not live would be read; the record has both for plain steps and for cycles of three
drafts. Other numbers of drafts k: a window of k + 1 tokens costs the target what as many rows of one token do (a cycle's
time beyond that is nearly the same at 1, 4, 16 and 32 rows: three passes of the draft), and k of the three passes.

Steps with prompts: what they take beyond their decode rows, by prompt tokens, beside 16 rows and 120, of plain steps and of
cycles; of other numbers of drafts in between.
"""

import json
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.engine.buckets import Bucket

RECORD = Path(__file__).parents[2] / "bench" / "results" / "step_vllm_2b92d68_h200.json"
DRAFTED = 3
# What a sampler that also knows rules costs rows that need none, beside one that knows none as those of the record do: 0.02 to
# 0.05 ms (docs/kernels/sampling.md).
FULL_MS = 0.03
# The part of what a prompt token costs that one of padding costs too: 4.5 of 9.4 us, by 1 and 4 prompts in a bucket (020cef3).
PADDED = 0.47
# What a step of few live rows takes longer in a bucket of more rows: four requests had 0.950 to 0.969 of the fixed engines'
# tokens a second in steps of 16 and 32 rows, those of eight 0.986 to 1.003 (`bench adaptive`, a9f4546).
FEW_ROWS, FEW_PADDED_MS = 4, 0.15

# What prompts of a load add to steps beside those of the record, which are of equal length and begin together: by the tokens a
# second of fixed numbers of drafts in `bench adaptive` (78ffa9a), 1.5 to 1.7 at 128 rows.
OF_A_LOAD = 1.5

# Milliseconds of a whole step, and of reading its bytes.
Figures = np.ndarray


def _figures_of(figures: dict[str, Any]) -> Figures:
    return np.array([figures["step_ms"], figures["floor_ms"]])


def _between(curve: dict[int, Figures], at: float) -> Figures:
    """Along the logarithm of rows: experts are reached, and tiles filled, by factors."""
    known = sorted(curve)
    values = np.array([curve[rows] for rows in known])
    return np.array([np.interp(np.log(at), np.log(known), column) for column in values.T])


class MeasuredSteps:
    """
    Args:
        factors: what drafts make of a plain step, by their number, instead of what was measured.
    """

    def __init__(self, factors: dict[int, float] | None = None):
        self.factors = factors
        self.seconds = cache(self._seconds)

    @cached_property
    def _read(self) -> dict[str, Any]:
        return json.loads(RECORD.read_text())

    @cached_property
    def _record(self) -> dict[int, dict[str, Any]]:
        return {row["rows"]: row for row in self._read["rows"]}

    @cached_property
    def _plain(self) -> dict[int, Figures]:
        return {rows: _figures_of(row) for rows, row in self._record.items()}

    @cached_property
    def _cycle(self) -> dict[int, Figures]:
        return {rows: _figures_of(row["cycle"]) for rows, row in self._record.items()}

    @cached_property
    def _draft(self) -> Figures:
        """All passes of a cycle's draft."""
        both = [rows for rows in self._cycle if rows * (DRAFTED + 1) in self._plain]
        return np.median([self._cycle[n] - self._plain[n * (DRAFTED + 1)] for n in both], axis=0)

    @cached_property
    def _target(self) -> dict[int, Figures]:
        """By tokens: more of them than plain steps have are known from cycles."""
        windows = {rows * (DRAFTED + 1): figures - self._draft for rows, figures in self._cycle.items()}
        return windows | self._plain

    @cached_property
    def _prompts(self) -> dict[int, dict[int, tuple[list[int], list[float]]]]:
        """By drafts and decode rows: prompt tokens of buckets, and the milliseconds of full ones beyond those rows'."""
        out = {}
        for name, drafts in (("plain", 0), ("cycle", DRAFTED)):
            found: dict[int, dict[int, float]] = {}
            for step in self._read["prompt_steps"][name]:
                rows, tokens = step["decode_rows"], step["prompt_tokens"]
                extra = step["step_ms"] - float(self._measured(rows, drafts)[0])
                of_rows = found.setdefault(rows, {0: 0.0})
                of_rows[tokens] = min(extra, of_rows.get(tokens, extra))
            out[drafts] = {rows: (sorted(each), [each[n] for n in sorted(each)]) for rows, each in found.items()}
        return out

    def _prompt_ms(self, tokens: int, rows: int, drafts: int) -> float:
        of_drafts = [
            np.interp(rows, sorted(known), [np.interp(tokens, *known[n]) for n in sorted(known)])
            for _, known in sorted(self._prompts.items())
        ]
        return float(np.interp(drafts, sorted(self._prompts), of_drafts))

    def _figures(self, rows: int, drafts: int) -> Figures:
        if self.factors is not None:
            return _between(self._plain, rows) * self.factors[drafts]
        return self._measured(rows, drafts)

    def _measured(self, rows: int, drafts: int) -> Figures:
        if drafts == DRAFTED:
            return _between(self._cycle, rows)
        return _between(self._target, rows * (drafts + 1)) + self._draft * drafts / DRAFTED

    def _decode_ms(self, rows: int, live: int, drafts: int) -> float:
        whole, reads = self._figures(rows, drafts)
        ms = float(whole - reads + self._figures(max(live, 1), drafts)[1])
        return ms + FEW_PADDED_MS * (live <= FEW_ROWS < rows)

    def _seconds(self, bucket: Bucket, rows: int | None = None, prompt_tokens: int | None = None) -> float:
        """Of a step with so many live decode rows and prompt tokens; by default with all that the bucket holds."""
        ms = self._decode_ms(bucket.decode_rows, bucket.decode_rows if rows is None else rows, bucket.drafts)
        if whole := bucket.prefill_tokens:
            live = whole if prompt_tokens is None else prompt_tokens
            part = PADDED + (1 - PADDED) * live / whole
            ms += OF_A_LOAD * part * self._prompt_ms(whole, bucket.decode_rows, bucket.drafts)
        if bucket.variant == "full":
            ms += FULL_MS
        return 1e-3 * ms
