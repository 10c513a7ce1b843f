"""Where states are kept, over a mock model that checks them: who shares a text finds it, and nobody takes all the room."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config import EngineConfig, resolve
from jaxspec.engine.request import Request
from jaxspec.engine.snapshots import next_cut
from jaxspec.errors import ConfigError
from jaxspec.sampling.params import SamplingParams
from tests.engine.test_scheduler import CONTEXT, PAGE, SETTINGS, make_engine, run

STATES = dataclasses.replace(SETTINGS, page_size=PAGE, num_pages=257, state_snapshots=8)


def ask(engine, name, prompt) -> int:
    """How many tokens of a prompt were found."""
    request = Request(name, prompt, SamplingParams(max_tokens=3, seed=1))
    run(engine, [request])
    return request.num_cached_tokens


@given(
    shared=st.integers(1, 60), own=st.lists(st.integers(1, 30), min_size=3, max_size=5), k=st.sampled_from([0, 3]),
    interval=st.sampled_from([PAGE, 2 * PAGE, CONTEXT, 64 * PAGE]), budget=st.sampled_from([16, 96]),
)  # fmt: skip
def test_the_third_that_shares_a_text_finds_all_of_it(shared, own, k, interval, budget):
    """However short it is beside the interval, and wherever chunks end."""
    settings = dataclasses.replace(
        STATES, num_speculative_tokens=k, state_interval=interval, max_num_batched_tokens=budget
    )
    engine = make_engine(settings)
    # With a draft a page's key has the id after it, which the requests do not share at the end.
    pages = (shared - int(settings.model_drafts)) // PAGE
    for i, length in enumerate(own):
        found = ask(engine, f"user {i}", [*range(shared), *[100 + i] * length])
        assert found == pages * PAGE if i >= 2 else found <= pages * PAGE


@given(st.integers(2, 20_000), st.sampled_from([64, 128, 1024]), st.integers(0, 300))
def test_cuts_of_a_prompt_are_few_and_follow_each_other(target, interval, parting):
    parting *= 64
    cuts = [0]
    while (cut := next_cut(cuts[-1], target, page_size=64, interval=interval, parting=parting)) is not None:
        assert cuts[-1] < cut < target
        assert cut % 64 == 0
        cuts.append(cut)
    last = (target - 1) // 64 * 64
    assert cuts[-1] == last
    assert parting in cuts or parting > last
    assert interval in cuts or interval > last
    assert len(cuts) <= (target // interval).bit_length() + 3
    # What another prompt shares is found to a half at least, once it is an interval long.
    assert all(b <= max(2 * a, interval) for a, b in itertools.pairwise(cuts))


def test_a_long_prompt_leaves_the_states_of_others():
    """One of 63 pages, with an interval of one."""
    engine = make_engine(dataclasses.replace(STATES, state_snapshots=12, state_interval=PAGE))
    short = {f"short {i}": [i] * (PAGE + 1) for i in range(4)}
    for name, prompt in short.items():
        assert ask(engine, name, prompt) == 0
    assert ask(engine, "long", [9] * (63 * PAGE + 1)) == 0
    assert all(ask(engine, f"{name} again", prompt) == PAGE for name, prompt in short.items())
    assert ask(engine, "long again", [9] * (63 * PAGE + 1)) == 63 * PAGE


@pytest.mark.parametrize(
    ("options", "paged", "message"),
    [
        ({"state_interval": 100}, False, r"state_interval \(--state-interval\) must be a multiple of the 64 tokens"),
        ({"state_interval": 32}, False, "must be at least 64"),
        ({"state_snapshots": 0}, False, r"state_snapshots \(--state-snapshots\) must be at least 1"),
        ({"state_snapshots": 5}, True, "this model keeps no states"),
        ({"state_interval": 128, "enable_prefix_caching": False}, False, "no prefix is shared"),
    ],
)
def test_options_that_cannot_work(options, paged, message):
    with pytest.raises(ConfigError, match=message):
        states(paged, **options)


def test_options_of_states():
    assert (states(False).state_snapshots, states(False).state_interval) == (6, 1024)
    assert states(False, state_snapshots=9).state_snapshots == 9
    assert states(False, state_interval=128).state_interval == 128
    assert states(True).state_snapshots == states(False, enable_prefix_caching=False).state_snapshots == 0


def states(paged, **options):
    config = EngineConfig(max_num_seqs=6, **options)
    return resolve(config, model_max_position=512, page_bytes=1000, free_bytes=10**6, on_gpu=False, paged=paged)
