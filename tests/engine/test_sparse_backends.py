"""Layers that choose their keys say the same on every attention backend, up to near-ties in bfloat16.

tests/gpu/test_dsa.py does with kernels what is done here with plain XLA alone. Texts are written with three drafts a window, in
mixed steps, in pages that held NaN, and are then scored as prompts, whose tokens are all known.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mtp import NextN
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams
from tests.engine.scripted import Windows, numpy_params, one_device
from tests.engine.tiny import SETTINGS, fill_cache, run
from tests.tiny_models import CONFIGS

K, ROWS, TOKENS = 3, 4, 40
# Of several times the keys that are chosen, in pages and parts of pages; the longest ends while others decode.
PROMPTS = (140, 65, 300, 193)
# The smallest that all attention kernels support, without experts: whether a token's rounding sends it to another expert says
# nothing of attention. The middle layer of three shares the choice of the one before.
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 32, "index_head_dim": 128,
    "index_topk": 64, "n_routed_experts": 0,
}  # fmt: skip
# By how much a log-probability may be off on average. Rounding to bfloat16 makes it 0.03, reading 60 keys instead of the 64
# that score highest 0.10, and 32 of them 0.37.
MEAN = 0.06


@functools.cache
def runner(backend: str, dtype: str) -> Runner:
    """A random model and NextN layer, the same ones each time but for what the dtype rounds."""
    config = read_config(CONFIGS["glm-dsa"] | SIZES)
    model, draft = CausalLM(config, jnp.dtype(dtype)), NextN(config, jnp.dtype(dtype))
    settings = dataclasses.replace(
        SETTINGS,
        max_num_seqs=ROWS,
        dtype=dtype,
        attention_backend=backend,
        num_speculative_tokens=K,
        prefix_caching=False,
    )
    # A decode step, and one with prompts beside it.
    buckets = (Bucket(0, 0, ROWS, "full", K), Bucket(settings.max_num_batched_tokens, ROWS, ROWS, "full", K))
    params, draft_params = (numpy_params(module, seed) for seed, module in enumerate((model, draft)))
    made = Runner(model, params, settings, one_device(), draft=(draft, draft_params), buckets=buckets)
    made.warm_up()
    return made


def written(runner: Runner) -> tuple[list[list[int]], Windows]:
    """Prompts with what follows them greedily, and which windows verified that."""
    rng, windows = np.random.default_rng(0), Windows()
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    requests = [
        Request(f"{i}", rng.integers(6, CONFIGS["glm-dsa"]["vocab_size"], n).tolist(), params)
        for i, n in enumerate(PROMPTS)
    ]
    fill_cache(runner, np.nan)
    ids, *_ = run(engine_of(runner, windows), requests)
    return [[*request.prompt_ids, *ids[request.id]] for request in requests], windows


def scored(runner: Runner, texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of all tokens of texts but their first ones, and how far they are below the likeliest ones."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=1)
    fill_cache(runner, np.nan)
    engine, told = engine_of(runner), {}
    engine.add(*(Request(f"{i}", text, params) for i, text in enumerate(texts)))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            if output.prompt_logprobs:
                told[output.request_id] = output.prompt_logprobs
    tokens = [token for i in range(len(texts)) for token in told[f"{i}"]]
    logprobs = np.array([token.logprob for token in tokens])
    return logprobs, np.array([token.alternatives[0][1] for token in tokens]) - logprobs


def engine_of(runner: Runner, observer: Any = None) -> Engine:
    return Engine(runner, vocab_size=CONFIGS["glm-dsa"]["vocab_size"], observer=observer)


def check_near_ties(mine: Runner, reference: Runner) -> None:
    """A runner's texts and log-probabilities are those of a reference.

    A token of a text is as likely as the likeliest one, in the reference's eyes, but for what two logits may be off.
    """
    texts, windows = written(mine)
    assert windows.mixed > 0
    (got, _), (want, gaps) = (scored(each, texts) for each in (mine, reference))
    off = np.abs(got - want)
    assert off.mean() < MEAN
    ends = np.cumsum([len(text) - 1 for text in texts])
    new = np.concatenate([np.arange(end - TOKENS, end) for end in ends])
    assert gaps[new].max() <= 2 * off.max()


@pytest.mark.full
def test_bfloat16_differs_by_near_ties():
    """Plain XLA, from plain XLA in float32."""
    check_near_ties(runner("reference", "bfloat16"), runner("reference", "float32"))
