"""The engine on the GPU, with the GPU's buckets (lean and full): a tiny random DeepSeek-V3, and the demo model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxspec.compat import compiles
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import random_params
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams
from tests.engine.test_engine import assert_equal_runs, requests
from tests.engine.test_schedules import options
from tests.engine.tiny import EOS, HF_CONFIG, SETTINGS, VOCAB, fill_cache, run

pytestmark = pytest.mark.gpu


@functools.cache
def runner() -> Runner:
    model = CausalLM(read_config(HF_CONFIG), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    params = random_params(model, mesh, seed=3, randomize_norms=True)
    made = Runner(model, params, dataclasses.replace(SETTINGS, on_gpu=True), mesh)
    made.warm_up()
    return made


def make_engine(usable_pages: int | None = None) -> Engine:
    engine = Engine(runner(), vocab_size=VOCAB, eos_token_ids=(EOS,))
    if usable_pages is not None:
        engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - usable_pages)
    return engine


@pytest.fixture(scope="module")
def solo():
    """Each request alone in a clean pool."""
    fill_cache(runner(), 0.0)
    ids, logprobs = {}, {}
    for request in requests():
        one_ids, one_logprobs, _ = run(make_engine(), [request])
        ids |= one_ids
        logprobs |= one_logprobs
    return ids, logprobs


def test_the_buckets_are_those_of_a_gpu():
    assert {b.variant for b in runner().buckets} == {"full"}
    assert len(runner().buckets) <= 16


def test_batched_equals_solo(solo):
    assert_equal_runs(run(make_engine(), requests()), solo)


def test_preemption_changes_nothing(solo):
    engine = make_engine(usable_pages=9)
    assert_equal_runs(run(engine, requests()), solo)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mixed", [True, False])
def test_steps_read_late_change_nothing(solo, depth, mixed):
    with options(runner(), readout_depth=depth, mixed=mixed):
        engine = make_engine(usable_pages=9)
        assert_equal_runs(run(engine, requests()), solo)
    assert engine.stats().num_preemptions > 0


def test_nan_in_free_and_padding_pages_changes_nothing(solo):
    fill_cache(runner(), np.nan)
    try:
        assert_equal_runs(run(make_engine(), requests()), solo)
    finally:
        fill_cache(runner(), 0.0)


def test_nothing_compiles_after_warm_up(solo):  # noqa: ARG001 - the fixture warms helpers up
    before = compiles.total
    run(make_engine(), requests())
    run(make_engine(), requests()[:1])
    assert compiles.total == before


def test_state_is_donated_and_keeps_its_addresses():
    """A moved cache would be a copied one, and would make the GPU re-record its graphs."""
    engine = make_engine()
    before = engine.runner.state
    addresses = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(before.kv)]
    engine.add(Request("r", [7, 8], SamplingParams(max_tokens=4)))
    while engine.has_work:
        engine.step()
    assert all(array.is_deleted() for array in jax.tree.leaves(before.kv))
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(engine.runner.state.kv)] == addresses


def test_no_bucket_needs_more_memory_than_the_largest(tmp_path, monkeypatch):
    """The pool was sized by running the largest one; then all were run."""
    from jaxspec.llm import LLM
    from jaxspec.loading import engine as loading_engine

    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    measured = []

    def measure(make_runner, settings, page_bytes, devices):
        free = measure_free_bytes(make_runner, settings, page_bytes, devices)
        measured.append((free, page_bytes))
        return free

    monkeypatch.setattr(loading_engine, "evidently_fits", lambda *_: False)
    measure_free_bytes = loading_engine.measure_free_bytes
    monkeypatch.setattr(loading_engine, "measure_free_bytes", measure)
    llm = LLM("demo", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256)
    ((free, page_bytes),) = measured
    stats = jax.devices()[0].memory_stats()
    pool = llm.engine.runner.settings.num_pages * page_bytes
    assert stats["peak_bytes_in_use"] - pool <= stats["bytes_limit"] - free


@pytest.mark.parametrize(
    ("draft", "by_load"),
    [("none", None), ("mtp", None), ("mtp", False), ("demo/eagle3-llama", False), ("demo/eagle3-mla", False)],
)
def test_demo_model_says_what_pytorch_said(draft, by_load, tmp_path, monkeypatch):
    """Greedy, float32, against the recorded PyTorch run that `jaxspec demo` checks too; drafts with k = 3, also by load."""
    from convert.reference import read_record
    from jaxspec.llm import LLM
    from serve.demo import RECORD

    if not RECORD.exists():
        pytest.skip(f"{RECORD.name} is not there: the demo model's PyTorch run has not been recorded")
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    reference = read_record(RECORD)
    options = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    k = 0 if draft == "none" else 3
    head = draft if draft.startswith("demo/") else None
    options |= {"num_speculative_tokens": k, "speculative_model": head, "adaptive_speculation": by_load}
    llm = LLM("demo", dtype="float32", **options)
    assert llm.engine.runner.settings.adaptive_drafts == (k > 0 and by_load is None)
    params = [SamplingParams(max_tokens=len(r.new_ids), temperature=0, ignore_eos=True, logprobs=0) for r in reference]
    completions = llm.generate([r.prompt_ids for r in reference], params)
    assert [c.ids for c in completions] == [r.new_ids for r in reference]
    for completion, r in zip(completions, reference, strict=True):
        np.testing.assert_allclose(completion.logprobs, r.logprobs, atol=1e-3)
    if k and by_load is False:
        assert llm.engine.stats().acceptance.mean_length > 3.0
