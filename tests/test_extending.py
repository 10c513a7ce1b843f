"""The family, the cache and the draft of tests/toys.py in the engine: adding one touches nothing else."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec import LLM, SamplingParams
from jaxspec.engine.buckets import bucket_table
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.errors import ConfigError
from jaxspec.models.decoder import CausalLM
from jaxspec.models.registry import FAMILIES
from tests.engine.scripted import one_device, plain_runner, target_params, tiny_config
from tests.engine.tiny import SETTINGS, VOCAB, run
from tests.toys import DECAY, FAMILY, Echo

H, INNER, V = 16, 24, 64
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A Hugging Face folder of the family, and its tensors."""
    folder, rng = tmp_path_factory.mktemp("toy"), np.random.default_rng(0)
    FAMILIES["ToyForCausalLM"] = FAMILY
    hf = {
        "architectures": ["ToyForCausalLM"], "vocab_size": V, "hidden_size": H, "intermediate_size": INNER,
        "num_hidden_layers": 2, "num_attention_heads": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 192,
    }  # fmt: skip
    shapes = {p.name: p.shape for ps in FAMILY.key_map(FAMILY.read_config(hf, "ToyForCausalLM")).values() for p in ps}
    tensors = {
        name: np.asarray(
            rng.uniform(0.5, 1.5, s) if len(s) == 1 else rng.standard_normal(s) * s[-1] ** -0.5, np.float32
        )
        for name, s in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(hf | {"torch_dtype": "float32"}))
    save_file(tensors, folder / "model.safetensors")
    yield str(folder), tensors
    del FAMILIES["ToyForCausalLM"]


def continued(w, ids, count):
    """The family in NumPy: `count` greedy tokens."""

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    ids = list(ids)
    for _ in range(count):
        x = w["model.embed_tokens.weight"][ids]
        for prefix in ("model.layers.0.", "model.layers.1."):
            y, state, sums = norm(x, f"{prefix}input_layernorm"), np.zeros(H), []
            for value in y @ w[f"{prefix}self_attn.value_proj.weight"].T:
                sums.append(state := state * DECAY + value)
            x = x + np.array(sums) * (y @ w[f"{prefix}self_attn.gate_proj.weight"].T)
            y = norm(x, f"{prefix}post_attention_layernorm")
            gate, up = (y @ w[f"{prefix}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}mlp.down_proj.weight"].T
        ids.append(int((norm(x[-1], "model.norm") @ w["lm_head.weight"].T).argmax()))
    return tuple(ids[-count:])


@pytest.mark.long
def test_a_family_with_a_state_a_slot(toy):
    """Plain, in mixed steps, and preempted: slots hold NaN before, so only a request's own chunks begin its state."""
    folder, tensors = toy
    # Of the pool's five pages every request takes one for its prompt and one for its output.
    llm = LLM(folder, max_num_seqs=4, max_num_batched_tokens=24, num_gpu_blocks_override=6)
    assert llm.describe()["State bytes per request"] == 2 * H * 4
    state = llm.engine.runner.state
    llm.engine.runner.state = state._replace(kv=jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), state.kv))
    prompts = [np.random.default_rng(i).integers(0, V, 60 - 3 * i).tolist() for i in range(4)]
    want = [continued(tensors, prompt, GREEDY.max_tokens) for prompt in prompts]
    assert llm.generate([prompts[0]], GREEDY)[0].ids == want[0]
    assert [c.ids for c in llm.generate(prompts, GREEDY)] == want
    assert llm.engine.stats().num_preemptions > 0
    # The second time from the state that was kept after the first page.
    long = np.random.default_rng(9).integers(0, V, 70).tolist()
    want = continued(tensors, long, GREEDY.max_tokens)
    assert [llm.generate([long], GREEDY)[0].ids for _ in range(2)] == [want, want]
    assert llm.engine.stats().prefix_cache_hits == 64


def test_a_state_a_slot_refuses_what_only_pages_can_do(toy):
    with pytest.raises(ConfigError, match=r"num_speculative_tokens .*: this model keeps a state .* cannot go back"):
        LLM(toy[0], num_speculative_tokens=2, speculative_method="ngram")


@pytest.mark.long
def test_a_draft_on_a_paged_model():
    settings = replace(SETTINGS, num_speculative_tokens=2)
    model = CausalLM(tiny_config("tiny"), jnp.float32)
    runner = Runner(
        model, target_params("tiny"), settings, one_device(), draft=(Echo(), {}), buckets=bucket_table(settings)[-1:]
    )
    runner.warm_up()
    texts = []
    with_draft, plain = Engine(runner, vocab_size=VOCAB), Engine(plain_runner(), vocab_size=VOCAB)
    for engine in (with_draft, plain):
        requests = [Request(f"r{i}", [3 + i, 7, 7, 9 * i], GREEDY) for i in range(3)]
        texts.append(run(engine, requests)[0])
    assert texts[0] == texts[1]
    assert with_draft.stats().acceptance.num_steps > 0
