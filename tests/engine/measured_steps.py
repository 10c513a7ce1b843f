"""What steps of an H200 cost, by their bucket and by what is live in it: from a record of `bench step`.

A padding row reaches no expert and reads one page. So a step takes what was measured with all its rows live, less the time
in which the bytes of the rows that are not live would be read; the record has both for plain steps and for cycles of three
drafts. Other numbers of drafts k: a window of k + 1 tokens costs the target what as many rows of one token do (a cycle's
time beyond that is nearly the same at 1, 4, 16 and 32 rows: three passes of the draft), and k of the three passes.
"""

import json
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.engine.buckets import Bucket

RECORD = Path(__file__).parents[2] / "bench" / "results" / "step_vllm_h200.json"
DRAFTED = 3
# What a full sampler costs rows that need none, at 128 rows of logits: of a trace's parts those that all rows still pass
# through (docs/kernels/sampling.md: rules of the logits 87 us, two selections 66). Fewer rows take launches instead.
FULL_MS, FULL_ROWS = 0.153, 128

# Milliseconds of a whole step, and of reading its bytes.
Figures = np.ndarray


def _read(figures: dict[str, Any]) -> Figures:
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
    def _record(self) -> dict[int, dict[str, Any]]:
        return {row["rows"]: row for row in json.loads(RECORD.read_text())["rows"]}

    @cached_property
    def _plain(self) -> dict[int, Figures]:
        return {rows: _read(row) for rows, row in self._record.items()}

    @cached_property
    def _cycle(self) -> dict[int, Figures]:
        return {rows: _read(row["cycle"]) for rows, row in self._record.items()}

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
    def _prompt_ms(self) -> tuple[float, float]:
        """Of a token of a bucket for prompts, and what a live one costs more.

        From the prompt rates of 1 and 4 prompts that run in the record's one bucket, beside rows of which none is live.
        """
        budget = json.loads(RECORD.read_text())["max_num_batched_tokens"]["plain"]
        context = json.loads(RECORD.read_text())["context"]
        one, four = (1e3 * n * context / self._record[n]["prefill_tokens_per_s"] for n in (1, 4))
        live = (four - one) / (3 * context)
        return (one - live * context - self._decode_ms(max(self._record), 1, 0)) / budget, live

    def _figures(self, rows: int, drafts: int) -> Figures:
        if self.factors is not None:
            return _between(self._plain, rows) * self.factors[drafts]
        if drafts == DRAFTED:
            return _between(self._cycle, rows)
        return _between(self._target, rows * (drafts + 1)) + self._draft * drafts / DRAFTED

    def _decode_ms(self, rows: int, live: int, drafts: int) -> float:
        whole, reads = self._figures(rows, drafts)
        return float(whole - reads + self._figures(max(live, 1), drafts)[1])

    def _seconds(self, bucket: Bucket, rows: int | None = None, prompt_tokens: int | None = None) -> float:
        """Of a step with so many live decode rows and prompt tokens; by default with all that the bucket holds."""
        ms = self._decode_ms(bucket.decode_rows, bucket.decode_rows if rows is None else rows, bucket.drafts)
        token, live = self._prompt_ms
        ms += token * bucket.prefill_tokens + live * (bucket.prefill_tokens if prompt_tokens is None else prompt_tokens)
        if bucket.variant == "full":
            ms += FULL_MS * max(1.0, (bucket.prefill_rows + bucket.decode_rows * bucket.window) / FULL_ROWS)
        return 1e-3 * ms
