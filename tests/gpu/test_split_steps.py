"""Steps in two parts on the GPU: two recorded graphs, which together do what the step in one does, in place."""

import dataclasses
import functools
import random
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.harness.models import draw
from jaxspec.compat import compiles
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.masks import write_masks
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.runner import Runner
from jaxspec.sampling.params import SamplingParams
from tests.engine.scripted import one_device
from tests.engine.test_grammars import check, solo
from tests.engine.test_schedules import options
from tests.engine.test_transforms import plant
from tests.engine.tiny import EOS, HF_CONFIG, SETTINGS, VOCAB, fill_cache, make_engine, tiny_runner
from tests.gpu.test_graph import KERNEL_VOCAB, SIZES, STEPS, launches_of
from tests.host_rules import RandomConstraint

pytestmark = pytest.mark.gpu

ROWS = SETTINGS.max_num_seqs
SPECULATING = pytest.mark.parametrize("k", [0, 3])


@functools.cache
def kernel_runner(k: int, vocab_size: int = VOCAB) -> Runner:
    """In bfloat16 with Mosaic kernels, of sampling with KERNEL_VOCAB; its decode step exists in one part and in two."""
    mesh = one_device()
    weights = draw(HF_CONFIG | SIZES | {"vocab_size": vocab_size}, mesh, np.dtype(jnp.bfloat16))
    settings = dataclasses.replace(SETTINGS, dtype="bfloat16", on_gpu=True, num_speculative_tokens=k)
    decode = Bucket(0, 0, ROWS, "full", k)
    buckets = (decode, Bucket(SETTINGS.max_num_batched_tokens, 4, ROWS, "full", k))
    runner = Runner(
        weights.model,
        weights.params,
        settings,
        mesh,
        draft=weights.draft if k else None,
        buckets=buckets,
        split=(decode,),
    )
    runner.warm_up()
    return runner


@SPECULATING
def test_each_part_is_one_launch(k):
    runner = kernel_runner(k, KERNEL_VOCAB)

    def whole():
        runner.dispatch(StepPlan((), (), drafts=k, needs_full=True))
        runner.read()

    def in_parts():
        runner.dispatch(StepPlan((), (), drafts=k, needs_full=True, split=True))
        runner.choose()
        runner.read()

    # A graph is recorded anew where an array lies elsewhere than at its warm-up, as after another executable's.
    whole()
    in_parts()
    kernels, launches = launches_of(runner, whole)
    assert launches == STEPS, f"{kernels} kernels in {launches} launches of {STEPS} steps in one part"
    kernels, launches = launches_of(runner, in_parts)
    assert launches == 2 * STEPS, f"{kernels} kernels in {launches} launches of {STEPS} steps in two parts"


def requests():
    """Constrained and free ones by turns."""
    rng = np.random.default_rng(2)
    for i in range(ROWS):
        rule = RandomConstraint(VOCAB, EOS, seed=i, length=60) if i % 2 else None
        params = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
        yield Request(f"r{i}", rng.integers(6, VOCAB, 9 + 7 * i).tolist(), params, rule, arrival_time=float(i))


def decoding(runner) -> Engine:
    """An engine with all `requests` past their prompts, every step read at once."""
    with options(runner, readout_depth=0):
        engine = Engine(runner, vocab_size=VOCAB, eos_token_ids=(EOS,))
    everyone = list(requests())
    engine.add(*everyone)
    while any(request.state is not RequestState.DECODE for request in everyone):
        engine.step()
    return engine


def copied(state):
    return jax.tree.map(jnp.copy, state)


@SPECULATING
@pytest.mark.parametrize("make", [pytest.param(lambda k: tiny_runner(k, split=True), id="float32"), kernel_runner])
def test_both_parts_do_what_the_whole_step_does(k, make):
    """From the same state with live rows: the same output, and the same state after it, step by step."""
    runner = make(k)
    engine = decoding(runner)
    for _ in range(4):
        plan = engine.scheduler.plan()
        before, rows = copied(runner.state), len(plan.decode)
        write_masks(runner, plan)
        runner.dispatch(plan)
        whole, after = runner.read(), copied(runner.state)
        runner.state = before
        runner.dispatch(dataclasses.replace(plan, split=True))
        assert runner.begun is not None
        write_masks(runner, plan)
        runner.choose()
        parts = runner.read()
        assert rows == ROWS
        for name in ("emitted", "verified", "accepted", "flags", "ids", "drafts"):
            np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name), err_msg=name)
        # XLA fuses the two differently, and bfloat16 rounds what it fuses.
        exact = runner.settings.dtype == "float32"
        np.testing.assert_allclose(parts.logprobs, whole.logprobs, atol=1e-4 if exact else 5e-2)
        for name, got, want in zip(after._fields, runner.state, after, strict=True):
            if name == "written":  # the number of the step
                continue
            tolerance = (1e-2 if exact else 5e-2) if name in ("kv", "draft_kv", "draft_logits", "draft_log_z") else 0
            for arrays in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                ours, theirs = (np.asarray(array.astype(jnp.float32)) for array in arrays)
                np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=tolerance, err_msg=name)
        # The host goes on as if it had read the step.
        engine.scheduler.dispatched(plan)
        engine.scheduler.read(plan)
        for request, ids, emitted, drafts in zip(plan.decode, parts.ids, parts.emitted, parts.drafts, strict=True):
            request.emit(ids[:emitted].tolist(), [0.0] * emitted, now=0.0)
            request.drafts = tuple(drafts.tolist())
    for request in list(engine.scheduler.running):
        engine.abort(request.id)
    while engine.has_work:
        engine.step()


@SPECULATING
def test_every_text_is_that_of_plain_decoding(k):
    """Real grammars beside free requests, drafts right, wrong and illegal, with preemptions; many steps are split."""
    runner, want, rng = tiny_runner(k, split=True), solo(False), random.Random(0)
    fill_cache(runner, np.nan)
    if k:
        plant(make_engine(k=k, split=True), (), None)  # compiles its own operations
    before = compiles.total
    for depth, mixed, usable in ((1, True, None), (1, False, 6), (3, True, 6)):
        with options(runner, readout_depth=depth, mixed=mixed):
            engine = Engine(runner, vocab_size=VOCAB, eos_token_ids=(EOS,))
            if usable is not None:
                engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - usable)
            plans = []
            engine.step_log = SimpleNamespace(write=lambda plan, *_, plans=plans, **__: plans.append(plan))
            check(runner, want, engine, rng)
        assert sum(plan.split for plan in plans) > len(plans) / 4
    assert compiles.total == before


@SPECULATING
def test_state_keeps_its_addresses_and_nothing_stays(k):
    """Through both parts and the masks' upload between them; what the first hands to the second is written in place."""
    runner = kernel_runner(k)
    addresses = in_use = 0
    for turn in range(2):
        with options(runner, readout_depth=1):
            engine = Engine(runner, vocab_size=VOCAB, eos_token_ids=(EOS,))
            engine.add(*requests())
            plans = []
            engine.step_log = SimpleNamespace(write=lambda plan, *_, plans=plans, **__: plans.append(plan))
            while engine.has_work:
                assert not any(out.error for out in engine.step())
        assert any(plan.split for plan in plans)
        now = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(runner.state)]
        runner.wait()
        time.sleep(0.1)  # a step's inputs go when a thread of XLA's has seen its end
        used = jax.devices()[0].memory_stats()["bytes_in_use"]
        if turn:
            assert now == addresses
            assert used <= in_use
        addresses, in_use = now, used
