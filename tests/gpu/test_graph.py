"""A step on the GPU is one recorded graph, launched once: with and without speculation, with all Mosaic kernels."""

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bench.harness.models import draw
from bench.harness.trace import compute_events
from jaxspec.config import Lookup
from jaxspec.engine.addresses import leave_gaps
from jaxspec.engine.batch import InputLayout
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.sampling.params import SamplingParams
from tests.engine.scripted import one_device
from tests.engine.test_sparse_backends import SIZES as SPARSE_SIZES
from tests.engine.tiny import HF_CONFIG, SETTINGS
from tests.tiny_models import CONFIGS

pytestmark = pytest.mark.gpu

STEPS = 3
# The fewest ids, rounded up, whose sampling is kernels of ours too; its references have loops, which no graph holds.
KERNEL_VOCAB = 2048
# The smallest sizes that all Mosaic GPU kernels support.
SIZES = {
    "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None, "n_routed_experts": 8, "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("k", "drafts", "lookup"),
    [
        (0, 0, None), (3, 3, None), (3, 1, None), (3, 0, None), (3, 3, Lookup(2, 4)),
        (3, 3, Lookup(1, 24, beside_model=True)),
    ],
)  # fmt: skip
def test_a_decode_step_is_one_launch(k, drafts, lookup, rows):
    """With `drafts` of at most k; with none the draft's keys are written all the same."""
    mesh = one_device()
    weights = draw(HF_CONFIG | SIZES, mesh, np.dtype(jax.numpy.bfloat16))
    settings = dataclasses.replace(SETTINGS, dtype="bfloat16", on_gpu=True, num_speculative_tokens=k, lookup=lookup)
    bucket = Bucket(0, 0, rows, "lean", drafts)
    draft = weights.draft if settings.model_drafts else None
    runner = Runner(weights.model, weights.params, settings, mesh, draft=draft, buckets=(bucket,))
    runner.warm_up()
    wanted = {"mla_decode", "mla_query", "kv_write", "moe", "moe_route"}
    # For single tokens: of one plain row, or of a model that drafts for it.
    wanted |= {"norm_linear"} if rows == 1 and (draft is not None or drafts == 0) else set()
    assert {name for name, chosen in runner.kernels.items() if chosen == {"mosaic"}} >= wanted
    padding = StepPlan((), (), drafts=drafts)

    def step():
        runner.dispatch(padding)
        runner.read()

    events, launches = launches_of(runner, step)
    assert launches == STEPS, f"{events} kernels in {launches} launches of {STEPS} steps"
    assert events > 10 * STEPS


# The same for grouped-query attention and a mixture of experts.
GROUPED = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("k", "lookup"), [(0, None), (3, Lookup(2, 4))])
@pytest.mark.parametrize("variant", ["qwen3-moe", "gpt-oss"])
def test_a_decode_step_of_grouped_queries_is_one_launch(variant, k, lookup, rows):
    """A dense layer and mixtures; or sinks, sliding windows, biases and a clamp."""
    mesh = one_device()
    weights = draw(CONFIGS[variant] | GROUPED, mesh, np.dtype(jax.numpy.bfloat16), with_draft=False)
    settings = dataclasses.replace(SETTINGS, dtype="bfloat16", on_gpu=True, num_speculative_tokens=k, lookup=lookup)
    bucket = Bucket(0, 0, rows, "lean", k)
    runner = Runner(weights.model, weights.params, settings, mesh, buckets=(bucket,))
    runner.warm_up()
    chosen = {name for name, ran in runner.kernels.items() if ran == {"mosaic"}}
    assert chosen >= {"gqa_decode", "moe", "moe_route"}
    padding = StepPlan((), (), drafts=k)

    def step():
        runner.dispatch(padding)
        runner.read()

    events, launches = launches_of(runner, step)
    assert launches == STEPS, f"{events} kernels in {launches} launches of {STEPS} steps"


@pytest.mark.parametrize(("k", "rows"), [(0, 8), (3, 64)])
def test_a_decode_step_over_chosen_keys_is_one_launch(k, rows):
    """Also one of more tokens than its kernels take at a time."""
    mesh = one_device()
    weights = draw(CONFIGS["glm-dsa"] | SPARSE_SIZES, mesh, np.dtype(jax.numpy.bfloat16))
    settings = dataclasses.replace(SETTINGS, max_num_seqs=rows, dtype="bfloat16", on_gpu=True, num_speculative_tokens=k)
    draft = weights.draft if k else None
    runner = Runner(
        weights.model, weights.params, settings, mesh, draft=draft, buckets=(Bucket(0, 0, rows, "lean", k),)
    )
    runner.warm_up()
    assert runner.kernels["key_choice"] == runner.kernels["mla_sparse"] == {"mosaic"}
    padding = StepPlan((), (), drafts=k)

    def step():
        runner.dispatch(padding)
        runner.read()

    events, launches = launches_of(runner, step)
    assert launches == STEPS, f"{events} kernels in {launches} launches of {STEPS} steps"


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("prompt", [0, 400], ids=["decode", "mixed"])
@pytest.mark.parametrize("variant", ["lean", "full"])
def test_a_step_of_live_rows_is_one_launch(variant, prompt, k):
    """Rows that decode, also beside a prompt that is read in chunks; in full buckets with every rule of the sampler."""
    mesh, rows = one_device(), SETTINGS.max_num_seqs
    weights = draw(HF_CONFIG | SIZES | {"vocab_size": KERNEL_VOCAB}, mesh, np.dtype(jax.numpy.bfloat16))
    settings = dataclasses.replace(SETTINGS, dtype="bfloat16", on_gpu=True, num_speculative_tokens=k)
    decode, mixed = Bucket(0, 0, rows, variant, k), Bucket(SETTINGS.max_num_batched_tokens, 4, rows, variant, k)
    runner = Runner(
        weights.model, weights.params, settings, mesh, draft=weights.draft if k else None, buckets=(decode, mixed)
    )
    runner.warm_up()
    rules = {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "presence_penalty": 0.1, "logprobs": 3, "logit_bias": {7: 1.0}}
    params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, **rules if variant == "full" else {})
    engine = Engine(runner, vocab_size=KERNEL_VOCAB)
    engine.add(*(Request(f"r{i}", [9 + i] * 5, params) for i in range(rows - 1)))
    plans = []
    engine.step_log = SimpleNamespace(write=lambda plan, *_, **__: plans.append(plan))
    for _ in range(4):
        engine.step()
    if prompt:
        engine.add(Request("long", [11] * prompt, params))
        engine.step()
    del plans[:]
    events, launches = launches_of(runner, engine.step)
    assert all(plan.decode and bool(plan.prefill) == bool(prompt) for plan in plans)
    assert launches == STEPS, f"{events} kernels in {launches} launches of {STEPS} steps"


def launches_of(runner: Runner, step: Callable[[], Any]) -> tuple[int, int]:
    """Kernels of `STEPS` calls, and the launches that started them. Steps are read before their last kernel has run."""
    runner.wait()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                step()
            runner.wait()
        (file,) = Path(folder).glob("**/*.xplane.pb")
        trace = jax.profiler.ProfileData.from_file(str(file))
        events = list(compute_events(trace))
    by_launch = Counter(event.launch for event in events)
    print("kernels of each launch:", dict(by_launch))
    return len(events), len(by_launch)


def test_large_arrays_lie_where_they_lay():
    """Whichever small ones come and go meanwhile: a recorded graph is changed where its temporaries move."""
    sharding = NamedSharding(one_device(), PartitionSpec())

    def placed(size: int) -> jax.Array:
        return jax.device_put(np.zeros(size, np.uint8), sharding).block_until_ready()

    kept = leave_gaps([InputLayout(Bucket(0, 0, 8, "lean", 0), page_size=64, max_pages=8)], sharding)
    places, alive = set(), []
    for step in range(8):
        alive = [*alive[-2:], placed(1000 + 500 * step), placed(1 << 16)]
        places.add(placed(64 << 20).unsafe_buffer_pointer())
    assert len(places) == 1, len(kept)
