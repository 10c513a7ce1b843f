"""Quantised targets and drafts, and FP8 latents, in pairs with all else that a step does.

Speculation, grammars, mixed steps, retraction, late readout and free pages full of NaN at once: each request has the text
that plain decoding of the same codes gives it alone. By default tests/engine/test_fp8_cache.py has the pairs without
grammars. tests/engine/test_mesh.py has each scheme over two devices, tests/convert/test_serve_quantised.py the texts of the
unquantised values.
"""

import dataclasses
import random
from typing import NamedTuple

import numpy as np
import pytest

from bench.harness.models import declare
from jaxspec.compat import compiles
from jaxspec.compile_cache import open_store
from jaxspec.engine.buckets import bucket_table
from jaxspec.engine.runner import Runner
from jaxspec.loading.quantise import Quantization
from jaxspec.models.cache import KVCacheDtype
from jaxspec.models.params import random_params
from pallas_kernels.backend import W8A8
from tests.engine.scripted import greedy_requests, one_bucket, one_device, tiny_draft, warmed, with_pattern
from tests.engine.test_draft_counts import Forced, K
from tests.engine.test_draft_counts import make_engine as make_forced
from tests.engine.test_grammars import EVERY, alone, check
from tests.engine.test_schedules import make_engine, options
from tests.engine.test_transforms import plant
from tests.engine.tiny import HF_CONFIG, SETTINGS, VOCAB, cached, fill_cache, run


class Stored(NamedTuple):
    """What the MLPs of target and draft are stored as, their latents, and what multiplies the MLPs."""

    weights: Quantization
    cache: KVCacheDtype
    moe: str = "auto"


STORED = {
    "FP8 blocks": Stored("fp8", "auto"),
    "FP8 blocks, activations too": Stored("fp8", "auto", W8A8),
    "INT4 experts": Stored("int4", "auto"),
    "FP8 latents": Stored("bf16", "fp8"),
    "FP8 blocks and latents": Stored("fp8", "fp8"),
    "INT4 experts, FP8 latents": Stored("int4", "fp8"),
}


@cached
def runner_of(stored: Stored, k: int) -> Runner:
    """One bucket that holds every plan and knows every parameter; with drafts, decode steps also exist in two parts."""
    model, nextn = declare(
        HF_CONFIG, np.dtype(np.float32), quantization=stored.weights, kv_cache_dtype=stored.cache, with_draft=k > 0
    )
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=k, moe_backend=stored.moe)
    decode = tuple(bucket for bucket in bucket_table(settings) if not bucket.prefill_tokens)[-1:]
    mesh = one_device()
    runner = Runner(
        model,
        random_params(model, mesh, 3, randomize_norms=True),
        settings,
        mesh,
        draft=(nextn, random_params(nextn, mesh, 4, randomize_norms=True)) if nextn else None,
        buckets=one_bucket(settings, "full"),
        split=decode if nextn else (),
        files=open_store(None),
    )
    return warmed(runner)


@cached
def plain_texts(stored: Stored) -> dict:
    return alone(runner_of(stored, 0))


CASES = [
    # By default the arithmetic of Hopper's kernels, which no other test of the engine has.
    pytest.param("FP8 blocks, activations too", 3, EVERY[::5], marks=pytest.mark.long),
    *(
        pytest.param(name, k, cases, marks=pytest.mark.full)
        for name in STORED
        for k, cases in ((1, EVERY[::5]), (3, EVERY))
    ),
]


@pytest.mark.parametrize(("name", "k", "cases"), CASES)
def test_every_text_is_that_of_plain_decoding_with_the_same_codes(name, k, cases):
    """Greedy and seeded, free and constrained, with drafts that are right, wrong or illegal by turns."""
    stored, rng = STORED[name], random.Random(0)
    want = plain_texts(stored)
    runner = runner_of(stored, k)
    fill_cache(runner, np.nan)
    plant(make_engine(runner), (), None)  # as `check` plants, with operations of its own, which compile once
    before = compiles.total
    accepted = preempted = 0
    for depth, mixed, usable in cases:
        with options(runner, readout_depth=depth, mixed=mixed):
            engine = make_engine(runner, usable)
            # Sums in another order round some activations, or latents, to the next FP8 code.
            atol = 2e-2 if stored.moe == W8A8 else 2e-3 if stored.cache == "fp8" else 2e-4
            accepted += check(runner, want, engine, rng, atol=atol)
        preempted += engine.stats().num_preemptions
    assert compiles.total == before
    assert preempted > 0
    assert accepted > 60 * len(cases)


@pytest.mark.full
def test_a_changing_number_of_drafts_changes_no_text_of_fp8_blocks():
    """Against steps that draft and verify none, of the same codes; with drafts that are right or wrong by turns."""
    model, _ = declare(HF_CONFIG, np.dtype(np.float32), quantization="fp8", with_draft=False)
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=K, adaptive_drafts=True)
    mesh, buckets = one_device(), tuple(bucket for bucket in bucket_table(settings) if bucket.prefill_tokens)
    params = random_params(model, mesh, 3, randomize_norms=True)
    runner = warmed(Runner(model, params, settings, mesh, draft=tiny_draft("pattern"), buckets=buckets))

    def texts(*sequence, depth=1, mixed=True, usable=None):
        with options(runner, readout_depth=depth, mixed=mixed):
            engine = make_forced(runner, Forced(sequence), usable)
            return run(engine, greedy_requests(VOCAB))[0], engine.stats()

    want, stats = texts(0)
    assert stats.acceptance.num_drafted == 0
    with with_pattern(runner, [[*r.prompt_ids, *want[r.id]] for r in greedy_requests(VOCAB)], seed=1):
        for sequence, how in (
            ((0, K, 1, K), {}),
            ((K, 0, 0, 1), {"depth": 2, "mixed": False}),
            ((1, K, 0), {"depth": 3, "usable": 5}),
        ):
            got, stats = texts(*sequence, **how)
            assert got == want
            assert {k for k, steps in stats.steps_by_drafts.items() if steps} == set(sequence)
            assert stats.acceptance.num_accepted > 20
