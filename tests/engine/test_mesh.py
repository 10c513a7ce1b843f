"""Heads and experts of target and draft split over devices, and requests split over ranks, give the tokens of one device."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxspec import comm
from jaxspec.compat import compiles
from jaxspec.config import EngineConfig, Lookup, resolve
from jaxspec.engine.buckets import Variant, bucket_table
from jaxspec.engine.engine import Engine
from jaxspec.engine.memory import MARGIN_BYTES
from jaxspec.engine.on_mesh import on_mesh, specs
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner, bind
from jaxspec.engine.step_output import StepOutput
from jaxspec.loading.mesh import make_mesh
from jaxspec.models.cache import KVCacheDtype, cache_stored_as
from jaxspec.models.decoder import CausalLM, Embedding
from jaxspec.models.draft import Draft
from jaxspec.models.eagle3 import Eagle3, read_eagle3_config
from jaxspec.models.layers import DenseSpec, RMSNorm
from jaxspec.models.moe import MoESpec
from jaxspec.models.mtp import NextN
from jaxspec.models.params import Declare, nest, quantised, random_params, schemes_of, with_shardings
from jaxspec.models.reduced import Reduced
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams
from pallas_kernels.moe import reference
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.peer_sum import mailbox
from pallas_kernels.quant.schemes import SCHEMES
from tests.engine.grammar_requests import grammar_requests
from tests.engine.scripted import numpy_params, one_bucket, warmed, with_caches_of
from tests.engine.test_pool_size import PAGE_BYTES, Device, measured
from tests.engine.test_schedules import check_random_steps
from tests.engine.tiny import EOS, HF_CONFIG, SETTINGS, VOCAB, cached
from tests.tiny_models import CONFIGS, TWINS, VARIANTS

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}  # fmt: skip
HEAD = TINY_LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}  # fmt: skip
# Sizes that two devices split between blocks of every scheme.
WHOLE_BLOCKS = HF_CONFIG | {"intermediate_size": 256, "moe_intermediate_size": 256, "n_shared_experts": 1}
GATHERED = re.compile(r"\[([\d,]+)\]\S* all-gather(?:-start)?\(")
COLLECTIVE = re.compile(r" (all-\w+|reduce-scatter|collective-\w+|ragged-all-to-all)(?:-start)?\(")


def mesh_of(devices: int, ranks: int = 1) -> Mesh:
    return make_mesh(devices // ranks, ranks)


def nextn(config: str | None = None) -> Draft:
    return NextN(read_config(CONFIGS[config] if config else HF_CONFIG), jnp.float32)


def eagle3(*, own: bool) -> Draft:
    """With an embedding and a head of its own for half of the vocabulary, or with the target's."""
    config = read_eagle3_config(HEAD | ({"draft_vocab_size": VOCAB // 2} if own else {}))
    return Eagle3(config, jnp.float32, capture=(0, 1, 2), own_embedding=own, own_head=own)


def reduced() -> Draft:
    return Reduced(nextn(), VOCAB // 2, VOCAB, HF_CONFIG["hidden_size"], jnp.float32)


def mlps_in(scheme: str) -> CausalLM:
    """The tiny target with its dense MLP and its experts quantised."""
    model = CausalLM(read_config(WHOLE_BLOCKS), jnp.float32)
    owners = (("layers", 0, "mlp"), ("layers", 1, "mlp"), ("layers", 1, "mlp", "shared"))
    return quantised(model, {(*at, name): SCHEMES[scheme] for at in owners for name in ("gate_up", "down")})


@dataclass(frozen=True)
class Case:
    """A target, with what drafts for it, in one bucket.

    Attributes:
        scheme: of its MLPs. cache: the option kv_cache_dtype.
        split: decode steps are in two parts.
        counted: steps count the load of experts.
    """

    config: str | None = None
    draft: Any = None
    lookup: Lookup | None = None
    sampler: Variant = "lean"
    scheme: str | None = None
    split: bool = False
    counted: bool = False
    cache: KVCacheDtype = "auto"

    def target(self) -> CausalLM:
        if self.scheme:
            return mlps_in(self.scheme)
        config = {None: HF_CONFIG, "tiny-llama": TINY_LLAMA}.get(self.config) or CONFIGS[self.config or ""]
        return CausalLM(read_config(config), jnp.float32)


MTP = Case(draft=nextn)
SPLIT = Case(sampler="full", split=True, counted=True)


class Steps:
    """An engine's observer that counts steps with prompt chunks beside decode rows, those in two parts, those with masks on
    one rank alone, and those in which a rank is idle."""

    def __init__(self) -> None:
        self.mixed = self.split = self.masked_alone = self.idle = 0

    def __call__(self, step: StepOutput) -> None:
        self.mixed += bool(step.plan.prefill and step.plan.decode)
        self.split += step.plan.split
        self.masked_alone += sum(any(r.constraint for r in part.requests) for part in step.plan.parts) == 1
        self.idle += not all(part.requests for part in step.plan.parts)


def requests_for(case: Case, vocab: int) -> list[Request]:
    """Greedy and at temperature 1 with and without a seed, in chunks and whole, one with text to look up; for a full sampler
    also with every parameter, and with grammars where steps are split."""
    rng, full = np.random.default_rng(0), case.sampler == "full"
    prompts = [list(range(8)) * 3, *(rng.integers(0, vocab, n).tolist() for n in (70, 90, 5, 30))]
    kinds: list[dict[str, Any]] = [{"temperature": t} for t in (0, 1, 0, 1, 1)]
    for i in (1, 3):
        kinds[i]["seed"] = i
    if full:
        cut: dict[str, Any] = {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "logprobs": 3}
        bias = {int(token): 4.0 for token in rng.integers(0, vocab, 6)}
        ruled = {"frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.4, "logit_bias": bias}
        kinds = [kind | {"prompt_logprobs": 2} for kind in kinds]
        kinds += [
            {"temperature": 1.5, **cut},
            {"temperature": 0, **ruled},
            {"temperature": 0.8, **cut, **ruled, "seed": 7},
        ]
        prompts += [rng.integers(0, vocab, n).tolist() for n in (12, 68, 3)]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **kind) for kind in kinds]
    if full:  # the last one may end, but not too soon
        params[-1] = dataclasses.replace(params[-1], ignore_eos=False, min_tokens=9)
    out = [Request(f"r{i}", prompt, each) for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))]
    return out + (grammar_requests() if case.split else [])


def ids_and_logprobs(engine: Engine, requests: list[Request]) -> tuple[dict[str, list[Any]], list[float]]:
    """Of all requests to their ends: by request the ids, and those of alternatives where they were asked for; and all
    log-probabilities, request by request: those of the ids, of alternatives and of prompts."""
    ids: dict[str, list[Any]] = {request.id: [] for request in requests}
    logprobs: dict[str, list[float]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for out in engine.step():
            others = [pair for pairs in out.new_alternatives for pair in pairs]
            ids[out.request_id] += [*out.new_ids, *(token for token, _ in others)]
            logprobs[out.request_id] += [*out.new_logprobs, *(value for _, value in others)]
    for request in requests:
        logprobs[request.id] += [score.logprob for score in request.prompt_scores.values()]
    return ids, [value for values in logprobs.values() for value in values]


@cached
def served(case: Case, devices: int, ranks: int = 1) -> tuple[Runner, dict[str, list[Any]], list[float]]:
    """`ids_and_logprobs` of a few requests on so many devices, and the runner."""
    mesh = mesh_of(devices, ranks)
    model, draft = case.target(), case.draft() if case.draft else None
    for module in (model, *([draft] if draft else [])):
        cache_stored_as(module, case.cache)
    k = 2 if case.draft or case.lookup else 0
    depth = 1 if case.split else SETTINGS.readout_depth
    options = {"num_speculative_tokens": k, "lookup": case.lookup, "readout_depth": depth}
    # With prefixes shared, kept states among them.
    options |= {"prefix_caching": True, "data_parallel_size": ranks, "expert_load_metrics": case.counted}
    # Several GPUs have to be asked for plain XLA.
    options |= dict.fromkeys(("attention_backend", "moe_backend"), "reference")
    settings = dataclasses.replace(with_caches_of(model, SETTINGS), **options)
    buckets = one_bucket(settings, case.sampler)
    split = tuple(b for b in bucket_table(settings) if not b.prefill_tokens)[-1:] if case.split else ()
    drafting = (draft, params_of(draft, 2, mesh)) if draft else None
    params = params_of(model, 1, mesh)
    assert {len(array.sharding.device_set) for array in jax.tree.leaves(params)} == {devices}
    runner = warmed(Runner(model, params, settings, mesh, draft=drafting, buckets=buckets, split=split))
    before, vocab, steps = compiles.total, model.config.vocab_size, Steps()
    requests = requests_for(case, vocab)
    engine = Engine(runner, vocab_size=vocab, eos_token_ids=(EOS,), observer=steps)
    ids, logprobs = ids_and_logprobs(engine, requests)
    assert compiles.total == before
    assert steps.mixed
    assert bool(steps.split) == case.split
    assert {request.rank for request in requests} == set(range(ranks))
    assert ranks == 1 or steps.idle
    assert ranks == 1 or bool(steps.masked_alone) == case.split
    return runner, ids, logprobs


def params_of(module: nnx.Module, seed: int, mesh: Mesh) -> dict:
    """Random parameters, the same on any mesh; a reduced draft proposes every second token."""
    if schemes_of(module):  # drawn on one device: on several the generator gives others
        shardings = {path: target.sharding for path, target in with_shardings(module, mesh).items()}
        drawn = random_params(module, mesh_of(1), seed, randomize_norms=True)
        return jax.tree.map(lambda array, at: jax.device_put(np.asarray(array), at), drawn, nest(shardings))
    params = numpy_params(module, seed, mesh)
    if isinstance(module, Reduced):
        params["ids"] = jax.device_put(np.arange(0, VOCAB, 2, dtype=np.int32), params["ids"].sharding)
    return params


CASES = {
    "mla, nextn": MTP,
    "llama, eagle3": Case("tiny-llama", functools.partial(eagle3, own=False), sampler="full"),
    "llama, eagle3 with its own head": Case("tiny-llama", functools.partial(eagle3, own=True)),
    "mla, reduced nextn": Case(draft=reduced),
    "mla, nextn, latents in FP8": Case(draft=nextn, cache="fp8"),
    "sparse mla, nextn": Case("glm-dsa", functools.partial(nextn, "glm-dsa")),
    "delta nets, nextn": Case("qwen3.5", functools.partial(nextn, "qwen3.5")),
    "delta nets and mixtures, nextn": Case("qwen3.5-moe", functools.partial(nextn, "qwen3.5-moe")),
    "kimi delta attention, looked up": Case("kimi-linear", lookup=Lookup(1, 4)),
    "mla, looked up": Case(lookup=Lookup(1, 4)),
    "llama, looked up beside eagle3": Case(
        "tiny-llama", functools.partial(eagle3, own=False), Lookup(1, 4, beside_model=True)
    ),
    "mla": Case(),
    "mla, split steps": SPLIT,
    "mla, nextn, split steps": dataclasses.replace(SPLIT, draft=nextn),
    **{name: Case(name) for name in VARIANTS if name not in TWINS and "vocab_size" in CONFIGS[name]},
    **{f"mla in {scheme}": Case(scheme=scheme, draft=nextn) for scheme in SCHEMES},
}


# Mixtures of every kind, whose ranks share experts: also with biases, with a gate beside them, quantised, with kept states.
OF_RANKS = ("mla", "mla, reduced nextn", "mla, looked up", "sparse mla, nextn", "gpt-oss", "qwen3.5-moe", "kimi-linear",
            "mla in int4_g32")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "devices", "ranks"),
    [
        *(
            pytest.param(name, 2, 1, marks=pytest.mark.long if case is MTP else pytest.mark.full)
            for name, case in CASES.items()
        ),
        *(pytest.param(name, 4, 1, marks=pytest.mark.full) for name in ("v3", "glm4-lite", "moonlight")),
        pytest.param("mla, split steps", 2, 2, marks=pytest.mark.long),
        pytest.param("mla, nextn, split steps", 2, 2, marks=pytest.mark.full),
        pytest.param("mla, nextn", 4, 2, marks=pytest.mark.full),
        *(pytest.param(name, 2, 2, marks=pytest.mark.full) for name in OF_RANKS),
    ],
)
def test_several_devices_give_the_tokens_of_one(name, devices, ranks):
    """Their logits are equal to rounding, and their draws have the same keys."""
    (_, one, logprobs), (_, several, others) = served(CASES[name], 1), served(CASES[name], devices, ranks)
    assert one == several
    # What is rounded otherwise may have another code in FP8.
    np.testing.assert_allclose(logprobs, others, atol=1e-3 if CASES[name].cache == "fp8" else 1e-4)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *(pytest.param("mla, nextn", devices, marks=pytest.mark.slow) for devices in (1, 2)),
        pytest.param("v3", 4, marks=pytest.mark.full),
    ],
)
def test_no_compile_after_warm_up_at_each_tp(name, devices):
    """In random schedules. Each device has all pages, and there are as many as the fullest one has room for."""
    runner, *_ = served(CASES[name], devices)
    check_random_steps(runner, 100, full=False)
    pools = [shard for array in jax.tree.leaves(runner.state.kv) for shard in array.addressable_shards]
    assert len({shard.device for shard in pools}) == devices
    assert {len(shard.data) for shard in pools} == {runner.settings.num_pages}
    pages = np.random.default_rng(devices).integers(20, 30, devices).tolist()
    rooms = [Device(MARGIN_BYTES + number * PAGE_BYTES, 0) for number in pages]
    options = {"model_max_position": 512, "page_bytes": PAGE_BYTES, "on_gpu": True}
    assert resolve(EngineConfig(), free_bytes=measured(rooms, 0), **options).num_pages == min(pages)


@pytest.mark.long
def test_ranks_count_together_what_one_device_counts():
    """The tokens of each expert, in steps of two parts too: a token is computed once, on whichever rank."""
    (one, *_), (two, *_) = served(SPLIT, 1), served(SPLIT, 2, 2)
    assert one.expert_load.counts.all()
    np.testing.assert_array_equal(one.expert_load.counts, two.expert_load.counts)
    assert (one.expert_load.devices, two.expert_load.devices) == (1, 2)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param("mla, nextn", 2, marks=pytest.mark.slow),
        pytest.param("v3", 4, marks=pytest.mark.full),
    ],
)
def test_residual_bits_equal_on_every_device(name, devices):
    """What is declared replicated is so to the bit, or sampling would choose differently: all follows from the residual."""
    runner, *_ = served(CASES[name], devices)
    replicated = [array for array in jax.tree.leaves(runner.state) if array.sharding.is_fully_replicated]
    assert len(replicated) > len(jax.tree.leaves(runner.state.kv))
    for array in replicated:
        first, *others = (np.asarray(shard.data) for shard in array.addressable_shards)
        assert len(others) == devices - 1
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.slow
def test_peer_buffers_keep_their_address(monkeypatch):
    """Steps pass the addresses of mailboxes on, and each device's stay where they were opened. (Here nothing writes there.)"""
    monkeypatch.setattr(mailbox, "axes_reached", lambda _: ("tensor",))
    monkeypatch.setattr(mailbox, "MOST_BYTES", 1 << 10)
    runner, ids, _ = served.__wrapped__(CASES["mla, nextn"], 2)  # not kept for other tests, nor theirs taken
    assert any(ids.values())
    at = [shard.data.unsafe_buffer_pointer() for shard in runner.mailboxes["tensor"].memory.addressable_shards]
    for rank, row in enumerate(np.asarray(runner.state.mailboxes["tensor"])):
        *words, own = row.view(np.uint32).tolist()
        assert own == rank
        assert [low | high << 32 for low, high in zip(words[::2], words[1::2], strict=True)] == at


def test_hlo_has_only_declared_collectives():
    """None on one device. On two a sum for each embedding, two a block, one for the drafts' probabilities and one for the
    chosen tokens'; a gather of statistics, one for prompt rows' draws and one for windows', and one a draft for both. What
    is gathered is a few numbers a row, and no logits."""
    runner, *_ = served(MTP, 2)
    (bucket,) = runner.buckets
    text = runner.executable(bucket).as_text()
    blocks, embeddings = HF_CONFIG["num_hidden_layers"] + bucket.drafts, 1 + bucket.drafts
    sums = 2 * blocks + embeddings + 2
    assert Counter(COLLECTIVE.findall(text)) == {"all-reduce": sums, "all-gather": 3 + bucket.drafts}
    rows = bucket.prefill_rows + bucket.decode_rows * bucket.window
    gathered = [math.prod(map(int, dims.split(","))) for dims in GATHERED.findall(text)]
    assert len(gathered) == 3 + bucket.drafts
    assert max(gathered) <= 2 * 5 * rows < rows * VOCAB // 2
    runner, *_ = served(MTP, 1)
    assert not COLLECTIVE.findall(runner.executable(bucket).as_text())


def on_devices(devices: int, function: Callable[..., Any], module: nnx.Module, seed: int, *args: jax.Array) -> Any:
    """function(module with random parameters, *args), the module split over so many devices."""
    graphdef, state = bind(module, params_of(module, seed, mesh_of(devices)))

    def of_state(state: nnx.State, *args: jax.Array) -> Any:
        return function(nnx.merge(graphdef, state), *args)

    whole = PartitionSpec()
    return jax.jit(on_mesh(of_state, mesh_of(devices), (specs(state), *(whole,) * len(args)), whole))(state, *args)


class Layer(nnx.Module):
    """What follows attention in a block."""

    def __init__(self, spec: DenseSpec | MoESpec):
        declare = Declare(jnp.float32)
        self.norm, self.mlp = RMSNorm(32, 1e-6, declare), spec.build(32, declare)


@pytest.mark.parametrize(
    "spec", [DenseSpec(48), MoESpec(4, 2, 16, 1, "sigmoid", biases=True)], ids=["dense", "mixture"]
)
def test_residual_enters_the_sum_once(spec):
    """The stream is much larger than what an MLP adds to it."""
    rng = np.random.default_rng(0)
    x, attended = (jnp.asarray(1000 * rng.standard_normal((5, 32)), jnp.float32) for _ in range(2))

    def add(layer: Layer, x: jax.Array, attended: jax.Array) -> jax.Array:
        return layer.mlp.add_to(x, attended, layer.norm, jnp.ones(5, bool)).x

    one, two = (on_devices(n, add, Layer(spec), 0, x, attended) for n in (1, 2))
    np.testing.assert_allclose(one, two, atol=2e-3)
    assert np.abs(one - (x + attended)).max() > 0.1


@pytest.mark.long
def test_each_routed_pair_runs_on_one_shard():
    """Experts whose output is a power of two: a pair that runs twice or never changes the sum, whatever runs beside it."""
    E, T, k = 8, 33, 3
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.stack([rng.permutation(E)[:k] for _ in range(T)]), jnp.int32)
    biases = jnp.zeros((E, 2, 4)), jnp.repeat(2.0 ** jnp.arange(E)[:, None], 4, axis=1)
    whole = ExpertWeights(jnp.zeros((E, 2, 4, 4)), jnp.zeros((E, 4, 4)), biases=biases)
    live = jnp.arange(T) % 5 > 0
    call = jnp.ones((T, 4)), jnp.ones((T, k)), ids, live
    want = np.where(live[:, None], (2.0 ** np.asarray(ids)).sum(axis=1, keepdims=True), 0).repeat(4, axis=1)

    def of_part(first: int, size: int) -> jax.Array:
        part = jax.tree.map(lambda a: a[first : first + size], whole)
        x, *rest = call
        return reference.experts(x, dataclasses.replace(part, first=jnp.int32(first)), *rest)

    for parts in (1, 2, 4, 8):
        got = sum(of_part(first, E // parts) for first in range(0, E, E // parts))
        np.testing.assert_array_equal(got, want)


def test_parts_lie_in_the_order_of_the_mesh():
    """Rows of an embedding and columns of a head from every device are what they are on one; own parts are found again."""

    def read(embedding: Embedding, ids: jax.Array) -> tuple[jax.Array, ...]:
        rows = embedding.rows(ids)
        logits = comm.gather(embedding.logits(rows), axis=1)
        own = comm.own(logits, logits.shape[1] // (1 + comm.is_split()), axis=1)
        return rows, logits, comm.gather(own, axis=1)

    ids = jnp.asarray([0, 7, 8, 15, 3, 12], jnp.int32)
    one, two = (on_devices(n, read, Embedding(16, 4, Declare(jnp.float32)), 0, ids) for n in (1, 2))
    np.testing.assert_array_equal(one[0], two[0])
    # Some processors add up a product of half the columns in another order.
    np.testing.assert_allclose(one[1], two[1], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(two[1], two[2])
