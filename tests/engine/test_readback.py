"""Steps that write their output into the host's memory: the texts of steps whose output is copied.

A CPU has no kernel that writes there, so a callback does it.
"""

import ctypes
import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxspec.engine import runner as runners
from jaxspec.engine import step
from jaxspec.engine.buckets import parts
from jaxspec.engine.runner import Runner
from jaxspec.models.decoder import CausalLM
from pallas_kernels.readback import host_memory
from tests.engine.scripted import late_buckets, one_bucket, one_device, target_params, tiny_config, tiny_draft
from tests.engine.test_grammars import check, record_plans, solo
from tests.engine.test_mesh import MTP, SPLIT, served
from tests.engine.test_schedules import make_engine, options
from tests.engine.tiny import SETTINGS, fill_cache


def _write(words, to):
    low, high, number = np.asarray(to)[:3].view(np.uint32).tolist()
    if low or high:
        flat = np.asarray(words).reshape(-1)
        pairs = np.ascontiguousarray(np.stack([flat, np.full_like(flat, number)], axis=1))
        ctypes.memmove(low | high << 32, pairs.ctypes.data, pairs.nbytes)
    return np.asarray([number], np.uint32).view(np.int32)


@pytest.fixture
def written(monkeypatch):
    """Steps write."""
    monkeypatch.setattr(runners.readback, "is_used", lambda: True)
    monkeypatch.setattr(host_memory, "_page_locked", lambda shape: np.zeros(shape, np.int32))
    number = jax.ShapeDtypeStruct((1,), jnp.int32)
    monkeypatch.setattr(step.readback_api, "write", lambda words, to: io_callback(_write, number, words, to))


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 3])
def test_every_text_is_that_of_plain_decoding(k, request):
    """With grammars, whose steps choose late, read at once or late, in mixed steps or not, under retraction."""
    want = solo(True)  # of steps that copy, as other tests find it too
    request.getfixturevalue("written")
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=k, readout_depth=3)
    runner = Runner(
        CausalLM(tiny_config("tiny"), jnp.float32), target_params("tiny"), settings, one_device(),
        draft=tiny_draft("nextn") if k else None, buckets=one_bucket(settings, "full"), split=late_buckets(settings),
    )  # fmt: skip
    runner.warm_up()
    ran = runner.run_padding(runner.buckets[0])
    assert (ran.packed, ran.top) == (None, None)
    # Nothing of a decode step is new memory.
    assert not jax.tree.leaves(runner.executable(parts(runner.split[0])[1]).out_info[1])
    fill_cache(runner, np.nan)
    preempted = 0
    for depth, mixed, usable in ((0, True, 6), (1, True, 6), (2, False, None), (3, True, 6)):
        with options(runner, readout_depth=depth, mixed=mixed):
            engine = make_engine(runner, usable)
            plans = record_plans(engine)
            check(runner, want, engine, random.Random(0))
        assert any(plan.split for plan in plans) == (depth > 0)
        preempted += engine.stats().num_preemptions
    assert preempted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ranks"),
    [pytest.param(MTP, 1, id="a rank"), pytest.param(SPLIT, 2, id="two ranks", marks=pytest.mark.long)],
)
def test_two_devices_write_what_one_copies(case, ranks, request):
    """Of the devices of a rank one writes; each rank has a place of its own. Some requests want alternatives."""
    one, want, want_logprobs = served(case, 1)
    assert one.run_padding(one.buckets[0]).packed is not None
    request.getfixturevalue("written")
    runner, ids, logprobs = served.__wrapped__(case, 2, ranks)
    assert runner.run_padding(runner.buckets[0]).packed is None
    assert ids == want
    np.testing.assert_allclose(logprobs, want_logprobs, atol=2e-4)
