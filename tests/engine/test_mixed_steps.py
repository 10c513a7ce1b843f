"""Known faults of engines that mix prefill and decoding and read output late, and the tests that show their absence.

test_speculation_properties.py has the rest. Tests without a file are in this one; files are under tests/.

  - lengths after a mixed step: each row advances by its own count
          engine/test_speculation_properties.py::test_each_row_advances_by_its_own_count
  - tokens credited to each request in mixed steps are those of its solo run
          engine/test_schedules.py::test_every_request_is_as_if_alone
  - decode windows of a mixed step hold the newest token and all its drafts
          test_decode_rows_are_laid_out_the_same_beside_a_prompt
  - metadata of decode rows is that of a step without prompts
          test_decode_rows_are_laid_out_the_same_beside_a_prompt
  - drafts after a mixed step are those after two separate ones
          test_a_mixed_step_equals_two_separate_ones
  - every running request decodes in every step while a prompt of 100 chunks prefills
          engine/test_scheduler.py::test_decodes_are_in_every_step_while_a_long_prompt_prefills
          engine/test_scheduler.py::test_random_schedules
  - mixed steps are the default; without them decodes wait for the prompt
          engine/test_scheduler.py::test_decodes_wait_for_prompts_where_steps_are_not_mixed
  - warm-up touches the padding page only, so it fits any pool
          engine/test_speculation_properties.py::test_warm_up_touches_the_padding_page_only
  - near the end of the context nothing is written outside the request's pages
          engine/test_scheduler.py::test_random_schedules
          engine/test_engine.py::test_max_tokens_and_context_limit
  - places from the page table are those of one contiguous cache, for every page size
          test_places_are_those_of_a_contiguous_cache
  - output read late changes no token, under stress
          engine/test_schedules.py::test_every_request_is_as_if_alone
          test_llm.py::test_steps_read_late_change_no_text
  - a preempted request's output is that of one that was not
          engine/test_engine.py::test_preemption_changes_nothing
          engine/test_scheduler.py::test_preemption_at_every_step
  - a mixed step's reserve counts what each of its rows can add
          engine/test_scheduler.py::test_reserve_counts_what_each_row_can_add
  - permuting a batch permutes its outputs only; any order of arrivals and ends gives the solo tokens
          test_permuted_rows_give_permuted_outputs
          engine/test_schedules.py::test_every_request_is_as_if_alone
  - pages are whole, given all or none, and every slot written lies in an owned one
          engine/test_scheduler.py::test_pages_are_counted_whole
          engine/test_scheduler.py::test_allocator_never_hands_out_a_page_twice
          engine/test_scheduler.py::test_random_schedules
  - chunks between decodes shift no queue; read late or at once, tokens are the same
          engine/test_schedules.py::test_every_request_is_as_if_alone
          engine/test_scheduler.py::test_random_schedules
  - preemption at any step leaves exactly the known tokens, and the text goes on unchanged
          engine/test_scheduler.py::test_preemption_at_every_step
  - only final tokens with written KV are shared; a follow-up turn has the log-probabilities of an uncached one
          engine/test_scheduler.py::test_random_schedules
          test_a_follow_up_turn_equals_an_uncached_one
"""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.drafting import kv_places
from jaxspec.engine.forward import lay_out
from jaxspec.engine.request import Request
from jaxspec.sampling.params import SamplingParams
from tests.engine.scripted import engine_over, greedy_requests, one_step, plan_where, sampling, snapshot
from tests.engine.tiny import SETTINGS, VOCAB, make_engine, run, tiny_runner

K, N = 3, 4


def test_the_table_names_tests_that_exist():
    tests = Path(__file__).parents[1]
    named = re.findall(r"^ {10}(?:(\S+\.py)::)?(test_\w+)", str(__doc__), re.MULTILINE)
    assert len(named) > 20
    for file, test in named:
        source = (tests / file if file else Path(__file__)).read_text()
        assert f"def {test}(" in source, f"{file}::{test}"


@pytest.fixture(scope="module")
def mixed():
    """(runner, a plan with prompt chunks and several decode rows, the state that it meets)."""
    engine = engine_over(tiny_runner(K))
    for request in greedy_requests(VOCAB):
        engine.add(request)
    plan = plan_where(engine, lambda plan: bool(plan.prefill) and len(plan.decode) > 3)
    return engine.runner, plan, snapshot(engine.runner)


def laid_out(runner, state, plan):
    bucket = runner.buckets[-1]
    layout = runner.layouts[bucket]
    # Pages that the plan's own deltas bring are in place already, as after `apply_updates`.
    tables = np.array(state.page_table)
    for slot, column, page in plan.page_deltas:
        tables[slot, column] = page
    ids, meta = jax.jit(lambda s, flat: lay_out(s, layout.split(flat), runner.settings, N))(
        state._replace(page_table=tables), layout.pack(plan)
    )
    return bucket, np.asarray(ids), jax.tree.map(np.asarray, meta)


@pytest.mark.long
def test_decode_rows_are_laid_out_the_same_beside_a_prompt(mixed):
    runner, plan, state = mixed
    bucket, ids, meta = laid_out(runner, state, plan)
    _, alone_ids, alone = laid_out(runner, state, dataclasses.replace(plan, prefill=()))
    P, D = bucket.prefill_tokens, len(plan.decode)
    slots = [r.slot for r in plan.decode]
    windows = ids[P:].reshape(-1, N)[:D]
    np.testing.assert_array_equal(
        windows, np.concatenate([state.last_token[slots][:, None], state.drafts[slots]], axis=1)
    )
    np.testing.assert_array_equal(ids[P:], alone_ids[P:])
    assert meta.decode_tables.shape[0] == bucket.decode_rows
    for field in ("decode_tables", "decode_bounds"):
        np.testing.assert_array_equal(getattr(meta, field), getattr(alone, field))
    for field in ("positions", "pages", "offsets", "live"):
        np.testing.assert_array_equal(getattr(meta, field)[P:], getattr(alone, field)[P:])
    assert meta.live[:P].sum() == plan.prefill_tokens


@pytest.mark.slow
def test_a_mixed_step_equals_two_separate_ones(mixed):
    """Drafts, lengths and newest tokens, prompts first and then decodes, or both at once."""
    runner, plan, state = mixed
    both, after = one_step(runner, state, plan)
    first, between = one_step(runner, state, dataclasses.replace(plan, decode=()))
    second, separate = one_step(runner, between, dataclasses.replace(plan, prefill=()))
    E = len(plan.prefill)
    np.testing.assert_array_equal(both.ids[:E, 0], first.ids[:, 0])
    np.testing.assert_array_equal(both.emitted, np.concatenate([first.emitted, second.emitted]))
    np.testing.assert_array_equal(both.ids[E:], second.ids)
    slots = [r.slot for r in plan.requests]
    for field in ("seq_len", "last_token", "drafts", "done"):
        np.testing.assert_array_equal(getattr(after, field)[slots], getattr(separate, field)[slots])


@pytest.mark.slow
def test_a_mixed_step_drafts_from_the_same_distributions_as_two(mixed):
    """Of requests that sample: the q of greedy ones is not written."""
    runner, plan, state = mixed
    state = sampling(state)
    _, after = one_step(runner, state, plan)
    _, between = one_step(runner, state, dataclasses.replace(plan, decode=()))
    _, separate = one_step(runner, between, dataclasses.replace(plan, prefill=()))
    # Prompts that start in this plan bring their own temperature, which is 0.
    slots = [r.slot for r in plan.decode]
    assert (after.draft_logits[slots] != state.draft_logits[slots]).any(axis=(1, 2)).all()
    np.testing.assert_array_equal(after.last_token[slots], separate.last_token[slots])
    for field in ("draft_logits", "draft_log_z"):
        np.testing.assert_allclose(getattr(after, field)[slots], getattr(separate, field)[slots], atol=1e-4)


@pytest.mark.slow
def test_permuted_rows_give_permuted_outputs(mixed):
    runner, plan, state = mixed
    out, after = one_step(runner, state, plan)
    E, D = len(plan.prefill), len(plan.decode)
    order = np.roll(np.arange(D), 1)
    other, permuted = one_step(runner, state, dataclasses.replace(plan, decode=tuple(plan.decode[i] for i in order)))
    rows = [*range(E), *(E + order)]
    for field in ("emitted", "accepted", "flags", "ids"):
        np.testing.assert_array_equal(getattr(other, field), getattr(out, field)[rows])
    np.testing.assert_allclose(other.logprobs, out.logprobs[rows], atol=1e-5)
    for field in ("seq_len", "last_token", "drafts"):
        np.testing.assert_array_equal(getattr(permuted, field)[1:], getattr(after, field)[1:])


@pytest.mark.slow
@given(page_size=st.sampled_from([1, 2, 4, 16, 64]), seed=st.integers(0, 100))
def test_places_are_those_of_a_contiguous_cache(page_size, seed):
    """Rows whose pages happen to be consecutive: place = start of the row + position, for any page size."""
    settings = dataclasses.replace(SETTINGS, max_model_len=128, page_size=page_size)
    rng = np.random.default_rng(seed)
    rows, columns = 3, settings.max_pages
    tables = 1 + np.arange(rows * columns).reshape(rows, columns)
    row = rng.integers(0, rows, 40)
    positions = rng.integers(0, 128, 40)
    live = rng.random(40) < 0.8
    pages, offsets = kv_places(*map(jnp.asarray, (tables, row, positions, live)), settings)
    places = np.asarray(pages) * page_size + np.asarray(offsets)
    np.testing.assert_array_equal(places[live], page_size + (row * columns * page_size + positions)[live])
    assert not np.asarray(pages)[~live].any()


@pytest.mark.long
@pytest.mark.parametrize("k", [0, K])
def test_a_follow_up_turn_equals_an_uncached_one(k):
    """A second turn begins with the first one's prompt and output: their pages are found, and nothing else changes."""
    rng = np.random.default_rng(4)
    prompt, more = rng.integers(6, VOCAB, 100).tolist(), rng.integers(6, VOCAB, 20).tolist()
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    engine = make_engine(k=k)
    first, _, _ = run(engine, [Request("first", prompt, params)])
    turn = [*prompt, *first["first"], *more]
    second = Request("second", turn, params)
    got = run(engine, [second])
    want = run(make_engine(k=k), [Request("second", turn, params)])
    # 159 of its tokens have their KV: the last one of the first turn has none.
    assert second.num_cached_tokens == 128
    assert got[0] == want[0]
    np.testing.assert_allclose(got[1]["second"], want[1]["second"], atol=1e-4)
    again = Request("again", turn, dataclasses.replace(params, repetition_penalty=1.3))
    penalised = run(engine, [again])
    assert again.num_cached_tokens == 128  # penalties count them all the same
    assert penalised[0] == run(make_engine(k=k), [Request("again", turn, again.params)])[0]
