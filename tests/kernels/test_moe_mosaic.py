"""The Mosaic GPU kernels of the experts without a GPU: interpreted, lowered, and their slot tables."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, UnsupportedError, use
from pallas_kernels.moe import api, dispatch, gather, mosaic, reference
from pallas_kernels.moe.activation import Clamp
from pallas_kernels.moe.config import ALL_TOKENS_ROWS, Config, Tiles, configure
from pallas_kernels.moe.dispatch_tiles import BLOCK
from pallas_kernels.moe.reference import slot_tables
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.slots import SlotTables, max_slots
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.schemes import FP8_BLOCK, INT4_G32
from pallas_kernels.quant.values import Quantised
from pallas_kernels.tuning import Tuning
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.matrices import full, members


def routed(rng: np.random.Generator, T: int, E: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    return rng.uniform(0.1, 1, size=(T, k)).astype(np.float32), ids


def interpret(config: Config, *arrays) -> np.ndarray:
    # Two blocks, so that a block works on several tiles and the interpreter is not one of 132 threads.
    config = dataclasses.replace(config, grid=2)
    got = np.asarray(mosaic.experts(*arrays, config=config, interpret=detect_races()), np.float32)
    assert_no_races(got)
    return got


def check(
    T: int,
    E: int,
    k: int,
    H: int,
    inner: int,
    config: Config | None = None,
    *,
    shared_inner: int = 0,
    clamp: Clamp | None = None,
    parts: int = 1,
) -> None:
    """Live tokens are as in the float32 reference; dead ones give 0, and their NaN reaches no other token.

    A clamp comes with biases. `parts`: devices that share the experts, whose results are added up.
    """
    rng = np.random.default_rng(T)
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.bfloat16)
    gate_up = jnp.asarray(rng.normal(size=(E, 2, inner, H)) / H**0.5, jnp.bfloat16)
    down = jnp.asarray(rng.normal(size=(E, H, inner)) / inner**0.5, jnp.bfloat16)
    weights, ids = routed(rng, T, E, k)
    shared = None
    if shared_inner:
        sizes = (2, shared_inner, H), (H, shared_inner)
        shared = tuple(jnp.asarray(rng.normal(size=part) / part[-1] ** 0.5, jnp.bfloat16) for part in sizes)
    live = np.arange(T) % 5 != 4
    poisoned = np.flatnonzero(live)[-1] if T > 2 else None
    dirty = np.asarray(x, np.float32)
    dirty[~live] = np.nan
    if poisoned is not None:
        dirty[poisoned] = np.nan
    config = config or configure(T, E // parts, k, H, inner, shared_inner // parts)
    biases = tuple(jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((E, 2, inner), (E, H))) if clamp else None
    parameters = ExpertWeights(gate_up, down, shared, biases, clamp)
    got = sum(
        interpret(config, jnp.asarray(dirty, jnp.bfloat16), part, weights, ids, jnp.asarray(live))
        for part in of_devices(parameters, parts)
    )
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), (x, parameters))
    want = np.asarray(reference.experts(*exact, weights, ids, live))
    sound = live.copy()
    if poisoned is not None:
        assert np.isnan(got[poisoned]).all()
        sound[poisoned] = False
    np.testing.assert_array_equal(got[~live], 0)
    assert np.linalg.norm(got[sound] - want[sound]) <= 1e-2 * np.linalg.norm(want[sound])


def of_devices(whole: ExpertWeights, parts: int) -> list[ExpertWeights]:
    """The experts cut by experts, and the shared ones by their inner size."""
    if parts == 1:
        return [whole]

    size = len(whole.gate_up) // parts
    routed = (jnp.split(array, parts) for array in (whole.gate_up, whole.down))
    shared = (jnp.split(array, parts, axis=1) for array in whole.shared)
    return [
        ExpertWeights(gate_up, down, tuple(shared), first=jnp.int32(i * size))
        for i, (gate_up, down, *shared) in enumerate(zip(*routed, *shared, strict=True))
    ]


@interpreted
@pytest.mark.parametrize("T", [1, 5, 20])
def test_interpreted(T):
    check(T, 8, 2, 128, 128)


@interpreted
@pytest.mark.parametrize(("rows", "T", "E", "shared_inner"), [(8, 17, 8, 0), (24, 60, 4, 128)])
def test_interpreted_with_narrow_slots(rows, T, E, shared_inner):
    """Of eight rows, and of a number that is no power of two; some experts need several."""
    with tuning.use(Tuning(slot_rows=((100.0, rows),))):
        assert configure(T, E, 2, 128, 128).rows == rows
        check(T, E, 2, 128, 128, shared_inner=shared_inner)


@interpreted
@pytest.mark.parametrize("T", [1, 20])
def test_parts_of_the_experts_add_up(T):
    """Every token's expert runs on one of the devices, and a device without any of its experts adds its shared part alone."""
    check(T, 8, 2, 128, 128, shared_inner=256, parts=2)


@interpreted
def test_parts_add_up_where_the_tables_kernel_copies_the_tokens():
    """As on an H200, where one kernel makes the slot tables and copies; dead tokens are copied nowhere."""
    jax.clear_caches()  # what was traced without the choice has no such kernel
    names = []
    with tuning.use(Tuning(copying_tokens=128)), pytest.MonkeyPatch.context() as patch:
        copy = mosaic.dispatch_and_copy
        patch.setattr(mosaic, "dispatch_and_copy", lambda *a, **options: names.append("copied") or copy(*a, **options))
        check(24, 8, 3, 128, 128, shared_inner=256, parts=2)
    assert names
    jax.clear_caches()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("T", [5, 70])
def test_interpreted_with_biases_and_a_clamp(T):
    """Of gpt-oss: few tokens, and more than one slot per expert with two consumer warpgroups."""
    config = None
    if T > 8:
        slots = max_slots(T, 2, 4, 64, all_tokens=False)
        config = Config(64, slots, False, Tiles(64, 3, 2, 2), Tiles(64, 2, 2, 2), 2, 0, 0)
    check(T, 4, 2, 256, 128, config, clamp=Clamp(1.702, 1.0))


@interpreted
@pytest.mark.parametrize(("T", "pieces"), [(1, 2), (5, 1), (20, 2)])
def test_interpreted_with_shared_experts(T, pieces):
    assert configure(T, 8, 2, 128, 128, pieces * 128).pieces == pieces
    check(T, 8, 2, 128, 128, shared_inner=pieces * 128)


@pytest.mark.parametrize(("T", "shared_inner"), [(16, 192), (Tuning().most_piece_rows + 1, 256)])
def test_shared_experts_that_the_kernels_leave_out(T, shared_inner):
    """An inner size that is no multiple of an expert's, and too many tokens."""
    config = configure(T, 8, 2, 128, 128, shared_inner)
    assert config == configure(T, 8, 2, 128, 128)


@interpreted
@pytest.mark.slow
def test_interpreted_with_shared_experts_outside():
    check(9, 8, 2, 128, 128, shared_inner=192)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("shared_inner", [0, 64])
def test_interpreted_odd_sizes(shared_inner):
    """Sizes of the embedded model: multiples of 64 only."""
    check(9, 8, 2, 192, 64, shared_inner=shared_inner)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("pieces", [0, 1])
def test_interpreted_two_consumers(pieces):
    """As in a prefill: two consumer warpgroups with several blocks each, more than one slot per expert."""
    T, E, k, H, inner = 70, 4, 2, 256, 128
    config = Config(
        64, max_slots(T, k, E, 64, all_tokens=False), False, Tiles(64, 3, 2, 2), Tiles(64, 2, 2, 2), 2,
        pieces, 72 * pieces,
    )  # fmt: skip
    check(T, E, k, H, inner, config, shared_inner=pieces * inner)


@interpreted
@pytest.mark.parametrize(
    ("T", "E", "k", "rows", "all_tokens", "most_chunks"),
    [
        (5, 8, 2, 8, True, dispatch.MOST_CHUNKS),
        (37, 8, 2, 16, False, 0),
        pytest.param(33, 70, 6, 8, False, dispatch.MOST_CHUNKS, marks=pytest.mark.slow),
        pytest.param(33, 70, 6, 8, False, 0, marks=pytest.mark.slow),
    ],
)
def test_dispatch_gives_the_slot_tables_of_the_reference(T, E, k, rows, all_tokens, most_chunks, monkeypatch):
    """With one kernel and with two: slots, their experts, and the token of each row that is used."""
    monkeypatch.setattr(dispatch, "MOST_CHUNKS", most_chunks)
    rng = np.random.default_rng(T)
    _, ids = routed(rng, T, E, k)
    check_tables(ids, rng.uniform(size=T) < 0.7, E, rows, all_tokens=all_tokens, kernels=1 if most_chunks else 2)


@interpreted
@pytest.mark.parametrize("most_chunks", [dispatch.MOST_CHUNKS, 0])
def test_slots_of_24_rows_follow_when_one_is_full(most_chunks, monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_CHUNKS", most_chunks)
    tokens_of_experts = [0, 1, 24, 25, 48, 49]
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(6, dtype=np.int32), tokens_of_experts))[:, None]
    tables = check_tables(ids, np.ones(len(ids), bool), 6, 24, all_tokens=False, kernels=1 if most_chunks else 2)
    assert tables.expert[: int(tables.num_slots[0])].tolist() == [1, 2, 3, 3, 4, 4, 5, 5, 5]


def check_tables(ids: np.ndarray, live: np.ndarray, E: int, rows: int, *, all_tokens: bool, kernels: int) -> SlotTables:
    """The kernels' tables, which are the reference's where these are defined."""
    slots = max_slots(*ids.shape, E, rows, all_tokens=all_tokens)
    got = dispatch.dispatch(
        jnp.asarray(ids), jnp.asarray(live), E, rows, slots, all_tokens=all_tokens, interpret=detect_races()
    )
    want = slot_tables(jnp.asarray(ids), jnp.asarray(live), E, rows, all_tokens=all_tokens)
    n = int(want.num_slots[0])
    assert got.num_slots.tolist() == [n]
    np.testing.assert_array_equal(got.expert[:n], want.expert[:n])
    np.testing.assert_array_equal(got.place, want.place)
    if not all_tokens:
        np.testing.assert_array_equal(got.used[:n], want.used[:n])
        used = want.place[live]
        np.testing.assert_array_equal(got.token[used], want.token[used])
    assert_no_races(got, kernels=kernels)
    return got


@pytest.mark.slow
def test_no_token_is_live():
    rng = np.random.default_rng(0)
    weights, ids = routed(rng, 20, 8, 2)
    tables = slot_tables(jnp.asarray(ids), jnp.zeros(20, bool), 8, 16, all_tokens=False)
    assert tables.num_slots.tolist() == [0]
    y = jnp.full((tables.expert.shape[0], 16, 128), jnp.nan, jnp.bfloat16)
    rows = mosaic.ExpertRows(y, (), jnp.asarray(weights), tables.place)
    np.testing.assert_array_equal(mosaic.combine(rows, jnp.zeros(20, bool), 2), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "T", "num_shared"),
    [
        *members(
            itertools.product(["moonlight"], [1, 8, 32, 128, 2048], [0, 2]),
            default=[("moonlight", 8, 0), ("moonlight", 32, 2), ("moonlight", 2048, 0)],
        ),
        ("deepseek-v3", 1, 2), ("deepseek-v3", 128, 0), *full(("deepseek-v3", 2048, 2), ("demo", 1, 0)), ("demo", 32, 2),
    ],
)  # fmt: skip
def test_lowers_for_the_gpu(model, T, num_shared):
    H, E, k, inner, _ = LAYERS[model]
    S = num_shared * inner
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    shared = (bf16((2, S, H)), bf16((H, S))) if num_shared else None
    parameters = ExpertWeights(bf16((E, 2, inner, H)), bf16((E, H, inner)), shared)
    routes = [jax.ShapeDtypeStruct((T, k), dtype) for dtype in (jnp.float32, jnp.int32)]
    traced = jax.jit(mosaic.experts).trace(bf16((T, H)), parameters, *routes, jax.ShapeDtypeStruct((T,), jnp.bool_))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    gathers = T > ALL_TOKENS_ROWS and gather.supports(H)
    two_plans = T > ALL_TOKENS_ROWS and T * k > dispatch.MOST_CHUNKS * BLOCK
    assert text.count("custom_call @mosaic_gpu") == 3 + gathers + two_plans
    assert ("dot_general" in text) == (num_shared > 0 and Tuning().most_piece_rows < T)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "T", "tables"), [(24, 128, 1), (24, 256, 2), (40, 256, 2)])
@pytest.mark.parametrize("scheme", [None, INT4_G32, FP8_BLOCK], ids=str)
def test_slots_of_other_rows_lower_for_the_gpu(scheme, rows, T, tables):
    """With both ways to make tables; activations in FP8 are a kernel too."""
    H, E, k, inner, _ = LAYERS["moonlight"]
    S, shapes = jax.ShapeDtypeStruct, ((E, 2, inner, H), (E, H, inner))
    pair = [Quantised(**scheme.arrays(s), scheme=scheme) if scheme else S(s, jnp.bfloat16) for s in shapes]
    routes = [S((T, k), jnp.float32), S((T, k), jnp.int32), S((T,), jnp.bool_)]
    jax.clear_caches()
    with tuning.use(Tuning(slot_rows=((24.0, rows),), packed_slot_rows=((24.0, rows),))):
        traced = jax.jit(mosaic.experts).trace(S((T, H), jnp.bfloat16), ExpertWeights(*pair), *routes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == tables + 3 + (scheme is FP8_BLOCK)
    assert f"{max_slots(T, k, E, rows, all_tokens=False)}x{rows}x{H}xbf16" in text


@pytest.mark.parametrize("T", [1, pytest.param(2048, marks=pytest.mark.slow)])
def test_biases_and_a_clamp_lower_for_the_gpu(T):
    """gpt-oss-20b, whose sizes are odd multiples of 64; routed in the same call."""
    H = inner = 2880
    E, S = 32, jax.ShapeDtypeStruct
    arrays = S((E, 2, inner, H), jnp.bfloat16), S((E, H, inner), jnp.bfloat16)
    biases = S((E, 2, inner), jnp.bfloat16), S((E, H), jnp.bfloat16)
    routing = Routing(4, 1, 1, normalize=True, scale=1.0)
    run = jax.jit(lambda x, parameters, logits, live: mosaic.routed_experts(
        x, parameters, logits, None, live, routing=routing
    ))  # fmt: skip
    parameters = ExpertWeights(*arrays, biases=biases, clamp=Clamp())
    traced = run.trace(S((T, H), jnp.bfloat16), parameters, S((T, E), jnp.float32), S((T,), jnp.bool_))
    text = traced.lower(lowering_platforms=("cuda",))
    assert text.as_text().count("custom_call @mosaic_gpu") >= 3


@pytest.mark.long
@given(
    seed=st.integers(0, 2**31), T=st.sampled_from([1, 3, 8, 33]), E=st.sampled_from([4, 8]), k=st.integers(1, 4),
    rows=st.sampled_from([8, 16, 24]), share_live=st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip
@settings(max_examples=10)
def test_tables(seed, T, E, k, rows, share_live):
    """Every live assignment has its own row (its token's, if slots have all tokens) in one of its expert's few slots."""
    rng = np.random.default_rng(seed)
    _, ids = routed(rng, T, E, k)
    live = rng.uniform(size=T) < share_live
    for all_tokens in (False, True) if rows >= T else (False,):
        got = jax.tree.map(np.asarray, slot_tables(jnp.asarray(ids), jnp.asarray(live), E, rows, all_tokens=all_tokens))
        count = np.bincount(ids[live].reshape(-1), minlength=E)
        blocks = np.minimum(count, 1) if all_tokens else -(-count // rows)
        assert got.num_slots.tolist() == [blocks.sum()]
        assert got.expert.shape == (max_slots(T, k, E, rows, all_tokens=all_tokens),)
        assert blocks.sum() <= len(got.expert)
        np.testing.assert_array_equal(got.expert[: blocks.sum()], np.repeat(np.arange(E), blocks))
        assert got.expert.max() < E
        assert (got.expert >= 0).all()
        place = got.place[live]
        np.testing.assert_array_equal(got.expert[place // rows], ids[live])
        assert (place // rows < max(1, blocks.sum())).all()
        assert len(np.unique(place)) == place.size
        if all_tokens:
            np.testing.assert_array_equal(place % rows, np.flatnonzero(live)[:, None] + 0 * place)
        else:
            np.testing.assert_array_equal(got.token[place], np.flatnonzero(live)[:, None] + 0 * place)
            np.testing.assert_array_equal(got.used, np.bincount(place.reshape(-1) // rows, minlength=len(got.used)))
            assert ((got.token >= 0) & (got.token < T)).all()
        np.testing.assert_array_equal(got.place[~live], 0)


def test_tiles_fit_and_divide():
    for T, num_shared in itertools.product((1, 8, 9, 64, 128, 256, 500, 2048, 4096), (0, 2)):
        for H, E, k, inner, _ in (*LAYERS.values(), (320, 8, 2, 448, 0)):
            config = configure(T, E, k, H, inner, num_shared * inner)
            rows = max(config.rows, config.piece_rows)
            for t, out_rows, columns, gated in ((config.up, inner, H, True), (config.down, H, inner, False)):
                assert out_rows % (64 * t.consumers * (1 if gated else t.blocks)) == 0
                assert columns % t.depth == 0
                assert t.stages >= 2
                ring = t.stages * (t.consumers * t.blocks * 64 + rows) * t.depth * 2
                assert ring + t.consumers * rows * 64 * 2 <= 227 * 1024 - 1024


def test_unsupported_calls_say_why():
    x, gate_up, down = jnp.zeros((1, 96)), jnp.zeros((2, 2, 64, 96)), jnp.zeros((2, 96, 64))
    weights, ids, live = jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.int32), jnp.ones(1, bool)
    with use(Backends(moe="mosaic")), pytest.raises(UnsupportedError, match="multiples of 64, not 96 and 64"):
        api.experts(x, ExpertWeights(gate_up, down), weights, ids, live)
    with use(Backends(moe="auto")):
        assert api.experts(x, ExpertWeights(gate_up, down), weights, ids, live).shape == (1, 96)
