"""The real step under schedules of every kind: each request's ids and log-probabilities are those of plain decoding, alone.

Greedy requests and seeded ones: neither's text may depend on the draft.

Arrivals, aborts, stops inside a window, shared prompts, pools that force preemption, rows that wait for their output,
readout depths, mixed steps on and off; without a draft, with the three kinds of drafts, with one that is
right often, and with what is looked up in the text.
"""

import contextlib
import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.compat import compiles
from jaxspec.engine.engine import Engine
from jaxspec.engine.output import FinishReason
from jaxspec.engine.request import Request
from jaxspec.sampling.params import SamplingParams
from tests.engine.scripted import eagle3_runner, lookup_runner, pattern_runner, plain_runner, with_pattern
from tests.engine.tiny import EOS, VOCAB, cached, fill_cache, run, tiny_runner
from tests.host_rules import StopAfter

pytestmark = pytest.mark.long

# Each runner, and the one that decodes plainly with the same target.
RUNNERS = {
    "plain": (lambda: tiny_runner(0), lambda: tiny_runner(0)),
    "nextn, k=1": (lambda: tiny_runner(1), lambda: tiny_runner(0)),
    "nextn, k=3": (lambda: tiny_runner(3), lambda: tiny_runner(0)),
    "eagle3 llama, k=3": (lambda: eagle3_runner("llama", 3), plain_runner),
    "eagle3 mla, k=3": (lambda: eagle3_runner("mla", 3), plain_runner),
    "pattern, k=3": (lambda: pattern_runner(3), plain_runner),
    "looked up, k=3": (lambda: lookup_runner(3), plain_runner),
    "looked up or nextn, k=3": (lambda: lookup_runner(3, model=True), plain_runner),
    "looked up, k=1": (lambda: lookup_runner(1), plain_runner),
    "looked up, k=7": (lambda: lookup_runner(7), plain_runner),
}
# Each of the others in every run; these add no code that they do not have.
FULL = ("nextn, k=1", "eagle3 mla, k=3", "looked up, k=1", "looked up, k=7")
NEW_TOKENS = 24
# The longest request takes three pages.
POOLS = (3, 4, 6, 39)


@contextlib.contextmanager
def options(runner, **changes):
    """The runner with other settings of the kind that its executables do not depend on."""
    before = runner.settings
    runner.settings = dataclasses.replace(before, **changes)
    try:
        yield
    finally:
        runner.settings = before


def prompts():
    """One text cut at a page border, just beside it and elsewhere, with and without an ending of its own."""
    rng = np.random.default_rng(5)
    text, other = (rng.integers(6, VOCAB - 10, 130).tolist() for _ in range(2))
    return [
        text[:64],
        text[:65],
        text[:63],
        text[:64] + other[:9],
        text[:130],
        text[:128] + other[:1],
        other[:70],
        other[:3],
    ]


def requests(plain, *, stops=True):
    """Every prompt greedily, at temperature 1, and greedily with a stop id that lies inside its text.

    plain: the runner that knows the greedy texts.
    """
    made = []
    for i, prompt in enumerate(prompts()):
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=i, ignore_eos=bool(i % 2))
            made.append((prompt, params))
        stop = (solo(plain, stops=False)[3 * i][0][8 + i],) if stops else ()
        made.append((prompt, dataclasses.replace(made[-2][1], stop_token_ids=stop)))
    return made


@cached
def solo(runner, *, stops=True):
    """(ids, log-probabilities, finish reason) of each of `requests`, alone in a clean pool, each step read at once."""
    results = []
    with options(runner, prefix_caching=False):
        for prompt, params in requests(runner, stops=stops):
            fill_cache(runner, 0.0)
            ids, logprobs, ends = run(make_engine(runner), [Request("r", prompt, params)])
            results.append((ids["r"], logprobs["r"], ends["r"][0]))
    return results


def drafting(name):
    """The runner, whose pattern draft, if that is what it has, knows the greedy texts and is right about most tokens."""
    runner, plain = (made() for made in RUNNERS[name])
    if not name.startswith("pattern"):
        return contextlib.nullcontext(runner)
    texts = [[*prompt, *solo(plain)[3 * i][0]] for i, prompt in enumerate(prompts())]
    return with_pattern(runner, texts, seed=1)


def make_engine(runner, usable=None, **more):
    engine = Engine(runner, vocab_size=VOCAB, eos_token_ids=(EOS,), **more)
    if usable is not None:
        engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - usable)
    return engine


@dataclasses.dataclass(frozen=True)
class Arrival:
    spec: int
    step: int
    abort: int | None
    needs_readback: bool


ARRIVALS = st.builds(
    Arrival,
    spec=st.integers(0, 3 * len(prompts()) - 1),
    step=st.integers(0, 25),
    abort=st.none() | st.none() | st.none() | st.integers(0, 40),
    needs_readback=st.sampled_from([False, False, True]),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in FULL else n for n in RUNNERS])
@settings(max_examples=5)
@given(
    arrivals=st.lists(ARRIVALS, min_size=2, max_size=10),
    depth=st.integers(0, 3),
    mixed=st.booleans(),
    usable=st.sampled_from(POOLS),
    poison=st.sampled_from([0.0, float("nan")]),
)
def test_every_request_is_as_if_alone(name, arrivals, depth, mixed, usable, poison):
    runner, plain = (made() for made in RUNNERS[name])
    specs, want = requests(plain), solo(plain)
    with drafting(name), options(runner, readout_depth=depth, mixed=mixed):
        fill_cache(runner, poison)
        engine = make_engine(runner, usable)
        made = [
            Request(
                f"r{i}", *specs[a.spec], StopAfter(needs_readback=True) if a.needs_readback else None, arrival_time=i
            )
            for i, a in enumerate(arrivals)
        ]
        ids, logprobs, ends = {r.id: [] for r in made}, {r.id: [] for r in made}, {}
        for step in range(2000):
            for request, arrival in zip(made, arrivals, strict=True):
                if arrival.step == step:
                    engine.add(request)
                if arrival.abort == step:
                    engine.abort(request.id)
            if step > 25 and not engine.has_work:
                break
            for out in engine.step() if engine.has_work else ():
                ids[out.request_id] += out.new_ids
                logprobs[out.request_id] += out.new_logprobs
                ends[out.request_id] = ends.get(out.request_id) or out.finish_reason
        assert not engine.has_work
        assert engine.stats().kv_cache_usage == pytest.approx(1 - usable / engine.scheduler.pages.usable)
    for request, arrival in zip(made, arrivals, strict=True):
        want_ids, want_logprobs, want_end = want[arrival.spec]
        if ends[request.id] is not FinishReason.ABORT:
            assert (ids[request.id], ends[request.id].value) == (want_ids, want_end)
        count = len(ids[request.id])
        assert ids[request.id] == want_ids[:count]
        np.testing.assert_allclose(logprobs[request.id], want_logprobs[:count], atol=1e-4)


def test_separate_steps_have_their_own_buckets():
    """Without mixed steps the buckets for prompts have no decode rows at all."""
    runner = tiny_runner(3, mixed=False)
    assert all(not (b.prefill_tokens and b.decode_rows) for b in runner.buckets)
    fill_cache(runner, np.nan)
    made = [Request(f"r{i}", *spec) for i, spec in enumerate(requests(tiny_runner(0)))]
    ids, _, ends = run(make_engine(runner), made)
    for request, (want_ids, _, want_end) in zip(made, solo(tiny_runner(0)), strict=True):
        assert (ids[request.id], ends[request.id][0]) == (want_ids, want_end)


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.full)])
def test_nothing_compiles_in_random_steps(count):
    """Every sampling parameter, prompts of all lengths, shared and not, preemption, aborts; one step read late."""
    check_random_steps(tiny_runner(3), count, full=True)


def check_random_steps(runner, count, *, full):
    """Nothing compiles in so many steps in which requests come and some of them leave, nor until the rest have ended.

    full: the buckets have the sampler that every parameter needs.
    """
    rng, texts = random.Random(0), prompts()
    fill_cache(runner, 0.0)
    with options(runner, readout_depth=1):
        engine = make_engine(runner, usable=12)
        before, added = compiles.total, 0
        for _ in range(count):
            if rng.random() < 0.2 or not engine.has_work:
                params = SamplingParams(max_tokens=rng.randint(1, 60), temperature=rng.choice([0.0, 1.0]), seed=added)
                if full:
                    params = dataclasses.replace(
                        params, top_k=rng.choice([0, 20]), top_p=rng.choice([1.0, 0.9]), min_p=rng.choice([0.0, 0.05]),
                        presence_penalty=rng.choice([0.0, 0.5]), repetition_penalty=rng.choice([1.0, 1.2]),
                        logit_bias={9: 1.0} if rng.random() < 0.2 else {}, logprobs=rng.choice([None, 3]),
                        min_tokens=rng.choice([0, 1]),
                    )  # fmt: skip
                params = dataclasses.replace(params, num_speculative_tokens=rng.choice([None, 0, 2]))
                engine.add(Request(f"r{added}", rng.choice(texts)[rng.choice([0, 0, 5]) :] or [7], params))
                added += 1
            if rng.random() < 0.02:
                engine.abort(f"r{rng.randrange(added)}")
            engine.step()
        while engine.has_work:
            engine.step()
    assert compiles.total == before
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
