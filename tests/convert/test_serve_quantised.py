"""Quantised models through the engine on a CPU, with speculation, mixed steps and the prefix cache."""

from pathlib import Path

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from tests.conftest import few_buckets
from tests.convert.quantised_checkpoints import FORMATS, quantise
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.torch


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "gpt-oss"])
def test_text_is_that_of_the_weights_they_stand_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Greedy text with the quantised MTP layer's drafts, chunks beside decodes and shared pages: that of plain decoding of
    the unquantised checkpoint of the same values."""
    few_buckets(monkeypatch)
    sizes = {"moe_intermediate_size": 160, "intermediate_size": 160, "hidden_size": 160, "num_hidden_layers": 2}
    source = tiny_checkpoint("v3-mtp", tmp_path / "hf", **sizes)
    stored, plain = quantise(source, tmp_path, kind, lambda name: "_proj.weight" in name and ".mlp." in name)
    rng = np.random.default_rng(0)
    start = rng.integers(4, 200, 70).tolist()  # more than a page
    prompts = [start + rng.integers(4, 200, n).tolist() for n in (5, 30)] + [[7, 8, 9]]
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    texts = {}
    for folder, k in ((stored, 2), (plain, 0)):
        llm = LLM(
            str(folder), dtype="float32", num_speculative_tokens=k, max_num_seqs=3, max_model_len=128,
            max_num_batched_tokens=32,
        )  # fmt: skip
        first, cached = ([c.ids for c in llm.generate(prompts, greedy)] for _ in range(2))
        assert first == cached
        texts[folder] = first
    assert texts[stored] == texts[plain]
