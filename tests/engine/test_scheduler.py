"""Scheduler, pages and batch packing over a mock model: random schedules, tiny pools, aborts, retraction."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config import EngineConfig, Settings, pages_for, resolve
from jaxspec.engine.engine import Engine
from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.request import FinishReason, Request, RequestState
from jaxspec.engine.scheduler import reserved_slots
from jaxspec.errors import ConfigError, InvalidRequestError
from jaxspec.sampling.params import SamplingParams
from tests.engine.mock_runner import MockRunner, next_token

VOCAB = 1000
SETTINGS = Settings(
    max_model_len=512, max_num_seqs=4, max_num_batched_tokens=96, num_pages=33, dtype="float32", on_gpu=False
)


def make_engine(settings: Settings = SETTINGS, **options) -> Engine:
    return Engine(MockRunner(settings, VOCAB), vocab_size=VOCAB, **options)


def expected_ids(request: Request, eos=()) -> list[int]:
    """What the mock model says for a request alone, by definition."""
    params, tokens = request.params, list(request.prompt_ids)
    seed, out = params.seed, []
    limit = min(params.max_tokens or 512, 512 - len(tokens))
    while len(out) < limit:
        out.append(next_token(tokens + out, seed, VOCAB))
        if out[-1] in eos or out[-1] in params.stop_token_ids:
            break
    return out


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


def random_requests(rng: random.Random, count: int, longest: int) -> list[Request]:
    requests = []
    for i in range(count):
        prompt_len = rng.choice([1, 2, 63, 64, 65, rng.randint(1, longest)])
        prompt = [rng.randrange(VOCAB) for _ in range(prompt_len)]
        params = SamplingParams(
            max_tokens=rng.randint(1, min(150, 512 - prompt_len)),
            seed=rng.getrandbits(64),
            stop_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 5]))),
        )
        requests.append(Request(f"r{i}", prompt, params, priority=rng.choice([0, 0, 1])))
    return requests


def check_schedule(seed: int) -> int:
    rng = random.Random(seed)
    # From one longest request to no shortage at all.
    settings = dataclasses.replace(SETTINGS, num_pages=rng.choice([9, 12, 16, 33]))
    engine = make_engine(settings, eos_token_ids=(7,))
    requests = random_requests(rng, rng.randint(1, 9), 300)
    arrivals = [rng.randint(0, 60) for _ in requests]
    aborts = {r.id: rng.randint(0, 120) for r in requests if rng.random() < 0.15}
    ids, ends = run(engine, requests, aborts, arrivals)
    for request in requests:
        want = expected_ids(request, eos=(7,))
        if ends.get(request.id) in (None, FinishReason.ABORT):
            assert ids[request.id] == want[: len(ids[request.id])]
        else:
            assert ids[request.id] == want, f"seed {seed}, {request.id}"
    allocator = engine._scheduler.pages
    assert allocator.num_free == allocator.usable, "pages leaked"
    assert engine.stats().kv_cache_usage == 0
    return engine.stats().num_preemptions


def test_random_schedules():
    """Every request's text is its solo text, no page leaks, and retraction really happened."""
    preemptions = sum(check_schedule(seed) for seed in range(500))
    assert preemptions > 50


@pytest.mark.slow
def test_many_random_schedules():
    assert sum(check_schedule(seed) for seed in range(1000, 2000)) > 60


def test_decodes_are_in_every_step_while_a_long_prompt_prefills():
    engine = make_engine()
    short = Request("short", [1, 2, 3], SamplingParams(max_tokens=60, seed=1))
    engine.add(short)
    engine.step()
    engine.add(Request("long", list(range(400)), SamplingParams(max_tokens=2, seed=2)))
    runner = engine.runner
    first = len(runner.plans)
    while engine.has_work:
        engine.step()
    mixed = [p for p in runner.plans[first:] if p.prefill]
    assert len(mixed) == 5  # 400 tokens at 95 a step beside one decode
    assert all(p.decode == (short,) for p in mixed)
    assert all(p.prefill_tokens == 95 for p in mixed[:-1])


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


@given(known=st.integers(1, 500), k=st.integers(0, 7), depth=st.integers(0, 3))
def test_reserved_slots_is_the_exact_maximum(known, k, depth):
    """Simulates the worst case of design: every dispatched step accepts all its drafts."""
    n = k + 1
    deepest, anchor = 0, known - 1  # the newest token's KV is not written yet
    for _ in range(depth + 1):
        deepest = max(deepest, anchor + n)  # verify writes [anchor, anchor + n)
        anchor += n
        if k:
            deepest = max(deepest, anchor + k - 1)  # k - 1 draft steps behind the accepted window
    assert reserved_slots(known, k=k, depth=depth) == deepest


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
    engine.abort("a")
    engine.abort("unknown")
    assert [out.finish_reason for out in engine.step()] == [FinishReason.ABORT]
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_model_len": 1024}, "over the model's own limit of 512"),
        ({"max_num_seqs": 16, "max_num_batched_tokens": 8}, "max_num_batched_tokens 8 is under max_num_seqs 16"),
        ({"num_gpu_blocks_override": 5}, "lower max_model_len to at most 256"),
        ({"num_gpu_blocks_override": 1}, "at least 2"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"dtype": "int4"}, "dtype must be"),
        ({"num_speculative_tokens": 8}, "between 0 and 7"),
        ({"num_speculative_tokens": -1}, "between 0 and 7"),
        ({"synthetic_acceptance_length": 2.0}, "synthetic_acceptance_length needs speculation"),
        ({"num_speculative_tokens": 3, "synthetic_acceptance_length": 4.5}, "between 1 and 4 .* got 4.5"),
        ({"num_speculative_tokens": 3, "synthetic_acceptance_length": 0.9}, "between 1 and 4"),
        ({"num_speculative_tokens": 3, "synthetic_acceptance_length": float("nan")}, "between 1 and 4"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**options), model_max_position=512, page_bytes=1000, free_bytes=10**6, on_gpu=False)


def test_pool_is_sized_by_memory_and_capped_by_need():
    options = EngineConfig(max_num_seqs=4)
    sized = resolve(options, model_max_position=512, page_bytes=1000, free_bytes=20_000, on_gpu=False)
    assert sized.num_pages == 20
    capped = resolve(options, model_max_position=512, page_bytes=1000, free_bytes=10**9, on_gpu=False)
    assert capped.num_pages == 4 * pages_for(512) + 1


class KeepTwo:
    """A host rule that ends the output after two ids."""

    def __init__(self):
        self.seen = 0

    def feed(self, ids, ended):  # noqa: ARG002
        self.seen += len(ids)
        return len(ids) - (self.seen - 2) if self.seen >= 2 else None


def test_first_stop_wins():
    def accept(ids, rule=None, **options):
        request = Request("r", [1, 2], SamplingParams(**options), stop_rule=rule)
        request.stop_ids, request.max_total = frozenset(request.params.stop_token_ids), 2 + request.params.max_tokens
        kept, reason = request.accept(ids)
        assert request.tokens == [1, 2, *ids[:kept]]
        return kept, reason

    assert accept([5, 6, 7, 8], max_tokens=9) == (4, None)
    assert accept([5, 6, 7, 8], max_tokens=3) == (3, FinishReason.LENGTH)
    assert accept([5, 6, 7, 8], max_tokens=3, stop_token_ids=(6,)) == (2, FinishReason.STOP)
    assert accept([5, 6, 7, 8], max_tokens=2, stop_token_ids=(7,)) == (2, FinishReason.LENGTH)
    assert accept([5, 6, 7], max_tokens=3, stop_token_ids=(7,)) == (3, FinishReason.STOP)
    assert accept([5, 6, 7, 8], KeepTwo(), max_tokens=9, stop_token_ids=(7,)) == (2, FinishReason.STOP)
    assert accept([5, 6, 7, 8], KeepTwo(), max_tokens=1) == (1, FinishReason.LENGTH)


def test_abort_in_every_state_gives_everything_back():
    for steps in range(8):
        engine = make_engine()
        engine.add(Request("other", [3] * 5, SamplingParams(max_tokens=400, seed=0)))
        engine.add(Request("victim", [1] * 300, SamplingParams(max_tokens=50, seed=1)))
        for _ in range(steps):
            engine.step()
        held = engine._scheduler.pages.num_free
        engine.abort("victim")
        outputs = engine.step()
        assert ("victim", FinishReason.ABORT) in [(o.request_id, o.finish_reason) for o in outputs]
        assert engine.stats().num_running == 1
        assert engine.stats().num_waiting == 0
        assert steps == 0 or engine._scheduler.pages.num_free > held
        assert all(r.state is not RequestState.FINISHED for r in engine._scheduler.running)
