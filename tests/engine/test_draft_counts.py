"""The number of drafts may change from step to step, to none and back: no text depends on it, and nothing is lost."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.compat import compiles
from jaxspec.engine.adaptive_drafts import AdaptiveDrafts
from jaxspec.engine.calibration import Calibration
from jaxspec.engine.costs import StepCosts
from jaxspec.engine.draft_control import FixedDrafts
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.models.metadata import LiveRows
from jaxspec.sampling.params import SamplingParams
from tests.caches import empty_cache, single_request
from tests.engine.scripted import (
    changing_runner,
    engine_over,
    greedy_requests,
    plain_run,
    plain_runner,
    tiny_draft,
    with_pattern,
)
from tests.engine.test_engine import assert_equal_runs
from tests.engine.test_schedules import options
from tests.engine.tiny import EOS, VOCAB, cached, fill_cache, run

K = 3
TOKENS = 34
REAL = ("nextn", "llama", "mla")


class Forced(FixedDrafts):
    """One number of drafts after the other, again and again."""

    def __init__(self, sequence):
        super().__init__(K)
        self._sequence = itertools.cycle(sequence)

    def choose(self, load):
        wanted = next(self._sequence)
        return wanted if wanted in load.choices else load.choices[0]


def make_engine(runner, control, usable=None):
    fill_cache(runner, 0.0)
    engine = Engine(runner, vocab_size=VOCAB, eos_token_ids=(EOS,), control=control)
    if usable is not None:
        engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - usable)
    return engine


def requests():
    """Greedy and seeded ones, of all numbers of drafts, of one chunk and several."""
    made = []
    for i, request in enumerate(greedy_requests(VOCAB)):
        temperature = (0.0, 0.7, 0.0, 1.5)[i % 4]
        params = SamplingParams(
            max_tokens=TOKENS, temperature=temperature, seed=i, ignore_eos=True,
            num_speculative_tokens=(None, None, None, None, None, 1, 0, 2)[i],
        )  # fmt: skip
        made.append(Request(request.id, request.prompt_ids, params))
    return made


@cached
def plain_texts():
    """Of `requests`, and the first of them as texts for the pattern draft, which is then right about most tokens."""
    ids, logprobs, _ = run(engine_over(plain_runner()), requests())
    return ids, logprobs, [[*r.prompt_ids, *ids[r.id]] for r in requests()]


def check_sequence(runner, sequence, *, depth, mixed, usable=None):
    want = plain_texts()
    with options(runner, readout_depth=depth, mixed=mixed):
        engine = make_engine(runner, Forced(sequence), usable)
        assert_equal_runs(run(engine, requests()), want)
    stats = engine.stats()
    assert sum(stats.steps_by_drafts.values()) == stats.num_steps
    assert {k for k, steps in stats.steps_by_drafts.items() if steps} <= set(sequence) | {0}
    return engine


SEQUENCES = list(itertools.product((0, 1, K), repeat=4))
EVERY = [(s, depth, mixed) for s in SEQUENCES for depth in range(4) for mixed in (True, False)]


def check(draft, cases):
    runner = changing_runner(K, draft)
    accepted = preempted = 0
    plain_texts()
    make_engine(runner, Forced(cases[0][0]), None)  # fills the pages, with operations that compile once
    before = compiles.total
    for i, (sequence, depth, mixed) in enumerate(cases):
        engine = check_sequence(runner, sequence, depth=depth, mixed=mixed, usable=(None, 4, 5)[i % 3])
        accepted += engine.stats().acceptance.num_accepted
        preempted += engine.stats().num_preemptions
    assert compiles.total == before
    assert preempted > 0
    return accepted


@pytest.mark.long
def test_text_does_not_depend_on_the_number_of_drafts():
    """A sample of `EVERY`: none, one and k drafts in any order, read late, in mixed steps, under preemption."""
    with with_pattern(changing_runner(K), plain_texts()[2], seed=1):
        assert check("pattern", random.Random(0).sample(EVERY, 4)) > 0


@pytest.mark.full
def test_text_does_not_depend_on_any_sequence_of_drafts():
    with with_pattern(changing_runner(K), plain_texts()[2], seed=1):
        assert check("pattern", EVERY) > 0


@pytest.mark.full
@pytest.mark.parametrize("draft", REAL)
def test_text_does_not_depend_on_the_number_of_drafts_of_any_draft(draft):
    check(draft, random.Random(1).sample(EVERY, 60))


@pytest.mark.long
def test_a_perfect_draft_stays_perfect():
    """The draft reads a row's whole history from its cache: a key that a step without drafts left out would show."""
    ids, _, texts = plain_run()
    runner = changing_runner(K)
    with with_pattern(runner, texts):
        for sequence in ((0, K, K), (K, 0, 0, 0, 1, 1), (0, 1, K, 1, 0, K)):
            engine = make_engine(runner, Forced(sequence))
            assert run(engine, greedy_requests(VOCAB))[0] == ids
            acceptance = engine.stats().acceptance
            assert acceptance.num_accepted == acceptance.num_drafted > 0
            assert acceptance.num_steps < engine.stats().num_steps * len(ids)


@pytest.mark.parametrize("draft", REAL)
def test_keys_alone_are_those_of_a_whole_pass(draft):
    module, params = tiny_draft(draft)
    page, count = 16, 12
    meta = single_request(0, count, pages=2, page_size=page, prefill=True)
    cache = empty_cache(module.cache_spec, 3, page)
    rng = np.random.default_rng(0)
    embedded, hidden = (jnp.asarray(rng.standard_normal((count, 32)), jnp.float32) for _ in range(2))
    live = LiveRows(jnp.array([count - 1]), meta.prefill_tables, jnp.array([count]))
    graphdef, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, params)

    @jax.jit
    def both(state, cache):
        draft = nnx.merge(graphdef, state)
        _, whole = draft.catch_up(embedded, hidden, live, cache, meta)
        return whole, draft.write_keys(embedded, hidden, cache, meta)

    whole, keys = both(state, cache)
    for one, other in zip(whole, keys, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one[1, :count]).any()


@pytest.mark.slow
def test_requests_that_want_no_drafts():
    """In company they ride along and verify none; alone, no step has drafts, and nothing counts as drafted."""
    ids, _, texts = plain_run()
    runner = changing_runner(K)

    def wanting(number, count):
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, num_speculative_tokens=number)
        return [Request(r.id, r.prompt_ids, params) for r in greedy_requests(VOCAB)[:count]]

    with with_pattern(runner, texts):
        engine = make_engine(runner, None)
        got, _, _ = run(engine, wanting(0, 8))
        assert got == ids
        stats = engine.stats()
        assert stats.steps_by_drafts[0] == stats.num_steps
        assert stats.acceptance.num_drafted == stats.acceptance.num_steps == 0
        engine = make_engine(runner, FixedDrafts(K))
        run(engine, wanting(1, 2))
        assert engine.stats().steps_by_drafts[K] == 0
        one, other = wanting(0, 1)[0], wanting(None, 2)[1]
        run(engine, [one, other])
        assert engine.stats().steps_by_drafts[K] > 0
        assert (one.drafted, sum(one.windows)) == (0, 0)
        assert other.drafted == K * sum(other.windows) > 0
        assert [one.tokens[one.prompt_len :], other.tokens[other.prompt_len :]] == [ids[one.id], ids[other.id]]


@pytest.mark.long
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.full), 2])
def test_the_engine_follows_acceptance(depth):
    """With steps that cost what they do on a GPU: drafts end where none is accepted, and come back with acceptance."""
    ids, _, texts = plain_run()
    runner = changing_runner(K)
    factor = {0: 1.0, 1: 1.15, K: 1.4}
    costs = StepCosts({(b, b.decode_rows): 1e-3 * factor[b.drafts] for b in runner.buckets})
    with options(runner, readout_depth=depth):
        control = AdaptiveDrafts(K, runner.settings.max_slots, costs)
        engine = make_engine(runner, control)

        def again():
            before = engine.stats().steps_by_drafts
            batch = greedy_requests(VOCAB)
            for _ in range(5):
                engine.reset_prefix_cache()
                assert run(engine, [Request(r.id, r.prompt_ids, r.params) for r in batch])[0] == ids
            after = engine.stats().steps_by_drafts
            return {k: after[k] - before[k] for k in after}

        wrong = [[(t + 1) % VOCAB for t in text] for text in texts]
        with with_pattern(runner, wrong):
            ran = again()
            assert ran[0] > 0.8 * sum(ran.values())
            assert ran[1] > 0  # probes go on
        with with_pattern(runner, texts):
            assert again()[K] > 0  # the next probe may be a hundred steps away
            ran = again()
            assert ran[K] > 0.9 * sum(ran.values())


@pytest.mark.slow
def test_costs_are_measured_with_busy_rows():
    """Every bucket has a cost, the device's view of its slots is as before, and requests notice nothing."""
    ids, _, texts = plain_run()
    runner = changing_runner(K)
    kept = ("page_table", "seq_len", "last_token", "done", "params_f", "params_i", "stop_ids", "held", "drafts")
    before, compiled = {name: np.array(getattr(runner.state, name)) for name in kept}, compiles.total
    costs = Calibration(runner, VOCAB).measure([range(1, runner.settings.num_pages)])
    assert compiles.total == compiled
    assert all(costs.seconds_in(bucket, bucket.decode_rows) > 0 for bucket in runner.buckets)
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(runner.state, name), value)
    engine = Engine(runner, vocab_size=VOCAB, control=AdaptiveDrafts(K, runner.settings.max_slots, costs))
    with with_pattern(runner, texts):
        assert run(engine, greedy_requests(VOCAB))[0] == ids


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_steps_are_timed_where_they_follow_each_other(depth):
    """On a GPU each step of decode rows only that was planned before the one before it was read; on a CPU none."""
    told, steps = [], []

    class Timed(AdaptiveDrafts):
        def took(self, bucket, rows, tokens, seconds):
            told.append((bucket, rows, tokens))
            assert seconds > 0

    runner = changing_runner(K)
    for on_gpu in (True, False):
        told.clear()
        steps.clear()
        with options(runner, readout_depth=depth, on_gpu=on_gpu):
            engine = make_engine(runner, Timed(K, runner.settings.max_slots))
            engine.observer = lambda step: steps.append((step.bucket, step.plan))
            run(engine, greedy_requests(VOCAB))
        # The first step of all follows none.
        alone = [(b, len(p.decode)) for b, p in steps[1:] if p.decode and not p.prefill]
        assert [each[:2] for each in told] == (alone if on_gpu and depth else [])
        assert all(tokens >= rows for _, rows, tokens in told)
