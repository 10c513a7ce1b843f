"""Every architecture variant against PyTorch, layer by layer and token by token, through the real paged engine."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from convert.compare import Collector, compare
from convert.reference import ReferenceRun, TorchModel, choose_prompts, read_record, write_record
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.llm import LLM
from tests.conftest import few_buckets
from tests.tiny_models import COVERED, TWINS, VARIANTS, tiny_checkpoint

# PyTorch cannot read these block scales; tests/convert shows that they are dequantised as their bfloat16 twin.
LIVE = [v for v in VARIANTS if v != "v3-fp8"]
FAST = ("v3-yarn",)
# The twin of v3-fp8 stands for it here.
IN_OTHERS = {*TWINS, *COVERED} - {"v3-fp8-dequantised"}
# One compiles all buckets; of the others the largest, which holds every plan, is enough.
EVERY_BUCKET = ("v2-lite",)
MAX_LOGIT_ERROR = 2e-4
# With 16 prompts the float32 logits of transformers' own classes of these differ by up to 3.4e-4 between one pass over the
# text and a token at a time, and by 2.0e-4 from the same classes in float64.
ILL_CONDITIONED, MAX_ILL_CONDITIONED_ERROR = ("qwen3.5", "qwen3-next"), 6e-4


def marks(variant):
    return [] if variant in FAST else [pytest.mark.full if variant in IN_OTHERS else pytest.mark.long]


def run_compare(folder, prompts: int, new_tokens: int, **options):
    model = TorchModel(folder)
    reference = [model.run(ids, new_tokens) for ids in choose_prompts(folder, model.vocab_size, prompts)]
    return reference, compare_with(folder, reference, **options)


def compare_with(folder, reference, *, every_bucket=False):
    collector = Collector()
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 7, "max_model_len": 128, "dtype": "float32"}
    options |= {"enable_prefix_caching": False, "compilation_cache_dir": "off"}
    with pytest.MonkeyPatch.context() as patch:
        if not every_bucket:
            few_buckets(patch, decode=False)
        llm = LLM(str(folder), probe=True, observer=collector, **options)
    return compare(llm, collector, reference)


@pytest.mark.torch
@pytest.mark.parametrize("variant", [pytest.param(v, marks=marks(v)) for v in LIVE])
@pytest.mark.parametrize("prompts", [4, pytest.param(16, marks=pytest.mark.full)])
def test_variant_equals_pytorch(variant, prompts, tmp_path):
    """Chunks of 7 tokens, prompts of 3 to 40 and 64 new tokens, so that prefill and decode both cross a page."""
    folder = tiny_checkpoint(variant, tmp_path / "hf")
    _, report = run_compare(folder, prompts=prompts, new_tokens=64, every_bucket=prompts > 4 or variant in EVERY_BUCKET)
    bound = MAX_ILL_CONDITIONED_ERROR if variant in ILL_CONDITIONED and prompts == 16 else MAX_LOGIT_ERROR
    assert report.logits.maximum <= bound
    assert report.top1_agreement == 1.0
    assert report.identical == report.prompts == prompts
    assert report.kl_max < 1e-6
    assert report.max_logprob_error <= bound
    assert len(report.layers) == 4
    # Relative, because residual streams of random weights grow from layer to layer.
    assert all(errors.rms < 1e-4 for errors in report.layers)
    assert not report.failures(max_logit_error=bound, min_top1=1.0, require_identical=True)


@pytest.mark.long
@pytest.mark.torch
def test_compare_sees_what_is_wrong(tmp_path):
    """Another model's run, a record with NaN and a changed token must each fail, and name the first divergence."""
    folder = tiny_checkpoint("v3", tmp_path / "hf")
    other = tiny_checkpoint("v3", tmp_path / "other", seed=1)
    reference, _ = run_compare(folder, prompts=2, new_tokens=8)
    wrong = compare_with(other, reference)
    assert len(wrong.failures(max_logit_error=MAX_LOGIT_ERROR, min_top1=1.0, require_identical=True)) == 3

    changed = list(reference[0].new_ids)
    changed[3] = (changed[3] + 1) % 256
    logits = reference[1].logits.copy()
    logits[2, 5] = np.nan
    altered = [
        dataclasses.replace(reference[0], new_ids=tuple(changed)),
        dataclasses.replace(reference[1], logits=logits),
    ]
    report = compare_with(folder, altered)
    (divergence,) = report.divergences
    assert (divergence.prompt, divergence.position) == (0, 3)
    assert (divergence.expected, divergence.got) == (changed[3], reference[0].new_ids[3])
    assert divergence.gap < 0
    assert np.isnan(report.logits.maximum)
    assert "max logit error nan" in report.failures(max_logit_error=1.0, min_top1=0.0, require_identical=False)[0]


@pytest.mark.long
@pytest.mark.torch
def test_a_recorded_run_replaces_pytorch(tmp_path):
    folder = tiny_checkpoint("v3-yarn", tmp_path / "hf")
    model = TorchModel(folder)
    runs = [model.run(ids, 4) for ids in choose_prompts(folder, model.vocab_size, 2)]
    for tokens_only in (False, True):
        path = tmp_path / f"run-{tokens_only}.npz"
        write_record(path, runs, tokens_only=tokens_only)
        for got, want in zip(read_record(path), runs, strict=True):
            assert (got.prompt_ids, got.new_ids) == (want.prompt_ids, want.new_ids)
            np.testing.assert_array_equal(got.logprobs, want.logprobs)
            np.testing.assert_array_equal(got.gaps, want.gaps)
            if tokens_only:
                assert got.logits is None
            else:
                np.testing.assert_array_equal(got.logits, want.logits)
                np.testing.assert_array_equal(got.residuals, want.residuals)
    report = compare_with(folder, read_record(tmp_path / "run-True.npz"))
    assert report.identical == 2
    assert report.positions == 0


def test_a_file_that_is_no_record(tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(b"not a record")
    with pytest.raises(JaxspecError, match="not a recorded PyTorch run"):
        read_record(path)
    np.savez(path, other=np.zeros(3))
    with pytest.raises(JaxspecError, match="not a recorded PyTorch run"):
        read_record(path)


def test_reference_runs_need_no_arrays():
    """A tokens-only run, as `jaxspec demo` ships it, is complete without residual streams."""
    run = ReferenceRun((1, 2), (3,), np.zeros(1, np.float32), np.ones(1, np.float32))
    assert run.residuals is None


def test_synthetic_acceptance_is_not_compared():
    settings = SimpleNamespace(synthetic_acceptance_length=2.0)
    llm = SimpleNamespace(engine=SimpleNamespace(settings=settings))
    with pytest.raises(ConfigError, match="synthetic_acceptance_length makes the text worthless"):
        compare(llm, Collector(), [])
