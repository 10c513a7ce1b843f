"""Tensor parallelism: heads and experts of target and draft split over two devices give the tokens of one device."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import dataclasses, json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from jaxspec.compat import compiles
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.models.config import read_config
from jaxspec.models.decoder import CausalLM
from jaxspec.models.eagle3 import Eagle3, read_eagle3_config
from jaxspec.models.mtp import NextN
from jaxspec.models.params import nest, declarations, random_params, with_shardings
from jaxspec.sampling.params import SamplingParams
from tests.engine.tiny import HF_CONFIG, SETTINGS, VOCAB, run

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
HEAD = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
SPECULATING = dataclasses.replace(SETTINGS, num_speculative_tokens=2)

def draft_of(config):
    if config is HF_CONFIG:
        return NextN(read_config(config), jnp.float32)
    head = read_eagle3_config(HEAD)
    return Eagle3(head, jnp.float32, capture=(0, 1, 2), own_embedding=False, own_head=False)

def tokens(config, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    model = CausalLM(read_config(config), jnp.float32)
    one = Mesh(np.array(jax.devices()[:1]), ("tensor",))

    def placed(module, seed):
        # The same values on any mesh: a generator may draw differently on other shards.
        host = jax.tree.map(np.asarray, random_params(module, one, seed=seed, randomize_norms=True))
        shardings = nest({path: s.sharding for path, s in with_shardings(module, mesh).items()})
        return jax.tree.map(jax.device_put, host, shardings)

    params, draft = placed(model, 1), draft_of(config)
    runner = Runner(model, params, SPECULATING, mesh, draft=(draft, placed(draft, 2)))
    runner.buckets = runner.buckets[-1:]  # holds every plan
    engine = Engine(runner, vocab_size=VOCAB)
    engine.warm_up()
    split = sorted({len(a.sharding.device_set) for a in jax.tree.leaves(params)})
    rng = np.random.default_rng(0)
    requests = [
        Request(f"r{i}", rng.integers(0, VOCAB, n).tolist(), SamplingParams(max_tokens=20, temperature=i % 2, seed=i))
        for i, n in enumerate((3, 70, 90))
    ]
    ids, _, _ = run(engine, requests)
    return ids, split, compiles.after_warmup

print(json.dumps([[tokens(config, n) for n in (1, 2)] for config in (HF_CONFIG, LLAMA)]))
"""


@pytest.mark.slow
def test_two_devices_give_the_tokens_of_one():
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path),
    }  # fmt: skip
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert out.returncode == 0, out.stderr[-2000:]
    for (one, one_split, _), (two, two_split, compiled) in json.loads(out.stdout.splitlines()[-1]):
        assert one == two
        assert (one_split, two_split) == ([1], [2])
        assert compiled == 0
        assert all(len(ids) == 20 for ids in two.values())
