"""Grouped-query attention with fewer key heads than devices: devices share keys, and the text is that of one device."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from convert.convert import convert_checkpoint
from jaxspec import LLM, SamplingParams
from jaxspec.models.decoder import CausalLM
from jaxspec.models.gqa import GQA, Spread, spread_heads
from jaxspec.models.registry import read_config
from tests.conftest import few_buckets
from tests.tiny_models import CONFIGS, tiny_checkpoint

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
PROMPTS = [[7, 8, 9] * 9, [10, 11], list(range(20, 90))]


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_each_query_keeps_its_key(name: str):
    """Queries lie in their order, beside copies of their key and value."""
    model = CausalLM(read_config(CONFIGS[name]), jnp.float32)
    layer = model.layers[0].attention
    assert isinstance(layer, GQA)
    K, heads, D = layer.spec.num_kv_heads, layer.spec.num_heads, layer.spec.head_dim
    before = {n: v.shape for n in ("qkv", "o", "qkv_bias", "sinks") if (v := getattr(layer, n, None)) is not None}
    changed = spread_heads(model, heads)
    assert len(changed) == len(before) * len(model.layers)
    assert set(changed.values()) == {Spread(name, heads) for name in before}  # one executable for all layers
    for weight, shape in before.items():
        stored = jnp.arange(np.prod(shape)).reshape(shape)
        spread = Spread(weight, heads)(stored)
        assert spread.shape == getattr(layer, weight).shape
        if weight == "o":
            np.testing.assert_array_equal(spread.reshape(-1, heads, D), stored.reshape(-1, heads, D))
            continue
        queries = stored[:, : heads // K].reshape(heads, *shape[2:])
        np.testing.assert_array_equal(spread[:, 0], queries)
        for h in range(heads) if "qkv" in weight else ():
            np.testing.assert_array_equal(spread[h, 1:], stored[h // (heads // K), -2:])
    assert {array.shape for array in layer.cache_spec.arrays} == {(heads, D)}


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "converted"),
    [
        ("qwen3", False),
        pytest.param("qwen3", True, marks=pytest.mark.full),
        pytest.param("gpt-oss", False, marks=pytest.mark.full),
        pytest.param("qwen3-moe", True, marks=pytest.mark.full),
    ],
)
def test_four_devices_share_two_key_heads(name: str, converted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    few_buckets(monkeypatch, decode=False)
    folder = tiny_checkpoint(name, tmp_path / "hf")
    if converted:
        folder = convert_checkpoint(folder, tmp_path / "out")
    texts, described = [], []
    for devices in (1, 4):
        llm = LLM(
            str(folder), dtype="float32", max_num_seqs=3, max_num_batched_tokens=32, max_model_len=128,
            tensor_parallel_size=devices,
        )  # fmt: skip
        texts.append([c.ids for c in llm.generate(PROMPTS, GREEDY)])
        described.append(llm.describe())
    assert texts[0] == texts[1]
    one, four = described
    assert four["Parameters"] == one["Parameters"]
    # Each device has one of the two heads.
    assert four["KV cache bytes per token"] * 2 == one["KV cache bytes per token"]
