"""The table of steps with changing numbers of drafts loses little against the tables of fixed numbers, by measured times.

Requests run in a steady state, as `bench adaptive` has them: each step's tokens end some requests, and as many prompts
begin with the next one, which is a step with prompts then. Without prompts, only the decode steps count. The number of
drafts is the best that there is, always known, so what is lost is lost to padding and to missing steps.
"""

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from jaxspec.engine.acceptance import probability_for
from jaxspec.engine.buckets import Bucket, bucket_table
from jaxspec.lookup import Lookup
from tests.engine.measured_steps import MeasuredSteps
from tests.engine.test_buckets import GPU

K, COUNTS = 3, (0, 1, 3)
ROWS = (1, 4, 8, 16, 32, 64, 128)
PROBABILITIES = [probability_for(length, K) for length in (1.0, 1.5, 2.2, 3.0)]
ADAPTIVE = bucket_table(replace(GPU, num_speculative_tokens=K, adaptive_drafts=True))
FIXED = {k: bucket_table(replace(GPU, num_speculative_tokens=k)) for k in COUNTS}
# Mean tokens of an answer; prompts that begin at once, and samples of what they are long in all.
OUTPUT, MOST_PROMPTS = 256, 6
PROMPTS = [
    np.random.default_rng(n).integers(128, 384, (24, n), endpoint=True).sum(axis=1) for n in range(MOST_PROMPTS + 1)
]
STEPS = MeasuredSteps()


def tokens(p, k):
    """Of a window, on average."""
    return sum(p**i for i in range(k + 1))


@cache
def seconds(bucket, rows, prompt_tokens):
    return STEPS.seconds(bucket, rows, prompt_tokens)


@cache
def times(table, k, rows):
    """Seconds of a step with k drafts and so many prompts, from none on; None: where there is none at all.

    Prompts that are too many for such a step run in one with more drafts, whose tokens are not counted.
    """
    holding = sorted((b for b in table if b.drafts >= k and b.decode_rows >= rows), key=lambda b: b.drafts)
    if not holding or holding[0].drafts != k:
        return None
    out = [min(seconds(b, rows, 0) for b in holding if b.drafts == k)]
    if max(b.prefill_tokens for b in holding) < GPU.max_num_batched_tokens:
        return out
    for sums in PROMPTS[1:]:
        fitting = np.minimum(sums, GPU.max_num_batched_tokens - rows * (k + 1)).tolist()
        out.append(sum(_least(holding, rows, n) for n in fitting) / len(fitting))
    return out


def _least(holding, rows, prompt_tokens):
    fitting = [b for b in holding if b.prefill_tokens >= prompt_tokens]
    return min(seconds(b, rows, prompt_tokens) for b in fitting if b.drafts == fitting[0].drafts)


def rate(decode, mixed, rows, p, k, k_mixed):
    """Tokens a second with `k` drafts in decode steps and `k_mixed` beside prompts; `decode`, `mixed`: their `times`."""
    window = tokens(p, k)
    for _ in range(8):  # how often prompts begin depends on what windows yield, which depends on it
        alone = math.exp(-rows * window / OUTPUT)
        window = alone**2 * tokens(p, k) + 2 * alone * (1 - alone) * tokens(p, min(k, k_mixed))
        window += (1 - alone) ** 2 * tokens(p, k_mixed)
    begin = rows * window / OUTPUT
    shares = [math.exp(-begin) * begin**n / math.factorial(n) for n in range(1, MOST_PROMPTS)]
    shares = [alone, *shares, 1 - alone - sum(shares)]
    return rows * window / sum(share * t for share, t in zip(shares, [decode[0], *mixed[1:]], strict=True))


def best(table, counts, *, prompts):
    """Tokens a second by rows and by probability, with the best of the numbers of drafts; 0 where none can run."""
    out = np.zeros((len(ROWS), len(PROBABILITIES)))
    for (i, rows), (j, p) in itertools.product(enumerate(ROWS), enumerate(PROBABILITIES)):
        known = {k: times(table, k, rows) for k in counts}
        alone = {k: each for k, each in known.items() if each}
        beside = {k: each for k, each in alone.items() if len(each) > 1}
        if prompts:
            rates = [rate(t, u, rows, p, k, m) for (k, t), (m, u) in itertools.product(alone.items(), beside.items())]
        else:
            rates = [rows * tokens(p, k) / each[0] for k, each in alone.items()]
        out[i, j] = max(rates, default=0.0)
    return out


@cache
def best_fixed(prompts):
    return np.max([best(table, (k,), prompts=prompts) for k, table in FIXED.items()], axis=0)


def shares(table):
    """Of the throughput of the best fixed number of drafts: by prompts or not, rows and probability."""
    return np.array([best(table, COUNTS, prompts=prompts) / best_fixed(prompts) for prompts in (True, False)])


def test_little_is_lost():
    """The least are four requests with one draft, which run in steps of 16 rows."""
    assert len(ADAPTIVE) == 24
    of_best = shares(ADAPTIVE)
    assert of_best.min() >= 0.979
    assert np.minimum(of_best, 1).mean() >= 0.9975


def test_where_no_model_drafts_steps_without_drafts_are_a_plain_engine_s():
    """All rows have them where nothing is found, and windows of all drafts where it is. As a share of fixed numbers' speed."""
    table = bucket_table(replace(GPU, num_speculative_tokens=K, adaptive_drafts=True, lookup=Lookup(2, 4)))
    assert {b.drafts for b in table} == {0, K}
    assert len(table) <= 24
    for k in (0, K):
        found = {rows: times(FIXED[k], k, rows)[0] / times(table, k, rows)[0] for rows in ROWS}
        assert min(found.values()) >= 0.97
        assert min(found[rows] for rows in (1, 4, 32, 64, 128)) == 1


def candidates():
    """Steps that a table might have."""
    rows = (*ROWS[:-1], GPU.max_num_seqs)
    decode = [Bucket(0, 0, n, "full", k) for n in rows for k in COUNTS]
    prompts = [Bucket(P, 8, n, "full", k) for P in (256, 384, 512, 1024, 2048) for n in (16, rows[-1]) for k in COUNTS]
    return [*decode, *prompts]


@pytest.mark.full
def test_no_exchange_loses_less():
    """One step for another. Those that hold any plan stay: see `test_pool_size`."""
    kept = {b for b in ADAPTIVE if b.decode_rows == GPU.max_num_seqs and not b.prefill_tokens}
    kept |= {b for b in ADAPTIVE if b.prefill_tokens == GPU.max_num_batched_tokens}
    worst = shares(ADAPTIVE).min()
    for less in set(ADAPTIVE) - kept:
        for more in set(candidates()) - set(ADAPTIVE):
            other = (set(ADAPTIVE) - {less}) | {more}
            assert shares(tuple(sorted(other))).min() <= worst + 0.004, (less, more)
