"""Scheduler, pages and batch packing over a mock model: random schedules, tiny pools, aborts, preemption."""

import collections
import dataclasses
import itertools
import random
import subprocess
import sys
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config import EngineConfig, Settings
from jaxspec.engine import buckets
from jaxspec.engine.buckets import split_table
from jaxspec.engine.draft_control import FixedDrafts
from jaxspec.engine.engine import Engine
from jaxspec.engine.output import FinishReason
from jaxspec.engine.pages import PADDING_PAGE, PageAllocator
from jaxspec.engine.plan import pages_needed
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.scheduler import Scheduler, reserved_slots
from jaxspec.errors import InvalidRequestError
from jaxspec.sampling.params import SamplingParams
from tests.engine.mock_runner import MockRanks, MockRunner, next_token
from tests.host_rules import Counting, StopAfter

VOCAB, EOS = 300, 7
SETTINGS = Settings(
    max_model_len=512, max_num_seqs=4, max_num_batched_tokens=96, num_pages=33, dtype="float32", on_gpu=False
)


def make_engine(settings: Settings = SETTINGS, **options) -> Engine:
    runner = MockRunner if settings.data_parallel_size == 1 else MockRanks
    return Engine(runner(settings, VOCAB), vocab_size=VOCAB, **options)


def run(engine: Engine, requests, abort_at=None, arrivals=None):
    """Runs requests to the end; returns their ids and ends."""
    ids, ends = {r.id: [] for r in requests}, {}
    pending = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
    step = 0
    while pending or engine.has_work:
        while pending and pending[0][0] <= step:
            engine.add(requests[pending.pop(0)[1]])
        for request_id, at in (abort_at or {}).items():
            if at == step:
                engine.abort(request_id)
        if engine.has_work:
            for out in engine.step():
                assert out.request_id not in ends, "output after the end"
                ids[out.request_id] += out.new_ids
                if out.finish_reason:
                    ends[out.request_id] = out.finish_reason
        step += 1
        assert step < 20000, "no progress"
    return ids, ends


# --- random schedules ---

# Short pages, so that short texts cross many of them.
PAGE, CONTEXT = 8, 96
# Without drafts few prompt tokens fit a step: where there are more, it has a draft.
_, *WITH_DRAFTS = buckets.ADAPTIVE_SIZES
SMALL_SIZES = (dataclasses.replace(buckets.ADAPTIVE_SIZES[0], prompts=((8, None),)), *WITH_DRAFTS)


def expected_ids(request: Request) -> list[int]:
    """What the mock model says for a request alone, by definition."""
    params, out = request.params, []
    rule = request.rule
    limit = min(params.max_tokens, CONTEXT - len(request.prompt_ids), rule.count if rule and rule.count else CONTEXT)
    while len(out) < limit:
        out.append(next_token([*request.prompt_ids, *out], params.seed, VOCAB))
        if out[-1] == EOS or out[-1] in params.stop_token_ids:
            break
    return out


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts that begin alike and part at a page border, one id beside it, or anywhere."""
    text = [rng.randrange(VOCAB) for _ in range(CONTEXT)]
    requests = []
    for i in range(count):
        border = PAGE * rng.randint(0, 7)
        shared = max(0, rng.choice([0, border, border - 1, border + 1, rng.randint(0, 60)]))
        own = rng.choice([0, 1, PAGE, rng.randint(1, 25)])
        prompt = (text[:shared] + [rng.randrange(VOCAB) for _ in range(own)]) or [1]
        params = SamplingParams(
            max_tokens=rng.randint(1, min(40, CONTEXT - len(prompt))),
            seed=rng.choice([1, 2]),
            stop_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 12]))),
            num_speculative_tokens=rng.choice([None, None, 0, 1]),
            top_k=rng.choice([0, 0, 5]),
            repetition_penalty=(1.0, 1.0, 1.2)[i % 3],
            presence_penalty=(0.0, 0.5)[i % 2],
        )
        count = rng.randint(1, 30) if rng.random() < 0.2 else None
        needs_readback = rng.random() < 0.3
        kind = Counting if needs_readback and rng.random() < 0.7 else StopAfter
        rule = kind(count, needs_readback=needs_readback) if count or needs_readback else None
        requests.append(
            Request(
                f"r{i}", prompt, params, rule=rule, priority=rng.choice([0, 0, 1]),
                cache_salt=rng.choice(["", "", "tenant"]), arrival_time=i,
            )
        )  # fmt: skip
    return requests


class AnyDrafts(FixedDrafts):
    """One of the choices at random: a page reserved too few, or a draft counted that is not there, changes a text."""

    def __init__(self, seed: int):
        super().__init__(0)
        self._rng = random.Random(seed)
        self.ranks: list[Scheduler] = []

    def choose(self, load):
        if len(self.ranks) == 1:
            lengths = {r.slot: len(r.tokens) for r in self.ranks[0].running}
            assert load.tokens == sum(lengths[slot] for slot in load.slots)
        return self._rng.choice(load.choices)


class Watch:
    """Looks at a rank of the engine at every dispatch and after every step."""

    def __init__(self, engine: Engine, rank: int = 0):
        self.engine, self.rank, self.scheduler = engine, rank, engine.ranks[rank]
        self.live: set[Request] = set()
        self.most_unread = 0
        runner = engine.runner.ranks[rank] if isinstance(engine.runner, MockRanks) else engine.runner
        runner.on_dispatch = self.planned
        cache = self.scheduler.cache
        runner.shared = lambda page: cache is not None and page in cache

    def planned(self, plan) -> None:
        """Decode first: beside a prompt every decoding request runs, but those that have to wait for their output."""
        assert all(request.rank == self.rank for request in plan.requests)
        self.live |= set(plan.requests)
        self.most_unread = max(self.most_unread, self.engine.runner.in_flight)
        if not self.engine.settings.mixed:
            assert not (plan.prefill and plan.decode)
        elif plan.prefill:
            chunks = {row.request for row in plan.prefill}
            for request in self.scheduler.running:
                if request.state is not RequestState.DECODE or request in chunks or request in plan.decode:
                    continue
                over = len(request.tokens) + request.unread_least >= request.max_total
                assert over or (request.needs_readback and request.unread_steps)

    def stepped(self) -> None:
        """Every page is free, or held by exactly the requests that list it; none is lost."""
        allocator = self.scheduler.pages
        held = collections.Counter(page for request in self.live for page in request.pages)
        assert all(allocator.num_holders(page) == held[page] for page in range(1, allocator.num_pages))
        assert allocator.num_holders(PADDING_PAGE) == 0
        free = allocator.free_pages
        assert len(set(free)) == len(free) == allocator.usable - len(held)
        assert not set(free) & set(held)
        if snapshots := self.scheduler.snapshots:
            taken = [slot for request in self.live for slot in request.taken_states.values()]
            slots = [*taken, *snapshots.free, *snapshots.kept]
            first = self.engine.settings.max_slots
            assert sorted(slots) == list(range(first, first + self.engine.settings.state_snapshots))
        assert self.engine.runner.in_flight <= self.engine.settings.readout_depth


def check_schedule(seed: int, ranks: int) -> collections.Counter:
    """One schedule with options drawn from all there are; what happened in it."""
    rng = random.Random(seed)
    k = rng.choice([0, 1, 2, 3, 4, 7])
    max_num_seqs = rng.randint(1, 4)
    settings = dataclasses.replace(
        SETTINGS, max_model_len=CONTEXT, page_size=PAGE, max_num_seqs=max_num_seqs, num_speculative_tokens=k,
        # From the least that a step may hold, and from one longest request to no shortage at all.
        max_num_batched_tokens=max_num_seqs * (k + 1) + rng.choice([0, 1, 7, 40]), num_pages=rng.choice([13, 14, 16, 20, 49]),
        mixed=rng.random() < 0.7 or ranks > 1, readout_depth=rng.randint(0, 3), prefix_caching=rng.random() < 0.7,
        adaptive_drafts=k > 0 and rng.random() < 0.6, on_gpu=rng.random() < 0.5,  # there the table has gaps
        state_snapshots=rng.choice([0, 0, 1, 3, 8]), state_interval=rng.choice([PAGE, 3 * PAGE, CONTEXT]),
        data_parallel_size=ranks, max_prefill_delay_steps=rng.choice([0, 1, 3, 50]) if ranks > 1 else 0,
    )  # fmt: skip
    control = AnyDrafts(seed)
    with mock.patch.object(buckets, "ADAPTIVE_SIZES", SMALL_SIZES if seed % 2 else buckets.ADAPTIVE_SIZES):
        engine = make_engine(settings, eos_token_ids=(EOS,), control=control)
    control.ranks = list(engine.ranks)
    if rng.random() < 0.7:
        engine.runner.split_ready = split_table(settings)
    watches = [Watch(engine, rank) for rank in range(ranks)]
    step = engine.step

    def watched():
        outputs = step()
        for watch in watches:
            watch.stepped()
        return outputs

    engine.step = watched
    requests = random_requests(rng, rng.randint(1, 9 * ranks))
    arrivals = [rng.randint(0, 40) for _ in requests]
    aborts = {r.id: rng.randint(0, 60) for r in requests if rng.random() < 0.15}
    ids, ends = run(engine, requests, aborts, arrivals)
    for request in requests:
        want, reason = expected_ids(request), ends.get(request.id)
        if reason in (None, FinishReason.ABORT):
            assert ids[request.id] == want[: len(ids[request.id])], f"seed {seed}, {request.id}"
        else:
            assert ids[request.id] == want, f"seed {seed}, {request.id}"
            assert request.tokens == [*request.prompt_ids, *want]
    stats = engine.stats()
    assert stats.kv_cache_usage == 0, "pages leaked"
    assert all(rank.num_free_slots == max_num_seqs for rank in engine.ranks)
    assert not any(r.taken_states for r in requests)
    assert not any((r.unread_steps, r.unread_least, r.unread_most) != (0, 0, 0) for r in requests)
    happened = collections.Counter(
        preempted=stats.num_preemptions, hits=stats.prefix_cache_hits,
        late=watches[0].most_unread, aborted=sum(r is FinishReason.ABORT for r in ends.values()),
    )  # fmt: skip
    happened["restored"] = sum(row.restored > 0 for plan in engine.runner.plans for row in plan.prefill)
    if not settings.mixed:
        happened["separate"] += 1
    happened["split"] += sum(plan.split for plan in engine.runner.plans)
    happened["changed k"] += sum(a.drafts != b.drafts for a, b in itertools.pairwise(engine.runner.plans))
    for plan in engine.runner.plans:
        kinds = {("prompts" if part.prefill else "rows" if part.decode else "idle") for part in plan.parts}
        happened["idle"] += "idle" in kinds
        happened["prompts beside rows of another rank"] += kinds >= {"prompts", "rows"}
    return happened


def check_schedules(seeds, ranks: int = 1) -> None:
    total = sum((check_schedule(seed, ranks) for seed in seeds), collections.Counter())
    count = len(seeds)
    if ranks > 1:
        assert total["idle"] > count
        assert total["prompts beside rows of another rank"] > count / 2
    else:
        assert total["separate"] > count / 5
    assert total["preempted"] > count / 5
    assert total["hits"] > count
    assert total["restored"] > count / 5
    assert total["late"] > count / 2
    assert total["aborted"] > count / 10
    assert total["changed k"] > count
    assert total["split"] > count


@pytest.mark.long
def test_random_schedules():
    """Every request's text is its solo text, and no page is lost, shared wrongly or written by others, whatever
    shares the batch, at any k and readout depth, mixed or not, with aborts, host rules, preemption and shared prompts."""
    check_schedules(range(300))


@pytest.mark.slow
def test_random_schedules_of_ranks():
    """The same over two ranks, with a pool, slots and a prefix index each: each request stays on one of them."""
    check_schedules(range(60), ranks=2)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_many_random_schedules(ranks):
    check_schedules(range(1000, 11000 // ranks), ranks)


def test_decode_claims_first_and_the_prompt_is_laid_out_first():
    """A budget of 16, one request that decodes and a prompt of 32 tokens: chunks of 15, 15 and 2 beside it."""
    settings = dataclasses.replace(SETTINGS, max_num_batched_tokens=16)
    engine = make_engine(settings)
    engine.add(Request("r0", [1], SamplingParams(max_tokens=20, seed=0)))
    engine.step()
    engine.add(Request("r1", list(range(32)), SamplingParams(max_tokens=20, seed=0)))
    for chunk in (15, 15, 2):
        engine.step()
        plan = engine.runner.plans[-1]
        assert [r.id for r in plan.requests] == ["r1", "r0"]
        assert ([row.length for row in plan.prefill], len(plan.decode)) == ([chunk], 1)


def test_decodes_are_in_every_step_while_a_long_prompt_prefills():
    engine = make_engine(dataclasses.replace(SETTINGS, max_num_batched_tokens=5))
    short = Request("short", [1, 2, 3], SamplingParams(max_tokens=200, seed=1))
    engine.add(short)
    engine.step()
    engine.add(Request("long", [i % VOCAB for i in range(400)], SamplingParams(max_tokens=2, seed=2)))
    runner = engine.runner
    first = len(runner.plans)
    while engine.has_work:
        engine.step()
    mixed = [p for p in runner.plans[first:] if p.prefill]
    assert len(mixed) == 100  # 400 tokens at 4 a step beside one decode
    assert all(p.decode == (short,) for p in mixed)
    assert all(p.prefill_tokens == 4 for p in mixed)


def test_decodes_wait_for_prompts_where_steps_are_not_mixed():
    assert EngineConfig().enable_mixed_batch
    engine = make_engine(dataclasses.replace(SETTINGS, mixed=False))
    engine.add(Request("short", [1, 2, 3], SamplingParams(max_tokens=20, seed=1)))
    engine.step()
    engine.add(Request("long", [i % VOCAB for i in range(400)], SamplingParams(max_tokens=2, seed=2)))
    while engine.has_work:
        engine.step()
    kinds = [(len(p.prefill), len(p.decode)) for p in engine.runner.plans]
    assert kinds == [(1, 0)] + 5 * [(1, 0)] + [(0, 2)] + 18 * [(0, 1)]  # 400 tokens at 96 a step


def test_reserve_counts_what_each_row_can_add():
    """Beside a middle chunk, a final one and a forced one, only decode rows can add a window."""
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=3, max_num_batched_tokens=60, readout_depth=1)
    engine = make_engine(settings)
    decoding = Request("decoding", [1], SamplingParams(max_tokens=90, seed=0))
    forced = Request("forced", [2], SamplingParams(max_tokens=90, seed=0))
    engine.add(decoding)
    engine.add(forced)
    for _ in range(4):
        engine.step()
    while engine.runner.in_flight:
        engine.read()
    engine.scheduler.preempt(forced)
    engine.scheduler.admits = True
    final = Request("final", [3], SamplingParams(max_tokens=9, seed=0))
    middle = Request("middle", [4] * 400, SamplingParams(max_tokens=9, seed=0))
    engine.add(final)
    engine.add(middle)
    engine.dispatch(engine.scheduler.plan(), 0.0)
    plan = engine.runner.plans[-1]
    assert [r.id for r in plan.requests] == ["forced", "final", "middle", "decoding"]
    most = {r.id: (r.unread_steps, r.unread_least, r.unread_most) for r in plan.requests}
    assert most == {"forced": (1, 0, 0), "final": (1, 1, 1), "middle": (1, 0, 0), "decoding": (1, 1, 4)}
    known = len(decoding.tokens)
    for k in (0, 1, 3):
        # The unread step adds at most 4 tokens, and leaves three drafts.
        assert engine.scheduler.reserved(decoding, k) == reserved_slots(known, k=k, verified=k, unread_most=4)
    engine.read()
    assert {(r.unread_steps, r.unread_least, r.unread_most) for r in plan.requests} == {(0, 0, 0)}


@given(st.integers(0, 1000), st.sampled_from([1, 2, 4, 16, 64]))
def test_pages_are_counted_whole(slots, page_size):
    settings = dataclasses.replace(SETTINGS, page_size=page_size)
    within = min(slots, settings.max_model_len)  # what lies past the context is on the padding page
    pages = pages_needed(settings, slots)
    assert (pages - 1) * page_size < within <= pages * page_size or (pages, within) == (0, 0)


@pytest.mark.parametrize("depth", [0, 2])
def test_preemption_at_every_step(depth):
    """Right after it the request has its known tokens and no more; then its text goes on as if it had never happened."""
    settings = dataclasses.replace(
        SETTINGS, max_model_len=CONTEXT, page_size=PAGE, num_speculative_tokens=3, readout_depth=depth
    )
    for step in range(1, 60):
        engine = make_engine(settings, eos_token_ids=(EOS,))
        Watch(engine)
        request = Request("r", [i % VOCAB for i in range(20)], SamplingParams(max_tokens=60, seed=3))
        other = Request("other", [5, 6], SamplingParams(max_tokens=60, seed=1))
        engine.add(request)
        engine.add(other)
        for _ in range(step):
            if engine.has_work:
                engine.step()
        while engine.runner.in_flight:
            engine.read()
        if request.state is not RequestState.DECODE:
            break
        known = list(request.tokens)
        engine.scheduler.preempt(request)
        assert (request.tokens, request.pages, request.slot, request.computed) == (known, [], 0, 0)
        assert (request.unread_steps, request.unread_most, request.state) == (0, 0, RequestState.WAITING)
        while engine.has_work:
            engine.step()
        assert request.tokens[20:] == expected_ids(request)
        assert other.tokens[2:] == expected_ids(other)
    assert step > 10


def test_preemption_does_not_thrash():
    """Two requests of which only one fits at its end: the second comes back once the first is through."""
    settings = dataclasses.replace(SETTINGS, max_model_len=CONTEXT, page_size=PAGE, num_pages=15)
    engine = make_engine(settings)
    for name in "ab":
        engine.add(Request(name, [1], SamplingParams(max_tokens=90, seed=0)))
    while engine.has_work:
        engine.step()
    assert engine.stats().num_preemptions == 1


def test_arrival_order_and_priority():
    settings = dataclasses.replace(SETTINGS, max_num_seqs=1)
    engine = make_engine(settings)
    requests = [
        Request("late", [1], SamplingParams(max_tokens=1, seed=0), arrival_time=2.0),
        Request("early", [1], SamplingParams(max_tokens=1, seed=0), arrival_time=1.0),
        Request("urgent", [1], SamplingParams(max_tokens=1, seed=0), arrival_time=3.0, priority=-1),
    ]
    for request in requests:
        engine.add(request)
    order = []
    while engine.has_work:
        order += [out.request_id for out in engine.step()]
    assert order == ["urgent", "early", "late"]


@given(st.lists(st.integers(0, 9), max_size=60))
def test_allocator_never_hands_out_a_page_twice(sizes):
    allocator = PageAllocator(20)
    held: list[list[int]] = []
    for size in sizes:
        pages = allocator.allocate(size)
        if pages is None:
            assert size > allocator.num_free
            if held:
                allocator.free(held.pop(0))
            continue
        held.append(pages)
        flat = [p for pages in held for p in pages]
        assert len(flat) == len(set(flat)) == allocator.usable - allocator.num_free
        assert 0 not in flat


def test_requests_that_cannot_be_served():
    engine = make_engine(dataclasses.replace(SETTINGS, num_pages=9))
    ok = SamplingParams(max_tokens=4)
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add(Request("a", [], ok))
    with pytest.raises(InvalidRequestError, match=r"1000.*outside the vocabulary"):
        engine.add(Request("a", [5, 1000], ok))
    with pytest.raises(InvalidRequestError, match=r"-1.*outside the vocabulary"):
        engine.add(Request("a", [-1], ok))
    with pytest.raises(InvalidRequestError, match=r"510 tokens.*4 output.*514.*512") as error:
        engine.add(Request("a", [1] * 510, ok))
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequestError, match="context length is 512"):
        engine.add(Request("a", [1] * 512, SamplingParams(max_tokens=None)))
    engine.add(Request("a", [1], ok))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add(Request("a", [1], ok))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):  # all of them, or none
        engine.add(Request("b", [1], ok), Request("c", [-1], ok))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add(Request("b", [1], ok), Request("b", [2], ok))
    assert engine.stats().num_waiting == 1
    engine.abort("a")
    engine.abort("unknown")
    assert [out.finish_reason for out in engine.step()] == [FinishReason.ABORT]
    assert not engine.has_work


def test_first_stop_wins():
    def accept(ids, rule=None, **options):
        request = Request("r", [1, 2], SamplingParams(**options), rule=rule)
        request.stop_ids, request.max_total = frozenset(request.params.stop_token_ids), 2 + request.params.max_tokens
        output = request.emit(ids, [0.0] * len(ids), now=0.0)
        kept = len(output.new_ids)
        assert request.tokens == [1, 2, *ids[:kept]] == [1, 2, *output.new_ids]
        return kept, output.finish_reason

    assert accept([5, 6, 7, 8], max_tokens=9) == (4, None)
    assert accept([5, 6, 7, 8], max_tokens=3) == (3, FinishReason.LENGTH)
    assert accept([5, 6, 7, 8], max_tokens=3, stop_token_ids=(6,)) == (2, FinishReason.STOP)
    assert accept([5, 6, 7, 8], max_tokens=2, stop_token_ids=(7,)) == (2, FinishReason.LENGTH)
    assert accept([5, 6, 7], max_tokens=3, stop_token_ids=(7,)) == (3, FinishReason.STOP)
    assert accept([5, 6, 7, 8], StopAfter(2), max_tokens=9, stop_token_ids=(7,)) == (2, FinishReason.STOP)
    assert accept([5, 6, 7, 8], StopAfter(2), max_tokens=1) == (1, FinishReason.LENGTH)


def test_abort_in_every_state_gives_everything_back():
    for steps in range(8):
        engine = make_engine()
        engine.add(Request("other", [3] * 5, SamplingParams(max_tokens=400, seed=0)))
        engine.add(Request("victim", [1] * 300, SamplingParams(max_tokens=50, seed=1)))
        for _ in range(steps):
            engine.step()
        held = engine.scheduler.pages.num_free
        engine.abort("victim")
        outputs = engine.step()
        assert ("victim", FinishReason.ABORT) in [(o.request_id, o.finish_reason) for o in outputs]
        assert engine.stats().num_running == 1
        assert engine.stats().num_waiting == 0
        assert steps == 0 or engine.scheduler.pages.num_free > held
        assert all(r.state is not RequestState.FINISHED for r in engine.scheduler.running)


def test_scheduling_needs_no_jax():
    code = "import jaxspec.engine.scheduler, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
