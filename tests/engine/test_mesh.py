"""Tensor parallelism: heads and experts of target and draft split over two devices give the tokens of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxspec.compat import compiles
from jaxspec.engine.buckets import Variant
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.models.decoder import CausalLM
from jaxspec.models.eagle3 import Eagle3, read_eagle3_config
from jaxspec.models.mtp import NextN
from jaxspec.models.params import TENSOR_AXIS
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams
from tests.engine.scripted import numpy_params, one_bucket, warmed
from tests.engine.tiny import HF_CONFIG, SETTINGS, VOCAB, run

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}  # fmt: skip
HEAD = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}  # fmt: skip


def nextn():
    return NextN(read_config(HF_CONFIG), jnp.float32)


def eagle3():
    return Eagle3(read_eagle3_config(HEAD), jnp.float32, capture=(0, 1, 2), own_embedding=False, own_head=False)


def tokens(config, draft, sampler: Variant, devices):
    """Texts of three requests on so many devices; greedy and at temperature 1, in chunks and whole."""
    mesh = Mesh(np.array(jax.devices()[:devices]), (TENSOR_AXIS,))
    model = CausalLM(read_config(config), jnp.float32)
    params = numpy_params(model, 1, mesh)
    assert {len(array.sharding.device_set) for array in jax.tree.leaves(params)} == {devices}
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=2)
    drafting, buckets = (draft, numpy_params(draft, 2, mesh)), one_bucket(settings, sampler)
    runner = warmed(Runner(model, params, settings, mesh, draft=drafting, buckets=buckets))
    before = compiles.total
    rng = np.random.default_rng(0)
    requests = [
        Request(f"r{i}", rng.integers(0, VOCAB, n).tolist(), SamplingParams(max_tokens=20, temperature=i % 2, seed=i))
        for i, n in enumerate((3, 70, 90))
    ]
    ids, _, _ = run(Engine(runner, vocab_size=VOCAB), requests)
    assert compiles.total == before
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "draft", "sampler"),
    [
        pytest.param(HF_CONFIG, nextn, "lean", id="mla"),
        pytest.param(LLAMA, eagle3, "full", id="llama", marks=pytest.mark.full),
    ],
)
def test_two_devices_give_the_tokens_of_one(config, draft, sampler):
    """One of the two with the sampler of all parameters, which sees the same logits of either."""
    one, two = (tokens(config, draft(), sampler, devices) for devices in (1, 2))
    assert one == two
    assert all(len(ids) == 20 for ids in two.values())
