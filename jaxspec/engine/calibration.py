"""What steps cost on this device, measured by running every bucket with rows that are as busy as requests'.

Padding rows reach no expert and read one page, so steps of padding alone would make windows look free. What was measured is
kept beside the bucket's executable, under the same kind of key, so that a later start need not measure it again.
"""

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from jaxspec.config import Settings
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.costs import StepCosts
from jaxspec.engine.pages import PADDING_PAGE
from jaxspec.engine.runner import Runner
from jaxspec.engine.state import MAX_LEN, NUM_DRAFTS, PARAMS_F, PARAMS_I, STOP_IDS

# Two numbers of steps in a row, without prompts and with them: a step is what the second takes longer than the first, as both
# begin with an idle device and end with a wait for it. With the one before them a row stays on its page.
STEPS, PROMPT_STEPS = (1, 4), (1, 2)
# All that is unknown takes its turn in every round, and the fastest counts: what disturbs the device or the host for a while
# should not make some steps look dear beside others.
ROUNDS = 3
# Tokens that decode rows begin with, and where what their contexts add is measured.
CONTEXT, LONG_CONTEXT = 32, 2048
# Of its record.
TOKEN = "token"
# Of each rank, the pages that may be written to.
Pages = Sequence[Sequence[int]]
logger = logging.getLogger(__name__)


class Calibration:
    """What a runner's steps cost: what earlier starts have kept, and what is measured since, as buckets come.

    Args:
        runner: what is known is also told to it, so that plans run in the cheapest bucket.
    """

    def __init__(self, runner: Runner, vocab_size: int):
        self._runner, self._vocab_size = runner, vocab_size
        if runner.settings.lookup is not None:
            runner.hold(0)  # before a request slots hold none: this compiles it, later it must not compile
        self._seconds: defaultdict[Bucket, dict[int, float]] = defaultdict(dict)  # by number of busy rows
        for bucket in runner.buckets:
            names = {str(rows): rows for rows in numbers_of_rows(bucket)}
            kept = runner.store.load_record(runner.compiler.key("costs", bucket), names) or {}
            self._seconds[bucket] = {names[name]: seconds for name, seconds in kept.items()}
        # Of each number of drafts the decode step of most rows, of which the time that a context takes is measured.
        self._widest: dict[int, Bucket] = {}
        for bucket in sorted((b for b in runner.buckets if b.decode_rows), key=_size):
            self._widest[bucket.drafts] = bucket
        self._context = min(LONG_CONTEXT, runner.settings.max_model_len // 2)
        self._token_seconds: dict[int, float] = {}
        for drafts, bucket in self._widest.items():
            if self._context <= CONTEXT:
                self._token_seconds[drafts] = 0.0
            elif record := runner.store.load_record(runner.compiler.key("context", bucket), {TOKEN}):
                self._token_seconds[drafts] = record[TOKEN]
        if known := sum(map(self._is_known, runner.buckets)):
            logger.info("what %d of %d steps cost was measured by an earlier start", known, len(runner.buckets))

    def _is_known(self, bucket: Bucket) -> bool:
        return len(self._seconds[bucket]) == len(numbers_of_rows(bucket))

    @property
    def unknown(self) -> list[tuple[Bucket, int]]:
        """The buckets that can run, and how many of their rows have yet to be busy while they are measured."""
        ready = self._runner.ready
        return [(b, rows) for b in ready for rows in numbers_of_rows(b) if rows not in self._seconds[b]]

    def measure(self, pages: Pages, most: int = sys.maxsize) -> StepCosts:
        """Measures so much of what is `unknown`, and keeps it for later starts. No request may run meanwhile.

        The pages hold other finite values afterwards. All else that requests depend on is as before.

        Returns:
            Of the buckets of which all is known. Where no step of some number of drafts is among them, it has no cost.
        """
        runner = self._runner
        if unknown := self.unknown[:most]:
            for (bucket, rows), value in self._timed(unknown, pages, CONTEXT).items():
                self._seconds[bucket][rows] = value
        for bucket in dict.fromkeys(bucket for bucket, _ in unknown):
            if self._is_known(bucket):
                of_rows = self._seconds[bucket]
                runner.store.save_record(
                    runner.compiler.key("costs", bucket), {str(rows): of_rows[rows] for rows in of_rows}
                )
                text = "; ".join(f"{rows} rows: {1e3 * value:.2f} ms" for rows, value in of_rows.items())
                logger.info("measured what a step costs: %s, %s", bucket, text)
        for drafts, bucket in self._widest.items():
            if drafts not in self._token_seconds and bucket in runner.ready:
                self._token_seconds[drafts] = self._measure_context(bucket, pages)
        known = [bucket for bucket in runner.buckets if self._is_known(bucket)]
        runner.bucket_seconds = {bucket: self._seconds[bucket][bucket.decode_rows] for bucket in known}
        seconds = {(b, rows): value for b in known for rows, value in self._seconds[b].items()}
        return StepCosts(seconds, CONTEXT, self._token_seconds)

    def _timed(
        self, cases: Sequence[tuple[Bucket, int]], pages: Pages, context: int
    ) -> dict[tuple[Bucket, int], float]:
        runner = self._runner
        busy = busy_state(runner.settings, self._vocab_size, pages, context)
        counts = ("expert_load",) if runner.settings.expert_load_metrics else ()
        before = {name: np.array(getattr(runner.state, name)) for name in (*busy, *counts)}
        seconds = step_seconds(runner, cases, busy, self._vocab_size)
        runner.put(**before)
        return seconds

    def _measure_context(self, bucket: Bucket, pages: Pages) -> float:
        """What a token of a decode row's context adds to a step."""
        runner, case = self._runner, (bucket, bucket.decode_rows)
        # Both now, so that what disturbs one disturbs the other: their difference is small beside either.
        short, long = (self._timed([case], pages, context)[case] for context in (CONTEXT, self._context))
        *_, rows = busy_counts(bucket, bucket.decode_rows, runner.settings)
        # A record has positive numbers.
        seconds = max((long - short) / rows / (self._context - CONTEXT), 1e-15)
        runner.store.save_record(runner.compiler.key("context", bucket), {TOKEN: seconds})
        logger.info("measured what a token of context costs: %s, %.3g ns", bucket, 1e9 * seconds)
        return seconds


def _size(bucket: Bucket) -> tuple[bool, int, bool]:
    """In the order of what contexts are best measured in: without prompts if there is one, with the most rows."""
    return not bucket.prefill_tokens, bucket.decode_rows, bucket.variant == "lean"


def numbers_of_rows(bucket: Bucket) -> list[int]:
    """How many busy rows a bucket is measured with, fewest first.

    Fewer rows reach fewer experts, and windows cost more beside that: of decode steps also a half, a quarter and an eighth.
    """
    rows = bucket.decode_rows
    return [rows] if bucket.prefill_tokens else sorted({-(-rows // part) for part in (1, 2, 4, 8)})


def step_seconds(
    runner: Runner, cases: Sequence[tuple[Bucket, int]], busy: Mapping[str, np.ndarray], vocab_size: int
) -> dict[tuple[Bucket, int], float]:
    """Of a step in each bucket with so many busy rows, from the state `busy` on: each has all its drafts to verify."""
    fastest: dict[tuple[Bucket, int], np.ndarray] = {}
    for case in [*cases] * ROUNDS:
        runner.put(**busy)
        times = np.array(seconds_of_steps(runner, *case, vocab_size))
        fastest[case] = np.minimum(times, fastest.get(case, times))
    out = {}
    for case, (few, many) in fastest.items():
        least, most = _numbers_of_steps(case[0])
        # At least half of the average, should a few steps have been disturbed in every round.
        out[case] = max((many - few) / (most - least), many / most / 2)
    return out


def _numbers_of_steps(bucket: Bucket) -> tuple[int, int]:
    return PROMPT_STEPS if bucket.prefill_tokens else STEPS


def seconds_of_steps(runner: Runner, bucket: Bucket, rows: int, vocab_size: int) -> list[float]:
    """Of both numbers of steps, each from an idle device to an idle device."""
    settings, times = runner.settings, []
    inputs = np.tile(busy_inputs(runner, bucket, rows, vocab_size), settings.data_parallel_size)
    for number in (1, *_numbers_of_steps(bucket)):  # the first finds arrays elsewhere than the last run did
        started = time.perf_counter()
        for _ in range(number):
            if settings.lookup is not None:  # which finds hardly anything in such texts
                runner.hold(settings.num_speculative_tokens)
            runner.run_packed(bucket, inputs)
        runner.wait()
        times.append(time.perf_counter() - started)
    return times[1:]


def busy_inputs(runner: Runner, bucket: Bucket, rows: int, vocab_size: int) -> np.ndarray:
    """A rank's packed inputs of a step whose prompts are full, of equal length and begin, in the first slots; `rows` decode."""
    layout = runner.layouts[bucket]
    flat = np.zeros(layout.size, np.int32)
    inputs = layout.split(flat)
    prompts, length, decode = busy_counts(bucket, rows, runner.settings)
    if prompts:
        inputs.chunk_ids[:] = np.random.default_rng(0).integers(0, vocab_size, bucket.prefill_tokens)
        for row in range(prompts):
            inputs.prefill[row] = (row + 1, 0, length, 1, -1, -1, 0)
    inputs.decode_slots[:decode] = prompts + 1 + np.arange(decode)
    return flat


def busy_counts(bucket: Bucket, rows: int, settings: Settings) -> tuple[int, int, int]:
    """Of a rank: prompts, tokens of each, and so many of `rows` decode rows as there are slots for."""
    slots = settings.max_num_seqs
    prompts = min(bucket.prefill_rows, max(slots // 2, 1))
    length = min(bucket.prefill_tokens // max(prompts, 1), settings.max_model_len - 1)
    return prompts, length, min(rows, slots - prompts)


def busy_state(settings: Settings, vocab_size: int, pages: Pages, context: int) -> dict[str, np.ndarray]:
    """Fields of the state in which every slot decodes greedily: some tokens of its own, and drafts where there are any.

    A rank's slots share its pages where these are too few; where there are none, they share that for padding.

    Args:
        context: tokens of each slot, or half of `max_model_len` if that is less.
    """
    rng, S = np.random.default_rng(1), settings.max_slots
    context = min(context, settings.max_model_len // 2)
    params_i = np.zeros((S, PARAMS_I), np.int32)
    params_i[:, MAX_LEN], params_i[:, NUM_DRAFTS] = settings.max_model_len, settings.num_speculative_tokens
    out = {
        "seq_len": np.full(S, context, np.int32),
        "last_token": rng.integers(0, vocab_size, S).astype(np.int32),
        "done": np.zeros(S, bool),
        "params_f": np.zeros((S, PARAMS_F), np.float32),
        "params_i": params_i,
        "stop_ids": np.full((S, STOP_IDS), -1, np.int32),
    }
    if k := settings.num_speculative_tokens:
        out |= {"drafts": rng.integers(0, vocab_size, (S, k)).astype(np.int32), "held": np.full(S, k, np.int32)}
    state = {name: np.concatenate([value] * settings.data_parallel_size) for name, value in out.items()}
    tables = [np.resize(np.array(each or [PADDING_PAGE], np.int32), (S, settings.max_pages)) for each in pages]
    for table in tables:
        table[0] = PADDING_PAGE
    return state | {"page_table": np.concatenate(tables)}
