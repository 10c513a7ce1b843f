"""Layers that remember and layers that choose, in pairs with all else that a step does.

Speculation, grammars, mixed and split steps, retraction, late readout, shared prefixes and slots full of NaN at once: each
request has the text that plain decoding gives it alone. tests/engine/test_mesh.py has these layers over two devices,
tests/engine/test_recurrent_states.py numbers of drafts that change from step to step.
"""

import dataclasses
import random

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.compat import compiles
from jaxspec.compile_cache import open_store
from jaxspec.engine.buckets import bucket_table
from jaxspec.engine.runner import Runner
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mtp import NextN
from jaxspec.models.registry import read_config
from tests.engine.scripted import numpy_params, one_bucket, one_device, warmed, with_caches_of
from tests.engine.test_grammars import EVERY, alone, check
from tests.engine.test_schedules import make_engine, options
from tests.engine.test_transforms import plant
from tests.engine.tiny import SETTINGS, VOCAB, cached, fill_cache
from tests.tiny_models import CONFIGS
from tests.toys import Echo

FEWER = {"vocab_size": VOCAB, "num_hidden_layers": 2, "full_attention_interval": 2}
# Kimi-Linear has no layer that drafts.
DRAFTS = {"qwen3.5": NextN, "qwen3.5-moe": NextN, "glm-dsa": NextN, "kimi-linear": None}
# Readout depth, mixed steps, usable pages.
SOME = EVERY[::5]
# All drafts here are planted, right and wrong by turns; the draft itself is to write its keys.
K = 3


@cached
def runner_of(name: str, k: int) -> Runner:
    """One bucket that holds every plan and knows every parameter; with drafts, decode steps also exist in two parts."""
    layers = {} if name == "kimi-linear" else FEWER  # its kinds are lists, one layer of each already
    config = read_config(CONFIGS[name] | layers | {"vocab_size": VOCAB})
    model, mesh = CausalLM(config, jnp.float32), one_device()
    draft = None
    if k:
        nextn = DRAFTS[name] and NextN(config, jnp.float32)
        draft = (nextn, numpy_params(nextn, 4)) if nextn else (Echo(), {})
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=k)
    settings = dataclasses.replace(with_caches_of(model, settings), prefix_caching=True)
    split = tuple(bucket for bucket in bucket_table(settings) if not bucket.prefill_tokens)[-1:] if k else ()
    buckets = one_bucket(settings, "full")
    params = numpy_params(model, 3)
    return warmed(
        Runner(model, params, settings, mesh, draft=draft, buckets=buckets, split=split, files=open_store(None))
    )


@cached
def plain_texts(name: str) -> dict:
    return alone(runner_of(name, 0))


@pytest.mark.full
@pytest.mark.parametrize("name", DRAFTS)
def test_every_text_is_that_of_plain_decoding(name):
    """Greedy and seeded, free and constrained, with drafts that are right, wrong or illegal by turns."""
    want, runner, rng = plain_texts(name), runner_of(name, K), random.Random(0)
    fill_cache(runner, np.nan)
    plant(make_engine(runner), (), None)  # as `check` plants, with operations of its own, which compile once
    before = compiles.total
    accepted = preempted = hits = 0
    for depth, mixed, usable in SOME:
        with options(runner, readout_depth=depth, mixed=mixed):
            engine = make_engine(runner, usable)
            for _ in range(2):  # again, with what the first time has shared
                accepted += check(runner, want, engine, rng)
        preempted += engine.stats().num_preemptions
        hits += engine.stats().prefix_cache_hits
    assert compiles.total == before
    assert preempted > 0
    assert hits > 0
    assert accepted > 120 * len(SOME)
