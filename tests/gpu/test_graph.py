"""A decode step on the GPU is one recorded graph, launched once: with and without speculation, with all Mosaic kernels."""

import dataclasses
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from bench.harness.models import draw
from bench.harness.trace import compute_events
from jaxspec.config import Lookup
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.runner import Runner
from tests.engine.scripted import one_device
from tests.engine.tiny import HF_CONFIG, SETTINGS

pytestmark = pytest.mark.gpu

STEPS = 3
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
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                runner.dispatch(padding)
                runner.read()
        (trace,) = Path(folder).glob("**/*.xplane.pb")
        events = list(compute_events(jax.profiler.ProfileData.from_file(str(trace))))
    launches = {launch for _, _, launch in events}
    assert len(launches) == STEPS, f"{len(events)} kernels in {len(launches)} launches of {STEPS} steps"
    assert len(events) > 10 * STEPS
