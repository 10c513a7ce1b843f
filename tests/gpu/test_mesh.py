"""Two GPUs: the tokens of one, and near-ties in bfloat16 with all kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.compat import compiles
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.loading.mesh import make_mesh
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mtp import NextN
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams
from tests.engine.scripted import numpy_params
from tests.engine.test_mesh import CASES, served
from tests.engine.tiny import HF_CONFIG, SETTINGS
from tests.gpu.test_graph import KERNEL_VOCAB, SIZES, STEPS, launches_of

pytestmark = pytest.mark.gpu

# Each device's half has the smallest sizes that all Mosaic GPU kernels support.
HALVES = HF_CONFIG | SIZES | {"num_attention_heads": 8, "n_routed_experts": 16, "vocab_size": 2 * KERNEL_VOCAB}
ROWS, TOKENS = 4, 24
ROUNDING = 2**-5


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.parametrize(
    "name", ["mla, nextn", "llama, eagle3", "mla, looked up", "sparse mla, nextn", "kimi-linear", "gpt-oss"]
)
def test_two_gpus_give_the_tokens_of_one(name):
    """Float32, on plain XLA."""
    _, want, want_logprobs = served(CASES[name], 1)
    _, ids, logprobs = served(CASES[name], 2)
    assert ids == want
    np.testing.assert_allclose(logprobs, want_logprobs, atol=5e-4)


@pytest.mark.parametrize("name", ["mla, nextn", "mla, nextn, split steps", "gpt-oss"])
def test_two_ranks_give_the_tokens_of_one(name):
    """Each GPU has requests of its own, and half of the experts."""
    _, want, want_logprobs = served(CASES[name], 1)
    _, ids, logprobs = served(CASES[name], 2, ranks=2)
    assert ids == want
    np.testing.assert_allclose(logprobs, want_logprobs, atol=5e-4)


def runner_with_kernels(devices: int, k: int, drafts: int = 0, rows: int = ROWS) -> Runner:
    """In bfloat16, for decode steps and prompts; the parameters do not depend on the number of devices."""
    mesh = make_mesh(devices, 1)
    config = read_config(HALVES)
    model, draft = CausalLM(config, jnp.bfloat16), NextN(config, jnp.bfloat16)
    settings = dataclasses.replace(SETTINGS, dtype="bfloat16", on_gpu=True, num_speculative_tokens=k)
    decode = Bucket(0, 0, rows, "lean", drafts)
    mixed = Bucket(SETTINGS.max_num_batched_tokens, 4, rows, "lean", drafts)
    drafting = (draft, numpy_params(draft, 2, mesh)) if k else None
    runner = Runner(model, numpy_params(model, 1, mesh), settings, mesh, draft=drafting, buckets=(decode, mixed))
    runner.warm_up()
    wanted = {"mla_decode", "mla_query", "kv_write", "moe", "moe_route"}
    assert {name for name, chosen in runner.kernels.items() if chosen == {"mosaic"}} >= wanted
    return runner


@pytest.mark.parametrize("k", [0, 3])
def test_decode_is_one_graph_on_two_devices(k):
    """Launched once on each."""
    runner = runner_with_kernels(2, k, k)
    padding = StepPlan((), (), drafts=k)

    def step() -> None:
        runner.dispatch(padding)
        runner.read()

    events, launches = launches_of(runner, step)
    assert launches == 2 * STEPS, f"{events} kernels in {launches} launches of {STEPS} steps"


def decoded(runner: Runner, prompts: list[list[int]], at_once: int) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy ids and their log-probabilities, `at_once` requests after `at_once` requests."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    ids, logprobs = {r.id: [] for r in requests}, {r.id: [] for r in requests}
    engine, before = Engine(runner, vocab_size=HALVES["vocab_size"]), compiles.total
    for start in range(0, len(requests), at_once):
        engine.add(*requests[start : start + at_once])
        while engine.has_work:
            for out in engine.step():
                ids[out.request_id] += out.new_ids
                logprobs[out.request_id] += out.new_logprobs
    assert compiles.total == before
    return [ids[r.id] for r in requests], [logprobs[r.id] for r in requests]


def changes(a: tuple[list[list[int]], list[list[float]]], b: tuple[list[list[int]], list[list[float]]]) -> np.ndarray:
    """Of the chosen token's log-probability, at all positions after equal prefixes. Where the tokens differ too it is that
    of the best token, which a near-tie changes as little."""
    out = []
    for ids, others, ours, theirs in zip(a[0], b[0], a[1], b[1], strict=True):
        differs = [i for i, (x, y) in enumerate(zip(ids, others, strict=True)) if x != y]
        end = differs[0] + 1 if differs else len(ids)
        out += np.abs(np.subtract(ours[:end], theirs[:end])).tolist()
    return np.array(out)


@pytest.mark.parametrize("k", [0, 3])
def test_kernels_on_two_gpus_decode_as_on_one(k):
    """In bfloat16 with MTP: as near to one GPU's plain decoding as that is to itself in another batch."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, HALVES["vocab_size"], n).tolist() for n in (5, 30, 64, 90, 130, 7, 21, 3)]
    plain = runner_with_kernels(1, 0)
    alone = decoded(plain, prompts, 1)
    # Or as a logit between 4 and 8 is to itself when it is rounded.
    noise = max(changes(alone, decoded(plain, prompts, ROWS)).max(), ROUNDING)
    got = changes(alone, decoded(runner_with_kernels(2, k, k), prompts, ROWS))
    assert noise < 8 * ROUNDING
    # Sums in another order turn near-ties of the router too: then one position has another expert.
    assert np.quantile(got, 0.98) <= 4 * noise, (np.sort(got)[-10:], noise)
    assert got.max() <= 1
    assert len(got) > len(prompts) * TOKENS // 2
