"""Penalties of requests whose beginning the prefix cache has: the text is that of a prompt which was computed whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.compat import compiles
from jaxspec.engine.counts import CountUpload
from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.plan import PrefillRow
from jaxspec.engine.request import Request, RequestState
from jaxspec.sampling.params import SamplingParams
from pallas_kernels.logit_rules.reference import PROMPT_BIT
from tests.engine.test_engine import assert_equal_runs
from tests.engine.test_schedules import make_engine, options
from tests.engine.test_transforms import ALL, poison_rules
from tests.engine.tiny import VOCAB, cached, fill_cache, run, tiny_runner
from tests.matrices import full

SPECULATING = [0, pytest.param(3, marks=pytest.mark.long)]
PENALTIES = (
    {"repetition_penalty": 1.8}, {"presence_penalty": 1.5}, {"repetition_penalty": 0.6}, {"frequency_penalty": 0.8},
    {"presence_penalty": -2.0}, ALL, {},
)  # fmt: skip
# A page and a bit that all share; each goes on alone, and its output fills the second page.
SHARED, LENGTH, NEW_TOKENS = 70, 100, 60

# Readout depth, mixed steps, usable pages.
DRAFTING = ((2, False, None), (1, True, 5))
OTHERS = ((0, False, 5), (1, True, None), (2, False, 4), (3, True, 5), (3, False, None))


def requests():
    """Greedy and seeded ones with each penalty."""
    rng = np.random.default_rng(7)
    shared = rng.integers(6, VOCAB, SHARED).tolist()
    for i, penalties in enumerate(PENALTIES):
        params = SamplingParams(
            max_tokens=NEW_TOKENS, temperature=(0.0, 0.9)[i % 2], seed=i, ignore_eos=True, **penalties
        )
        yield Request(f"r{i}", shared + rng.integers(6, VOCAB, LENGTH - SHARED).tolist(), params, arrival_time=i)


@cached
def want():
    """Without drafts and without prefix cache."""
    with options(tiny_runner(0), prefix_caching=False):
        return run(make_engine(tiny_runner(0)), list(requests()))[:2]


class Watched:
    """An engine whose pages hold what the requests share; it notes how many tokens each prompt row has counted."""

    def __init__(self, k, usable=None):
        runner = tiny_runner(k)
        fill_cache(runner, 0.0)
        poison_rules(runner)
        self.engine = make_engine(runner, usable)
        first = next(requests())
        run(self.engine, [Request("writer", first.prompt_ids[:SHARED], SamplingParams(max_tokens=1))])
        self.counted: dict[str, list[int]] = {}
        self.engine.observer = self._watch

    def _watch(self, step):
        for row in step.plan.prefill:
            if row.cached:
                self.counted.setdefault(row.request.id, []).append(row.cached)


@pytest.mark.parametrize(
    ("k", "depth", "mixed", "usable"),
    [
        pytest.param(0, 0, True, None, marks=pytest.mark.long),
        *(pytest.param(3, *each, marks=pytest.mark.long) for each in DRAFTING),
        *full(*((0, *each) for each in DRAFTING), (3, 0, True, None)),
        *full(*((k, *each) for k in (0, 3) for each in OTHERS)),
    ],
)
def test_penalties_count_what_the_prefix_cache_had(k, depth, mixed, usable):
    with options(tiny_runner(k), readout_depth=depth, mixed=mixed):
        watched = Watched(k, usable)
        made, expected = list(requests()), want()
        before = compiles.total
        assert_equal_runs(run(watched.engine, made), expected)
    assert compiles.total == before
    assert all(request.num_cached_tokens == 64 for request in made)
    # Those of presence and frequency count output alone: nothing but the step's own tokens.
    assert {"r0", "r2", "r5"} <= set(watched.counted)
    assert all(counts[0] == 64 for counts in watched.counted.values() if not usable)
    assert "r6" not in watched.counted
    assert not usable or watched.engine.stats().num_preemptions


@pytest.mark.parametrize("k", SPECULATING)
def test_who_resumes_finds_its_own_output(k):
    """A preempted request's pages are still in the prefix cache, and what they hold of its output is counted again."""
    watched = Watched(k)
    engine, made = watched.engine, list(requests())
    ids, waiting = {r.id: [] for r in made}, set(made)
    engine.add(*made)
    while engine.has_work:
        for out in engine.step():
            ids[out.request_id] += out.new_ids
        for request in [r for r in waiting if r.num_output >= 35 and r.state is RequestState.DECODE]:
            engine.scheduler.preempt(request)
            waiting.remove(request)
    assert not waiting
    assert ids == want()[0]
    assert {name: counts[-1] for name, counts in watched.counted.items()} == {f"r{i}": 128 for i in range(6)}


def test_long_texts_take_several_uploads(monkeypatch):
    """Against NumPy: repeated ids, prompts that end inside an upload and at its end, no output, slots in any state."""
    monkeypatch.setattr("jaxspec.engine.counts.UPLOAD_TOKENS", (4, 16))
    S, V, slot = 4, 30, 2
    rng = np.random.default_rng(0)
    counts = rng.integers(0, PROMPT_BIT, (S, V)).astype(np.int32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    upload = CountUpload(jnp.array(counts), 100, mesh)
    state = upload.warm_up(jnp.array(counts), ExecutableStore(None, mesh))
    for cached_tokens, prompt_len in ((1, 1), (4, 9), (5, 3), (16, 16), (40, 16), (40, 21), (35, 60)):
        tokens = rng.integers(0, V, 60).tolist()
        request = Request("r", tokens[:prompt_len], SamplingParams())
        request.tokens, request.slot = tokens, slot
        for packed in upload.packed(PrefillRow(request, cached_tokens, 1, False, cached=cached_tokens)):
            state = upload(state, packed)
        want_row = np.zeros(V, np.int32)
        want_row[tokens[: min(prompt_len, cached_tokens)]] = PROMPT_BIT
        np.add.at(want_row, tokens[prompt_len:cached_tokens], 1)
        got = np.asarray(state)
        np.testing.assert_array_equal(got[slot], want_row)
        np.testing.assert_array_equal(got[[1, 3]], counts[[1, 3]])
