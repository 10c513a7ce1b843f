"""Data parallelism: requests split over ranks that share the experts of a mixture and nothing else."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxspec.compat import compiles
from jaxspec.config import EngineConfig, resolve
from jaxspec.engine.engine import Engine
from jaxspec.engine.on_mesh import on_mesh, specs
from jaxspec.engine.placement import MOST_AHEAD
from jaxspec.engine.plan import StepPlan, joined
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.runner import Runner, bind
from jaxspec.engine.step_output import StepOutput
from jaxspec.errors import ConfigError
from jaxspec.llm import LLM
from jaxspec.loading.engine import check_ranks
from jaxspec.loading.mesh import choose_devices, make_mesh
from jaxspec.models.decoder import CausalLM
from jaxspec.models.layers import RMSNorm
from jaxspec.models.moe import MoESpec
from jaxspec.models.params import DATA_AXIS, TENSOR_AXIS, Declare, with_shardings
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams
from tests.engine.mock_runner import MockRanks
from tests.engine.scripted import numpy_params, one_bucket, warmed
from tests.engine.test_mesh import COLLECTIVE, MTP, TINY_LLAMA, nextn, params_of
from tests.engine.tiny import EOS, HF_CONFIG, SETTINGS, VOCAB, cached, run
from tests.tiny_models import CONFIGS

K = 3


@cached
def runner_of(ranks: int) -> Runner:
    """A tiny target with a NextN layer of three drafts, in one lean bucket, with steps read late."""
    mesh = make_mesh(1, ranks)
    settings = dataclasses.replace(
        SETTINGS, num_speculative_tokens=K, readout_depth=1, prefix_caching=True, data_parallel_size=ranks
    )
    draft = nextn()
    return warmed(
        Runner(
            MTP.target(), params_of(MTP.target(), 1, mesh), settings, mesh, draft=(draft, params_of(draft, 2, mesh)),
            buckets=one_bucket(settings), split=(),
        )
    )  # fmt: skip


class Plans:
    """An engine's observer that keeps the plans."""

    def __init__(self) -> None:
        self.seen: list[StepPlan] = []

    def __call__(self, step: StepOutput) -> None:
        self.seen.append(step.plan)


def engine_of(ranks: int, observer: Plans | None = None) -> Engine:
    return Engine(runner_of(ranks), vocab_size=VOCAB, eos_token_ids=(EOS,), observer=observer)


def requests(lengths: tuple[int, ...], max_tokens: int) -> list[Request]:
    """Greedy ones, and some that draw."""
    rng = np.random.default_rng(5)
    return [
        Request(
            f"r{i}", rng.integers(0, VOCAB, length).tolist(),
            SamplingParams(max_tokens=max_tokens, temperature=float(i % 3 == 1), ignore_eos=True, seed=i),
        )
        for i, length in enumerate(lengths)
    ]  # fmt: skip


@pytest.mark.long
def test_idle_rank_runs_the_same_executable():
    """One request at a time: the other rank runs padding in the same executable, with all drafts, and whatever its pages
    hold changes nobody's text."""
    plans, alone = Plans(), requests((70,), 20)
    want = run(engine_of(1), requests((70,), 20))
    runner, before = runner_of(2), compiles.total
    state = runner.state
    pages = runner.settings.num_pages

    def with_nan(array: jax.Array) -> jax.Array:
        whole = np.array(array)
        whole[pages:] = np.nan
        return jax.device_put(whole, array.sharding)

    kept = jax.tree.map(np.array, (state.kv, state.draft_kv))
    shardings = jax.tree.map(lambda array: array.sharding, (state.kv, state.draft_kv))
    nan_kv, nan_draft = jax.tree.map(with_nan, (state.kv, state.draft_kv))
    runner.state = state._replace(kv=nan_kv, draft_kv=nan_draft)
    got = run(engine_of(2, plans), alone)
    assert all(np.isnan(np.asarray(array)[pages + 1 :]).all() for array in jax.tree.leaves(runner.state.draft_kv))
    kv, draft_kv = jax.device_put(kept, shardings)
    runner.state = runner.state._replace(kv=kv, draft_kv=draft_kv)
    assert alone[0].rank == 0
    assert plans.seen
    assert all(bool(own.requests) and not other.requests for own, other in (plan.parts for plan in plans.seen))
    assert compiles.total == before
    assert got[0] == want[0]
    np.testing.assert_allclose(got[1]["r0"], want[1]["r0"], atol=1e-4)


@pytest.mark.long
def test_ranks_retract_and_abort_apart():
    """With too few pages on each rank requests are preempted and go on where they were; an abort frees what it held."""
    lengths = (50, 55, 58, 60, 40, 62, 33, 57)
    want, _, _ = run(engine_of(1), requests(lengths, 40))
    engine, made = engine_of(2), requests(lengths, 40)
    for rank in engine.ranks:
        rank.pages.allocate(rank.pages.num_free - 5)
    engine.add(*made)
    placed = [request.rank for request in made]
    assert Counter(placed) == {0: 4, 1: 4}
    ids: dict[str, list[int]] = {request.id: [] for request in made}
    free = [rank.pages.num_free for rank in engine.ranks]
    while engine.has_work:
        for output in engine.step():
            ids[output.request_id] += output.new_ids
        if len(ids["r2"]) > 5:
            engine.abort("r2")
    assert engine.stats().num_preemptions > 1
    assert [request.rank for request in made] == placed
    assert [rank.pages.num_free for rank in engine.ranks] == free
    aborted = ids.pop("r2")
    assert aborted == want.pop("r2")[: len(aborted)]
    assert len(aborted) < 40
    assert ids == want


@pytest.mark.slow
def test_ranks_meet_in_mixtures_only():
    """Two gathers, of rows and of chosen experts, and one sum of own rows for each mixture: the target's and every draft's."""
    runner = runner_of(2)
    text = runner.executable(runner.buckets[0]).as_text()
    assert Counter(COLLECTIVE.findall(text)) == {"all-gather": 2 * (1 + K), "reduce-scatter": 1 + K}


class Layer(nnx.Module):
    """What follows attention in a block."""

    def __init__(self, spec: MoESpec):
        declare = Declare(jnp.float32)
        self.norm, self.mlp = RMSNorm(32, 1e-6, declare), spec.build(32, declare)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "devices"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_ranks_share_a_mixture(scoring, ranks, devices):
    """Each token gets what it gets on one device, though its experts lie anywhere; padding is NaN, on one rank all of it."""
    layer, T = Layer(MoESpec(8, 3, 16, 1, scoring, biases=True)), 12
    rng = np.random.default_rng(0)
    x, attended = (rng.standard_normal((T, 32)).astype(np.float32) for _ in range(2))
    live = np.arange(T) % 3 > 0
    live[: T // ranks] = False
    x[~live] = np.nan

    def on(ranks: int, devices: int) -> np.ndarray:
        mesh = make_mesh(devices, ranks)
        graphdef, state = bind(layer, numpy_params(layer, 0, mesh))

        def add(state: nnx.State, x: jax.Array, attended: jax.Array, live: jax.Array) -> jax.Array:
            merged = nnx.merge(graphdef, state)
            return merged.mlp.add_to(x, attended, merged.norm, live).x

        rows = PartitionSpec(DATA_AXIS) if ranks > 1 else PartitionSpec()
        return np.asarray(jax.jit(on_mesh(add, mesh, (specs(state), rows, rows, rows), rows))(state, x, attended, live))

    one, several = on(1, 1), on(ranks, devices)
    np.testing.assert_allclose(several[live], one[live], atol=1e-5)
    assert np.abs(one - x - attended)[live].max() > 0.1


# --- where requests go ---


def mock_engine(ranks: int) -> Engine:
    settings = dataclasses.replace(SETTINGS, page_size=8, max_model_len=96, num_pages=49, data_parallel_size=ranks)
    return Engine(MockRanks(settings, VOCAB), vocab_size=VOCAB)


def named(beginning: int) -> Iterator[Request]:
    """Requests of three pages that begin alike, and go on alike no more."""
    i = 0
    while True:
        yield Request(f"{beginning}-{i}", [beginning] * 17 + [100 + i] * 7, SamplingParams(max_tokens=4, seed=i))
        i += 1


def finished(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_requests_go_where_their_beginning_is():
    engine, first, second = mock_engine(2), named(1), named(2)
    a, b = next(first), next(second)
    engine.add(a, b)
    assert (a.rank, b.rank) == (0, 1)
    finished(engine)
    later = [next(second), next(first), next(second)]
    engine.add(*later)
    assert [request.rank for request in later] == [1, 0, 1]
    finished(engine)
    assert [request.num_cached_tokens for request in later] == [16, 16, 16]
    stats = engine.stats()
    assert stats.prefix_cache_hits == 3 * 16
    assert len(stats.ranks) == 2


def test_a_beginning_that_all_share_does_not_fill_one_rank():
    """Each step lasts as long as the rank with the most rows needs."""
    engine, texts = mock_engine(2), named(1)
    engine.add(next(texts))
    finished(engine)
    many = [next(texts) for _ in range(40)]
    engine.add(*many)
    fewest, most = sorted(Counter(request.rank for request in many).values())
    assert most <= fewest * 3 // 2 + MOST_AHEAD + 1
    finished(engine)


def test_requests_without_a_common_beginning_are_spread():
    engine = mock_engine(4)
    many = [next(named(i)) for i in range(22)]
    for request in many:
        engine.add(request)
    counts = Counter(request.rank for request in many)
    assert max(counts.values()) - min(counts.values()) <= 1
    engine.step()
    running = {rank: len(scheduler.running) for rank, scheduler in enumerate(engine.ranks)}
    assert all(running.values())
    finished(engine)
    assert engine.stats().kv_cache_usage == 0


def test_ranks_that_run_different_things_have_no_common_step():
    with pytest.raises(AssertionError):
        joined([StepPlan((), (), drafts=1), StepPlan((), (), drafts=2)])


# --- what is refused, with the way out ---


def test_what_ranks_cannot_do_names_the_way_out():
    shared = EngineConfig(data_parallel_size=2, enable_expert_parallel=True)
    mixture, dense = (CausalLM(read_config(config), jnp.float32) for config in (HF_CONFIG, TINY_LLAMA))
    check_ranks(mixture, shared)
    with pytest.raises(ConfigError, match=re.escape("run as many servers and balance over them (docs/hosts.md)")):
        check_ranks(dense, shared)
    with pytest.raises(ConfigError, match=r"needs enable_expert_parallel \(--enable-expert-parallel\): add it"):
        check_ranks(mixture, EngineConfig(data_parallel_size=2))
    with pytest.raises(ConfigError, match=r"enable_mixed_batch \(--enable-mixed-batch\) must be on"):
        check_ranks(mixture, dataclasses.replace(shared, enable_mixed_batch=False))
    with pytest.raises(ConfigError, match=r"is for one process: with several \(--nnodes\) use tensor_parallel_size"):
        choose_devices(jax.devices(), 2, 1, 2)
    with pytest.raises(ConfigError, match=r"data-parallel-size\) 3 times .* 2 needs 6 devices, but there are 4"):
        choose_devices(jax.devices(), 1, 2, 3)


@pytest.mark.parametrize(
    ("ranks", "devices", "message"),
    [
        (4, 1, "data parallel size 4 times tensor parallel size 1 does not divide 6, the experts axis of "
               "layers.1.mlp.down; use a data parallel size that divides 6"),
        (3, 4, "data parallel size 3 times tensor parallel size 4 does not divide 6, the experts axis of "
               "layers.1.mlp.down; use 1 or 2"),
        (2, 3, "tensor parallel size 3 does not divide 256, the vocab axis of embed.weight; use 1"),
    ],
)  # fmt: skip
def test_experts_that_ranks_cannot_share_name_the_sizes_that_would_do(ranks, devices, message):
    model = CausalLM(read_config(CONFIGS["v2"] | {"n_routed_experts": 6}), jnp.float32)
    with pytest.raises(ConfigError, match=re.escape(message) + "$"):
        with_shardings(model, jax.sharding.AbstractMesh((ranks, devices), (DATA_AXIS, TENSOR_AXIS)))


@pytest.mark.full
def test_ranks_load_a_checkpoint():
    """The embedded model from its files: each rank's devices read their own experts, and the text is that of one device."""
    options = {"max_num_seqs": 2, "num_speculative_tokens": 1}
    params = SamplingParams(max_tokens=24, temperature=0)
    prompts = ["def fibonacci(n):", "import os", "class Stack:"]
    one, ranks = (
        [completion.text for completion in LLM("demo", **options, **more).generate(prompts, params)]
        for more in ({}, {"data_parallel_size": 2, "enable_expert_parallel": True})
    )
    assert one == ranks


# --- prompts that wait for those of other ranks ---


def delayed(steps: int) -> tuple[Engine, Iterator[Request]]:
    """Two ranks, each with a request that decodes, and further requests by turns for both."""
    settings = dataclasses.replace(
        SETTINGS, page_size=8, max_model_len=96, num_pages=49, max_num_batched_tokens=16, data_parallel_size=2,
        max_prefill_delay_steps=steps,
    )  # fmt: skip
    engine = Engine(MockRanks(settings, VOCAB), vocab_size=VOCAB)
    made = (Request(f"r{i}", [100 + i] * 8, SamplingParams(max_tokens=60, seed=i, ignore_eos=True)) for i in range(99))
    first = [next(made), next(made)]
    engine.add(*first)
    for _ in range(3):
        engine.step()
    assert [request.rank for request in first] == [0, 1]
    return engine, made


def prompts_of_next_step(engine: Engine) -> list[list[str]]:
    """By rank; every decoding request runs beside them."""
    before = len(engine.runner.plans)
    decoding = {request.id for rank in engine.ranks for request in rank.running if request.state is RequestState.DECODE}
    engine.step()
    (plan,) = engine.runner.plans[before:]
    assert {request.id for part in plan.parts for request in part.decode} == decoding
    return [[row.request.id for row in part.prefill] for part in plan.parts]


@pytest.mark.parametrize("steps", [1, 3])
def test_prompts_of_two_ranks_begin_together(steps):
    """The first waits for the second, and no longer than it may."""
    engine, made = delayed(steps)
    engine.add(next(made))
    assert prompts_of_next_step(engine) == [[], []]
    engine.add(next(made))
    assert prompts_of_next_step(engine) == [["r2"], ["r3"]]
    engine.add(next(made))
    assert [prompts_of_next_step(engine) for _ in range(steps)] == [[[], []]] * steps
    assert prompts_of_next_step(engine) == [["r4"], []]


def test_nothing_waits_where_a_prompt_runs_in_any_case_or_nothing_decodes():
    engine, made = delayed(50)
    long = Request("long", list(range(40)), SamplingParams(max_tokens=9, seed=1))
    engine.add(long, next(made))
    assert prompts_of_next_step(engine) == [["long"], ["r2"]]
    engine.add(next(made))  # joins the second chunk, though the other rank has none that could begin
    assert prompts_of_next_step(engine) == [["long"], ["r3"]]
    finished(engine)
    alone = next(made)
    engine.add(alone)
    assert prompts_of_next_step(engine)[alone.rank] == [alone.id]


def test_without_a_delay_each_prompt_begins_at_once():
    engine, made = delayed(0)
    for _ in range(2):
        request = next(made)
        engine.add(request)
        assert prompts_of_next_step(engine)[request.rank] == [request.id]


def test_a_delay_needs_several_ranks():
    with pytest.raises(ConfigError, match=r"raise data_parallel_size .* above 1"):
        resolve(
            EngineConfig(max_prefill_delay_steps=3),
            model_max_position=64,
            page_bytes=1,
            free_bytes=1 << 20,
            on_gpu=False,
        )
