"""Known faults of engines that speculate, and the tests that show their absence here.

Tests without a file are in this one; files are under tests/.

  - every token of a mixed step has its solo run's log-probability
          engine/test_equality.py::test_speculation_is_plain_decoding
  - drafting leaves lengths alone: each row advances by its own count
          test_each_row_advances_by_its_own_count
  - padding rows have bounds of at least 1, live rows vc + 1 .. vc + n
          test_padding_rows_see_the_padding_page_only
  - warm-up touches page 0 only, which is zero before
          test_warm_up_touches_the_padding_page_only
  - windows that end before n tokens are clamped, others are exact
          test_window_bounds
  - catch-up for live rows equals catch-up for all, for every accepted length, draft and mode
          test_catch_up_for_live_rows_equals_catch_up_for_all
  - tables of rows past the batch are 0, whatever ran before
          test_padding_rows_see_the_padding_page_only
  - a step of padding alone leaves all live state bit-identical
          test_a_step_of_padding_changes_nothing
  - ids are in the vocabulary and 1 <= a <= n, for NaN and forced rows too
          test_outputs_keep_their_contract
  - NaN in page 0 and in free pages changes no live row
          engine/test_equality.py::test_speculation_is_plain_decoding (layout "padded")
  - draft KV is written at [vc, max(vc + n, vc + a + k - 1)) of the own request
          test_writes_stay_in_their_own_places
  - tokens after row r of a window do not change row r
          test_a_row_does_not_see_later_drafts
  - configured capture ids win over the default; lists that begin with 1 name layers by their output
          convert/test_draft.py::test_captured_layers
          models/test_eagle3.py::test_hidden_states_and_drafts_equal_pytorch
  - a draft of probability zero is never accepted
          sampling/test_rejection.py::test_zero_probabilities_and_equal_rounding
  - the first stop inside a window cuts text, ids, log-probabilities and counts alike
          engine/test_stops_in_windows.py::test_stops_at_every_position_of_a_window
          test_demo_drafts.py::test_stop_strings_cut_everything_alike
  - of several stops the earliest wins; max_tokens never overshoots
          engine/test_stops_in_windows.py::test_the_earliest_of_several_stops_wins
  - an end-of-text id in a rejected draft ends nothing
          engine/test_stops_in_windows.py::test_a_rejected_end_of_text_ends_nothing
  - q is used: without it acceptance falls
          test_acceptance_needs_q
  - nothing depends on one k: identical assertions for 0 (plain), 1, 2, 3, 4 and 7
          engine/test_equality.py::test_speculation_is_plain_decoding_everywhere
  - drafts go on from each other and perfect ones are all accepted; an odd k is refused
          engine/test_equality.py::test_a_perfect_draft_is_accepted_at_every_position
          engine/test_equality.py::test_an_exact_nextn_layer_is_accepted_at_every_position
          engine/test_equality.py::test_an_exact_eagle3_head_is_accepted_at_every_position
          convert/test_draft.py::test_how_many_tokens
  - one function says how many slots may be in flight
          engine/test_reserved_slots.py::test_reserved_slots_is_the_exact_maximum
  - a step leaves the host's view of its requests alone
          test_each_row_advances_by_its_own_count
  - acceptance counters obey their identities
          test_acceptance_counters
  - acceptance has a floor for each draft, since no text shows a broken one
          test_demo_drafts.py::test_acceptance_has_a_floor
  - results do not depend on padding, nor on the mesh
          engine/test_equality.py::test_speculation_is_plain_decoding (layout "padded")
          engine/test_mesh.py::test_several_devices_give_the_tokens_of_one
  - synthetic acceptance has the rates that were asked for
          sampling/test_rejection.py::test_synthetic_acceptance
          engine/test_acceptance.py::test_synthetic_acceptance_has_the_mean_that_was_asked_for
"""

import contextlib
import copy
import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine import choose as choose_module
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.compiler import Compiler
from jaxspec.engine.executables import Executable
from jaxspec.engine.forward import lay_out
from jaxspec.engine.handoff import FLAG_NAN
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.models.decoder import CausalLM
from jaxspec.models.metadata import window_bounds
from jaxspec.models.mtp import NextN
from jaxspec.sampling.params import SamplingParams
from tests.engine import scripted
from tests.engine.scripted import (
    MODES,
    Windows,
    eagle3_runner,
    engine_over,
    exchanged,
    greedy_requests,
    numpy_params,
    one_bucket,
    one_step,
    pattern_runner,
    plain_run,
    plan_where,
    sampling,
    snapshot,
    target_params,
    warmed,
    with_pattern,
)
from tests.engine.test_engine import requests
from tests.engine.tiny import SETTINGS, VOCAB, make_engine, run, tiny_runner

K = 3
N = K + 1
# An EAGLE3 head with MLA is the head and the attention of the others.
DRAFTS = ("nextn", "llama", pytest.param("mla", marks=pytest.mark.full))


def test_the_table_names_tests_that_exist():
    tests = Path(__file__).parents[1]
    named = re.findall(r"^ {10}(?:(\S+\.py)::)?(test_\w+)", str(__doc__), re.MULTILINE)
    assert len(named) > 30
    for file, test in named:
        source = (tests / file if file else Path(__file__)).read_text()
        assert f"def {test}(" in source, f"{file}::{test}"


@contextlib.contextmanager
def runners_of(draft):
    """A runner that catches up for live rows only and one for all rows, with the same weights."""
    if draft != "nextn":
        yield [eagle3_runner(draft, K, skip_dead=skip) for skip in (True, False)]
        return
    runners = [tiny_runner(K, skip_dead=skip) for skip in (True, False)]
    with contextlib.ExitStack() as stack:
        for runner in runners:
            stack.enter_context(exchanged(runner, target=target_params("tiny")))
        yield runners


def prepared(runner, mode):
    """(engine, plan, state): a plan of this mode, not yet dispatched, and the state that it will meet."""
    engine = engine_over(runner)
    for request in greedy_requests(VOCAB):
        engine.add(request)
    plan = plan_where(engine, MODES[mode])
    return engine, plan, snapshot(runner)


def with_drafts(state, plan, accepted):
    """The state with drafts of which exactly `accepted[i]` of decode row i are what the target says."""
    texts = {r.id: text for r, text in zip(greedy_requests(VOCAB), plain_run()[2], strict=True)}
    drafts = state.drafts.copy()
    for request, a in zip(plan.decode, accepted, strict=True):
        drafts[request.slot] = texts[request.id][len(request.tokens) : len(request.tokens) + K]
        drafts[request.slot, a:] = (drafts[request.slot, a:] + 1) % VOCAB
    return state._replace(drafts=drafts)


def places(state, slot, start, stop):
    """(page, offset) of a slot's positions [start, stop)."""
    size = SETTINGS.page_size
    return {(int(state.page_table[slot, p // size]), p % size) for p in range(start, stop)}


def changed_places(before, after):
    """(page, offset) at which a cache differs, the padding page left out."""
    out = set()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        pages, offsets = np.nonzero((old != new).reshape(*old.shape[:2], -1).any(axis=2))
        out |= set(zip(pages.tolist(), offsets.tolist(), strict=True))
    return {place for place in out if place[0]}


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_catch_up_for_live_rows_equals_catch_up_for_all(draft, mode):
    """Same drafts from the same distributions, and the same draft KV, with 0 to k drafts accepted side by side."""
    with runners_of(draft) as runners:
        _, plan, state = prepared(runners[0], mode)
        wanted = [i % N for i in range(len(plan.decode))]
        state = with_drafts(state, plan, wanted)
        (out, one), (_, other) = (one_step(runner, state, plan) for runner in runners)
        assert out.accepted[len(plan.prefill) :].tolist() == wanted
        slots = [r.slot for r in plan.decode] + [row.request.slot for row in plan.prefill if row.final]
        assert (one.drafts[slots] != state.drafts[slots]).any()
        np.testing.assert_array_equal(one.drafts[1:], other.drafts[1:])
        for a, b in zip(jax.tree.leaves(one.draft_kv), jax.tree.leaves(other.draft_kv), strict=True):
            np.testing.assert_allclose(a[1:], b[1:], atol=1e-5)

        # Of requests that sample: the q of greedy ones is not written.
        (out, one), (same, other) = (one_step(runner, sampling(state), plan) for runner in runners)
        np.testing.assert_array_equal(out.accepted, same.accepted)
        slots = [r.slot for r in plan.decode]
        assert (one.draft_logits[slots] != state.draft_logits[slots]).any(axis=(1, 2)).all()
        for field in ("draft_logits", "draft_log_z"):
            np.testing.assert_allclose(getattr(one, field)[slots], getattr(other, field)[slots], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_writes_stay_in_their_own_places(draft):
    """Target KV at [vc, vc + n), draft KV up to max(vc + n, vc + a + k - 1); chunks at their own tokens, plus k - 1."""
    with runners_of(draft) as (runner, _):
        for mode in MODES:
            _, plan, state = prepared(runner, mode)
            state = with_drafts(state, plan, [i % N for i in range(len(plan.decode))])
            out, after = one_step(runner, state, plan)
            kv, draft_kv, must = set(), set(), set()
            for e, row in enumerate(plan.prefill):
                end = row.start + row.length
                # The table that the step reads is the one that it has just been given.
                kv |= places(after, row.request.slot, row.start, end)
                draft_kv |= places(after, row.request.slot, row.start, end + (K - 1 if row.final else 0))
                assert out.accepted[e] == 0
            for request, accepted in zip(plan.decode, out.accepted[len(plan.prefill) :], strict=True):
                vc, a = int(state.seq_len[request.slot]), int(accepted) + 1
                kv |= places(after, request.slot, vc, vc + N)
                draft_kv |= places(after, request.slot, vc, max(vc + N, vc + a + K - 1))
                must |= places(after, request.slot, vc, vc + a + K - 1)
            assert changed_places(state.kv, after.kv) == kv
            assert must <= changed_places(state.draft_kv, after.draft_kv) <= draft_kv


@pytest.mark.slow
def test_each_row_advances_by_its_own_count():
    """Lengths after a step with drafting are those before it plus the chunk or the emitted tokens, row by row."""
    with runners_of("nextn") as (runner, _):
        for mode in MODES:
            _, plan, state = prepared(runner, mode)
            wanted = [i % N for i in range(len(plan.decode))]
            state = with_drafts(state, plan, wanted)
            hosts = [*(row.request for row in plan.prefill), *plan.decode]
            before = copy.deepcopy([vars(r) for r in hosts])
            out, after = one_step(runner, state, plan)
            assert [vars(r) for r in hosts] == before
            lengths = state.seq_len.copy()
            for row in plan.prefill:
                lengths[row.request.slot] = row.start + row.length
            for request, a in zip(plan.decode, wanted, strict=True):
                lengths[request.slot] += a + 1
            np.testing.assert_array_equal(after.seq_len[1:], lengths[1:])
            for i, request in enumerate(plan.decode, len(plan.prefill)):
                assert after.last_token[request.slot] == out.ids[i, out.accepted[i]]


@pytest.mark.slow
def test_a_row_does_not_see_later_drafts():
    with runners_of("nextn") as (runner, _):
        _, plan, state = prepared(runner, "decode")
        for a in range(K):
            first = with_drafts(state, plan, [a] * len(plan.decode))
            drafts = first.drafts.copy()
            drafts[:, a:] = (drafts[:, a:] + 17) % VOCAB  # wrong before and after
            one, one_state = one_step(runner, first, plan)
            other, other_state = one_step(runner, first._replace(drafts=drafts), plan)
            assert one.accepted.tolist() == other.accepted.tolist() == [a] * len(plan.decode)
            np.testing.assert_array_equal(one.ids[:, : a + 1], other.ids[:, : a + 1])
            np.testing.assert_array_equal(one.logprobs[:, : a + 1], other.logprobs[:, : a + 1])
            # Exactly the changed tokens' own keys differ.
            changed = set()
            for request in plan.decode:
                vc = int(state.seq_len[request.slot])
                changed |= places(state, request.slot, vc + a + 1, vc + N)
            assert changed_places(one_state.kv, other_state.kv) == changed


@pytest.mark.slow
def test_a_step_of_padding_changes_nothing():
    """Of slots and pages other than 0, bit by bit, in every bucket."""
    with runners_of("nextn") as (runner, _):
        _, _, state = prepared(runner, "decode")
        for bucket in runner.buckets:
            scripted.restore(runner, state)
            runner.run_padding(bucket)
            for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(snapshot(runner)), strict=True):
                np.testing.assert_array_equal(before[1:], after[1:])


@pytest.mark.slow
def test_warm_up_touches_the_padding_page_only(monkeypatch):
    """A fresh runner is zero everywhere, and but for page 0 and slot 0 still is when all buckets have run."""
    ready, ran = tiny_runner(K), []

    def compiled(_: Compiler, bucket: Bucket) -> Executable:
        ran.append(bucket)
        return Executable(ready.executable(bucket), {})

    monkeypatch.setattr(Compiler, "compile", compiled)
    fresh = Runner(
        CausalLM(scripted.tiny_config("tiny"), jnp.float32), target_params("tiny"), ready.settings,
        scripted.one_device(), draft=nextn(), buckets=ready.buckets,
    )  # fmt: skip
    assert all(not leaf.any() for leaf in jax.tree.leaves(snapshot(fresh)))
    fresh.warm_up()
    assert sorted(ran) == sorted(ready.buckets)
    after = jax.tree.leaves(snapshot(fresh))
    assert all(not leaf[1:].any() for leaf in after)
    assert all(np.isfinite(leaf[0]).all() for leaf in jax.tree.leaves(fresh.state.kv))


def nextn():
    draft = NextN(scripted.tiny_config("tiny"), jnp.float32)
    return draft, numpy_params(draft, 4)


@pytest.mark.slow
def test_padding_rows_see_the_padding_page_only():
    """After a full batch, five decode rows and then one chunk in the same bucket: nothing of other rows is left."""
    with runners_of("nextn") as (runner, _):
        _, plan, state = prepared(runner, "decode")
        bucket = runner.buckets[-1]
        layout = runner.layouts[bucket]
        jitted = jax.jit(lambda state, flat: lay_out(state, layout.split(flat), runner.settings, N)[1])
        few = dataclasses.replace(plan, decode=plan.decode[:5], verified=plan.verified[:5])
        meta = jitted(state, layout.pack(few))
        vc = state.seq_len[[r.slot for r in few.decode]]
        np.testing.assert_array_equal(meta.decode_bounds[:5], vc[:, None] + 1 + np.arange(N))
        np.testing.assert_array_equal(meta.decode_tables[:5], state.page_table[[r.slot for r in few.decode]])
        assert (np.asarray(meta.decode_bounds[5:]) >= 1).all()
        P = bucket.prefill_tokens
        for padding in (
            meta.decode_tables[5:],
            meta.prefill_tables,
            meta.prefill_ends,
            meta.pages[:P],
            meta.pages[P + 5 * N :],
        ):
            assert not np.asarray(padding).any()
        assert np.asarray(meta.live).sum() == 5 * N


@given(st.lists(st.integers(0, 600), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8]))
def test_window_bounds(ends, n):
    """Counting back from the end: exact for windows that fit, never below 1 for those that cannot."""
    got = np.asarray(window_bounds(jnp.asarray(ends, jnp.int32), n))
    want = np.array([[end - (n - 1) + r for r in range(n)] for end in ends])
    np.testing.assert_array_equal(got, np.maximum(want, 1))


@pytest.mark.long
def test_outputs_keep_their_contract():
    """Every step of a run with NaN, preemptions (forced rows), stops, chunks and random rows."""
    engine = make_engine(usable_pages=9, k=K)
    seen = {"nan": 0, "forced": 0}

    def check(step):
        first = len(step.plan.prefill)
        assert ((step.ids >= 0) & (step.ids < VOCAB)).all()  # stale ones too: the draft embeds them
        assert ((step.accepted >= 0) & (step.accepted <= K)).all()
        assert (step.accepted[:first] == 0).all()
        bad = step.flags & FLAG_NAN > 0
        assert (step.emitted[bad] == 0).all()
        assert (step.emitted[first:][~bad[first:]] >= 1).all()
        assert (step.emitted <= step.accepted + 1).all()
        for row, emitted in zip(step.plan.prefill, step.emitted, strict=False):
            assert emitted == (row.final and row.forced < 0 and not bad[step.plan.prefill.index(row)])
            seen["forced"] += row.forced >= 0
        seen["nan"] += int(bad.sum())

    engine.observer = check
    embed = engine.runner.params[0]["embed"]["weight"]
    poisoned = np.array(embed.get_value())
    poisoned[3] = np.nan  # no prompt but the bad one's holds it; whoever chooses it ends
    with exchanged(engine.runner, target={"embed": {"weight": poisoned}}):
        run(engine, [*requests(), Request("bad", [9, 3, 9], SamplingParams(max_tokens=8))])
    assert seen["nan"] > 0
    assert seen["forced"] > 0


# --- acceptance ---


@pytest.mark.slow
def test_acceptance_counters():
    """Over windows alone, prompt steps left out; by position and in all."""
    ids, _, texts = plain_run()
    runner, windows = pattern_runner(K), Windows()
    with with_pattern(runner, texts, seed=1):
        engine = engine_over(runner, observer=windows)
        got, _, _ = run(engine, greedy_requests(VOCAB))
    stats, accepted = engine.stats(), np.array(windows.accepted)
    total = stats.acceptance
    assert got == ids
    assert total.num_steps == len(accepted) > 0
    assert total.num_drafted == K * len(accepted)
    assert total.num_accepted == accepted.sum()
    assert total.accepted_per_position == tuple(int((accepted > i).sum()) for i in range(K))
    assert list(total.accepted_per_position) == sorted(total.accepted_per_position, reverse=True)
    # Mean length 1 + accepted / windows, but for what max_tokens cut off the last windows.
    prompts, cut = len(got), total.num_steps + total.num_accepted + len(got) - stats.generation_tokens
    assert 0 <= cut < prompts * (K + 1)


@pytest.mark.long
def test_acceptance_needs_q(monkeypatch):
    """Two random models at temperature 1 overlap much; a sampled draft taken for a certain one is nearly always refused."""
    settings, verify = tiny_runner(K).settings, choose_module.verify  # compiled before anything is patched

    def without_q(logits, drafts, q, one_hot, *rest, **options):
        return verify(logits, drafts, q, jnp.ones_like(one_hot), *rest, **options)

    monkeypatch.setattr(choose_module, "verify", without_q)
    blind = warmed(
        Runner(
            CausalLM(scripted.tiny_config("tiny"), jnp.float32), target_params("tiny"), settings, scripted.one_device(),
            draft=nextn(), buckets=one_bucket(settings),
        )
    )  # fmt: skip
    monkeypatch.undo()
    rates = {}
    for name, runner in (("q", tiny_runner(K)), ("blind", blind)):
        with exchanged(runner, target=target_params("tiny"), draft=nextn()[1]):
            engine = engine_over(runner)
            params = SamplingParams(temperature=1, max_tokens=60, ignore_eos=True)
            batch = [Request(f"r{i}", r.prompt_ids, params) for i, r in enumerate(greedy_requests(VOCAB))]
            run(engine, batch)
            rates[name] = engine.stats().acceptance.rate_per_position[0]
    assert rates["q"] > 0.3
    assert rates["blind"] < 0.2 * rates["q"]
