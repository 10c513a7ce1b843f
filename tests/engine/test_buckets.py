"""Plans run in buckets that are not much larger: tokens computed for tokens needed, over whole loads and without a device."""

import random
from dataclasses import replace

import numpy as np
import pytest

from jaxspec.config import Settings, pages_for
from jaxspec.engine.buckets import Bucket, bucket_table, choose_bucket
from jaxspec.engine.draft_control import FixedDrafts, Load
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan import PrefillRow, StepPlan
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Scheduler
from jaxspec.engine.step_output import StepOutput
from jaxspec.sampling.params import SamplingParams
from tests.engine.mock_runner import MockRunner

GPU = Settings(
    max_model_len=4096, max_num_seqs=128, max_num_batched_tokens=2048, num_pages=128 * 64 + 1, dtype="bfloat16",
    on_gpu=True, prefix_caching=False,
)  # fmt: skip
GREEDY, FULL = SamplingParams(temperature=0, ignore_eos=True), SamplingParams(temperature=1, top_p=0.9, ignore_eos=True)
OUTPUT = 64


def plans(settings: Settings, at_once: int, lengths: tuple[int, int], params: SamplingParams) -> list[StepPlan]:
    """Of a load that keeps so many requests running, whose windows accept no draft or one in turn."""
    rng, scheduler, done = random.Random(0), Scheduler(settings, bucket_table(settings)), []
    prompts = [rng.randint(*lengths) for _ in range(max(2 * at_once, 8))]

    def begin() -> None:
        if prompts:
            prompt = prompts.pop()
            request = Request(str(len(prompts)), [0] * prompt, params, arrival_time=-float(len(prompts)))
            request.max_total, request.num_drafts = prompt + OUTPUT, settings.num_speculative_tokens
            scheduler.add(request)

    for _ in range(at_once):
        begin()
    while plan := scheduler.plan():
        scheduler.dispatched(plan)
        scheduler.read(plan)
        done.append(plan)
        for row in plan.prefill:
            row.request.tokens += [0] * row.final
        for request, verified in zip(plan.decode, plan.verified, strict=True):
            request.tokens += [0] * (1 + (len(request.tokens) % 2 if verified else 0))
        for request in list(scheduler.running):
            if len(request.tokens) >= request.max_total:
                scheduler.finish(request)
                begin()
    assert not prompts
    assert not scheduler.running
    assert not scheduler.waiting
    return done


def padding(settings: Settings, *load) -> float:
    """Tokens that steps with prompts compute for each that their plans need."""
    mixed = [plan for plan in plans(settings, *load) if plan.prefill]
    table = bucket_table(settings)
    computed = sum(bucket(table, plan).tokens for plan in mixed)
    return computed / sum(plan.prefill_tokens + len(plan.decode) * (plan.drafts + 1) for plan in mixed)


def bucket(table: tuple[Bucket, ...], plan: StepPlan, **options) -> Bucket:
    sizes = {"prefill_tokens": plan.prefill_tokens, "prefill_rows": len(plan.prefill), "decode_rows": len(plan.decode)}
    return choose_bucket(table, **sizes, full=plan.needs_full, drafts=plan.drafts, **options)


@pytest.mark.parametrize(
    ("drafts", "params", "at_once", "lengths", "most"),
    [
        # Two sizes, both beside the most decode rows, made 2.1, 1.9, 2.5, 1.5, 1.3, 3.8 and 3.8 of these.
        (0, GREEDY, 1, (1024, 1024), 1.05),
        (0, GREEDY, 1, (200, 200), 1.4),
        (3, GREEDY, 1, (1024, 1024), 1.1),
        (3, GREEDY, 8, (64, 2048), 1.1),
        (3, GREEDY, 32, (64, 2048), 1.25),
        (3, GREEDY, 1, (200, 200), 1.65),
        (3, FULL, 1, (200, 200), 1.65),
    ],
)
def test_prompts_find_steps_that_fit(drafts, params, at_once, lengths, most):
    assert padding(replace(GPU, num_speculative_tokens=drafts), at_once, lengths, params) <= most


def test_prompts_find_steps_among_those_of_several_numbers_of_drafts():
    """Beside few requests windows of the most rows are padding: many requests decide which sizes there are."""
    settings = replace(GPU, num_speculative_tokens=3, adaptive_drafts=True)
    assert padding(settings, 1, (1024, 1024), GREEDY) <= 1.5
    assert padding(settings, 8, (64, 2048), GREEDY) <= 1.4
    assert padding(settings, 1, (200, 200), GREEDY) <= 2.9
    assert padding(settings, 32, (64, 2048), GREEDY) <= 1.4


@pytest.mark.parametrize(
    "drafts", [{}, {"num_speculative_tokens": 3}, {"num_speculative_tokens": 3, "adaptive_drafts": True}]
)
def test_one_row_with_a_rule_has_a_step_of_its_own(drafts):
    settings = replace(GPU, **drafts)
    table = bucket_table(settings)
    assert len(table) <= 24
    decode = [plan for plan in plans(settings, 1, (100, 100), FULL) if not plan.prefill]
    assert {bucket(table, plan).decode_rows for plan in decode} == {1}


def test_the_cheapest_is_what_was_measured_to_be():
    """Where a bucket that holds the plan was not measured, the fewest tokens decide."""
    small, large, other = Bucket(64, 4, 8, "full"), Bucket(128, 4, 8, "full"), Bucket(256, 4, 8, "full")
    plan = {"prefill_tokens": 60, "prefill_rows": 1, "decode_rows": 3, "full": False, "drafts": 0}
    table = (small, large, other)
    assert choose_bucket(table, **plan) == small
    assert choose_bucket(table, **plan, seconds={small: 3.0, large: 1.0, other: 2.0}) == large
    assert choose_bucket(table, **plan, seconds={large: 1.0, other: 2.0}) == small
    assert choose_bucket(table, **plan | {"prefill_tokens": 100}, seconds={large: 2.0, other: 1.0}) == other


def test_rows_begin_where_those_of_the_bucket_do():
    """Of the one that ran: while a smaller one is still compiled, a larger one serves."""
    request = Request("r", [0], GREEDY)
    plan = StepPlan((PrefillRow(request, 0, 5, False), PrefillRow(request, 7, 3, True)), (request, request), drafts=2)
    for tokens in (64, 256):
        arrays = [np.zeros(4, np.int32)] * 7
        prefill, decode = StepOutput(plan, Bucket(tokens, 4, 8, "full", 2), *arrays).token_offsets()
        assert (prefill.tolist(), decode.tolist()) == ([0, 5], [tokens, tokens + 3])


class Heard(FixedDrafts):
    """One draft a step, and the loads that it was told of."""

    def __init__(self):
        super().__init__(1)
        self.loads: list[Load] = []

    def choose(self, load: Load) -> int:
        self.loads.append(load)
        return super().choose(load)


@pytest.mark.parametrize("scarce", [{"max_num_seqs": 2}, {"num_pages": 2 * pages_for(300 + OUTPUT) + 2}])
def test_what_cannot_begin_is_no_prompt_of_the_next_step(scarce):
    """For lack of slots, or of pages, once that has been found out; until a request ends."""
    settings = replace(GPU, num_speculative_tokens=3, adaptive_drafts=True, **scarce)
    control = Heard()
    scheduler = Scheduler(settings, bucket_table(settings), control=control)
    for i in range(5):
        request = Request(str(i), [0] * 300, GREEDY, arrival_time=float(i))
        request.max_total, request.num_drafts = 300 + OUTPUT, 3
        scheduler.add(request)
    rows = []
    for step in range(4):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.dispatched(plan)
        scheduler.read(plan)
        rows.append((len(plan.prefill), len(plan.decode), plan.drafts))
        if step == 2:
            scheduler.finish(plan.decode[0])
    assert rows == [(2, 0, 1), (0, 2, 1), (0, 2, 1), (1, 1, 1)]
    assert [load.prompts for load in control.loads] == [True, False, False, True]


def test_prompts_that_no_step_without_drafts_holds_run_beside_one_draft():
    """Requests that want none. A prompt that comes when the drafts have been chosen is cut to what such a step holds."""
    settings = replace(GPU, num_speculative_tokens=3, adaptive_drafts=True)
    scheduler = Scheduler(settings, bucket_table(settings), control=FixedDrafts(0))
    for i, length in enumerate((300, 100, 300, 300)):
        request = Request(str(i), [0] * length, GREEDY, arrival_time=float(i))
        request.max_total = length + OUTPUT
        scheduler.add(request)
    assert scheduler.draft_choices(384, full=True) == (0, 1, 3)
    assert scheduler.draft_choices(385, full=True) == scheduler.draft_choices(10**6, full=True) == (1, 3)
    late = scheduler.plan_rows([], 0, prompts=True)
    assert [row.length for row in late.prefill] == [300, 84]
    scheduler.dispatched(scheduler.commit(late, 0, needs_full=False, split=False))
    plan = scheduler.plan()
    assert ([row.length for row in plan.prefill], len(plan.decode), plan.drafts) == ([16, 300, 300], 1, 1)
    assert plan.verified == (0,)


def test_texts_do_not_depend_on_the_table():
    """Many buckets or few: each step's array says the same."""
    few = Settings(
        max_model_len=2048, max_num_seqs=20, max_num_batched_tokens=512, num_pages=400, dtype="float32", on_gpu=False,
        num_speculative_tokens=3,
    )  # fmt: skip
    texts = []
    for settings in (few, replace(few, on_gpu=True)):
        runner = MockRunner(settings, 50)
        engine = Engine(runner, vocab_size=50)
        rng = random.Random(1)
        for i in range(30):
            prompt = [rng.randrange(50) for _ in range(rng.choice([5, 100, 300, 700]))]
            params = GREEDY if i < 24 else FULL
            engine.add(Request(str(i), prompt, replace(params, max_tokens=12, seed=i), arrival_time=float(i)))
        said: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                said.setdefault(output.request_id, []).extend(output.new_ids)
        assert len({bucket(runner.buckets, plan) for plan in runner.plans}) >= (5 if settings.on_gpu else 2)
        texts.append(said)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 30
