"""The kernels of experts in FP8 without a GPU: interpreted, and lowered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.backend import W8A8, Backends, use
from pallas_kernels.moe import api, fp8_matmul, fp8_mlp, mosaic, quantised_mlp
from pallas_kernels.moe.config import WIDEST_ROWS, Config, Tiles
from pallas_kernels.moe.dispatch import dispatch
from pallas_kernels.moe.fp8_config import MULTIPLE, SCHEMES, configure_fp8, configure_mlp, padded_rows, pieces_beside
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.slots import max_slots
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant import activations
from pallas_kernels.quant.activations import GROUP, Codes
from pallas_kernels.quant.reference import dequantise
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL, INT4_G32, Scheme
from pallas_kernels.quant.values import Quantised
from pallas_kernels.tuning import Tuning
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.quant_cases import drawn
from tests.matrices import full, members

# Hidden, experts, top-k, inner.
SIZES = {name: LAYERS[name][:4] for name in ("moonlight", "deepseek-v3")}
WIDE = Config(64, max_slots(70, 2, 4, 64, all_tokens=False), False, Tiles(128, 2, 2, 2), Tiles(128, 2, 2, 2), 2)


def sized(scheme: Scheme, *shape: int, seed: int = 0) -> Quantised:
    """Of which products have about the size of their inputs."""
    weight = drawn(scheme, *shape, seed=seed)
    return dataclasses.replace(weight, scale=weight.scale * (shape[-1] ** -0.5 / 5))


def lost(weight: Quantised, expert: int) -> Quantised:
    """With codes and scales that are no numbers, in one expert."""
    nan = np.asarray(weight.codes).copy()
    nan[expert] = np.nan
    return dataclasses.replace(weight, codes=jnp.asarray(nan), scale=weight.scale.at[expert].set(jnp.nan))


def by_oracle(x: np.ndarray, gate_up: Quantised, down: Quantised, weights: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`dequantise` and float32, activations rounded where the kernels round them."""
    gate_up_f32, down_f32 = (np.asarray(dequantise(weight, jnp.float32)) for weight in (gate_up, down))
    tokens = np.asarray(activations.dequantise(activations.quantise(jnp.asarray(x))))
    out = np.zeros(x.shape, np.float32)
    for n in range(ids.shape[1]):
        gate, up = np.moveaxis(np.einsum("tgih,th->tgi", gate_up_f32[ids[:, n]], tokens), 1, 0)
        h = activations.dequantise(activations.quantise(jnp.asarray(gate / (1 + np.exp(-gate)) * up)))
        y = np.einsum("thi,ti->th", down_f32[ids[:, n]], np.asarray(h))
        out += weights[:, n, None] * y.astype(jnp.bfloat16).astype(np.float32)
    return out


def ratio(got: np.ndarray, want: np.ndarray) -> float:
    """Of the mean error and the mean reference, which is rounded to bfloat16 too."""
    want = want.astype(jnp.bfloat16).astype(np.float32)
    return float(np.abs(got - want).mean() / np.abs(want).mean())


def mlp_by_oracle(x: np.ndarray, gate_up: Quantised, down: Quantised) -> np.ndarray:
    one = (jax.tree.map(lambda array: array[None], weight) for weight in (gate_up, down))
    return by_oracle(x, *one, np.ones((len(x), 1), np.float32), np.zeros((len(x), 1), np.int32))


@interpreted
@pytest.mark.parametrize(
    ("scheme", "T", "inner", "pieces"),
    [
        (FP8_BLOCK, 3, 384, 3),
        (FP8_CHANNEL, 20, 256, 2),
        pytest.param(FP8_BLOCK, 70, 256, 2, marks=pytest.mark.slow),
        pytest.param(FP8_CHANNEL, 130, 128, 1, marks=pytest.mark.slow),
    ],
)
def test_interpreted_mlps(scheme: Scheme, T: int, inner: int, pieces: int):
    """Dense layers' and shared experts, in pieces; a token that is NaN reaches no other."""
    H = 256
    gate_up, down = sized(scheme, 2, inner, H), sized(scheme, H, inner, seed=1)
    x = np.random.default_rng(T).normal(size=(T, H)).astype(jnp.bfloat16)
    dirty = np.where(np.arange(T)[:, None] == 1, np.nan, x).astype(jnp.bfloat16)
    config = configure_mlp(T, H, inner)
    assert (config.pieces, config.piece_rows >= T) == (pieces, True)
    config = dataclasses.replace(config, grid=2)
    parts = fp8_mlp.mlp_parts(jnp.asarray(dirty), gate_up, down, config=config, interpret=detect_races())
    assert_no_races(parts, kernels=2)
    assert parts.shape == (pieces, config.piece_rows, H)
    got, sound = np.asarray(parts, np.float32).sum(axis=0)[:T], np.arange(T) != 1
    assert np.isnan(got[1]).all()
    assert ratio(got[sound], mlp_by_oracle(x[sound].astype(np.float32), gate_up, down)) < 2e-3


@interpreted
@pytest.mark.usefixtures("two_blocks")
@pytest.mark.parametrize("of_routed", [FP8_BLOCK, INT4_G32, None], ids=str)
def test_interpreted_beside_shared_experts_in_fp8(of_routed: Scheme | None):
    """Whatever the routed ones are."""
    T, E, k, H, inner = 9, 4, 2, 128, 128
    rng = np.random.default_rng(0)
    x = rng.normal(size=(T, H)).astype(jnp.bfloat16)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=(T, k)).astype(np.float32)
    pair = [sized(of_routed or FP8_BLOCK, E, 2, inner, H), sized(of_routed or FP8_BLOCK, E, H, inner, seed=1)]
    pair = [dequantise(weight, jnp.bfloat16) if of_routed is None else weight for weight in pair]
    shared = sized(FP8_CHANNEL, 2, 256, H, seed=2), sized(FP8_CHANNEL, H, 256, seed=3)
    run = functools.partial(mosaic.experts, interpret=detect_races())
    arguments = weights, ids, jnp.ones(T, bool)
    apart = run(jnp.asarray(x), ExpertWeights(*pair), *arguments)
    both = run(jnp.asarray(x), ExpertWeights(*pair, shared), *arguments)
    assert_no_races(both, kernels=3)
    got = np.asarray(both, np.float32) - np.asarray(apart, np.float32)
    # Two roundings to bfloat16 of sums a few times as large remain.
    assert ratio(got, mlp_by_oracle(x.astype(np.float32), *shared)) < 1e-2


@interpreted
@pytest.mark.usefixtures("two_blocks")
@pytest.mark.parametrize(
    ("scheme", "T", "pieces"),
    [
        (FP8_BLOCK, 1, 2),
        (FP8_CHANNEL, 5, 1),
        pytest.param(FP8_BLOCK, 8, 1, marks=pytest.mark.slow),
        pytest.param(FP8_CHANNEL, 7, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_interpreted_pieces_beside_few_tokens(scheme: Scheme, T: int, pieces: int):
    """Shared experts as slots of the routed ones' kernels. Dead and broken tokens and unused experts reach nobody."""
    E, k, H, inner = 4, 2, 256, 128
    rng = np.random.default_rng(T)
    x = rng.normal(size=(T, H)).astype(jnp.bfloat16)
    ids = np.stack([rng.permutation(E - 1)[:k] for _ in range(T)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=(T, k)).astype(np.float32)
    gate_up, down = sized(scheme, E, 2, inner, H), sized(scheme, E, H, inner, seed=1)
    shared = sized(scheme, 2, pieces * inner, H, seed=2), sized(scheme, H, pieces * inner, seed=3)
    parameters = ExpertWeights(lost(gate_up, E - 1), lost(down, E - 1), shared)
    assert pieces_beside(parameters, configure_fp8(T, E, k, H, inner)) == pieces
    run = functools.partial(mosaic.experts, interpret=detect_races())
    live, broken = np.arange(T) != 3, np.arange(T) == 4
    dirty = jnp.asarray(np.where((live & ~broken)[:, None], x, np.nan), jnp.bfloat16)
    got = np.asarray(run(dirty, parameters, weights, ids, jnp.asarray(live)), np.float32)
    assert_no_races(got, kernels=3)
    sound = live & ~broken
    np.testing.assert_array_equal(got[~live], 0)
    assert np.isnan(got[live & broken]).all()
    routed = by_oracle(x[sound].astype(np.float32), gate_up, down, weights[sound], ids[sound])
    assert ratio(got[sound], routed + mlp_by_oracle(x[sound].astype(np.float32), *shared)) < 2e-3
    # Without live tokens pieces are all that there is to compute.
    nobody = run(dirty, parameters, weights, ids, jnp.zeros(T, bool))
    assert_no_races(nobody, kernels=3)
    np.testing.assert_array_equal(np.asarray(nobody, np.float32), 0)


def check(scheme: Scheme, T: int, H: int, inner: int, config: Config | None = None) -> None:
    """Live tokens are as in the oracle; neither a dead or broken token nor an unused expert reaches others."""
    E, k = 4, 2
    rng = np.random.default_rng(T)
    gate_up, down = sized(scheme, E, 2, inner, H), sized(scheme, E, H, inner, seed=1)
    x = rng.normal(size=(T, H)).astype(jnp.bfloat16)
    ids = np.stack([rng.permutation(E - 1)[:k] for _ in range(T)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=(T, k)).astype(np.float32)
    live = np.arange(T) % 5 != 4
    sound = live.copy()
    if T > 2:
        sound[np.flatnonzero(live)[-1]] = False
    dirty = jnp.asarray(np.where(sound[:, None], x, np.nan), jnp.bfloat16)
    parameters = ExpertWeights(lost(gate_up, E - 1), lost(down, E - 1))
    # Two blocks, so that a block works on several tiles and the interpreter is not one of 132 threads.
    config = dataclasses.replace(config or configure_fp8(T, E, k, H, inner), grid=2)
    got = mosaic.experts(dirty, parameters, weights, ids, jnp.asarray(live), config=config, interpret=detect_races())
    assert_no_races(got, kernels=3)
    got = np.asarray(got, np.float32)
    assert np.isnan(got[live & ~sound]).all()
    np.testing.assert_array_equal(got[~live], 0)
    want = by_oracle(x[sound].astype(np.float32), gate_up, down, weights[sound], ids[sound])
    assert ratio(got[sound], want) < 1e-3


@interpreted
@pytest.mark.parametrize(("scheme", "T"), [(FP8_BLOCK, 5), (FP8_BLOCK, 20), (FP8_CHANNEL, 1)], ids=str)
def test_interpreted(scheme: Scheme, T: int):
    check(scheme, T, 256, 128)


@interpreted
@pytest.mark.parametrize(
    ("scheme", "rows", "T"),
    [
        (FP8_BLOCK, 8, 17),
        pytest.param(FP8_BLOCK, 24, 60, marks=pytest.mark.slow),
        pytest.param(FP8_CHANNEL, 40, 60, marks=pytest.mark.slow),  # scales of 160 bytes
    ],
    ids=str,
)
def test_interpreted_with_narrow_slots(scheme: Scheme, rows: int, T: int):
    """Of eight rows, and of numbers that are no powers of two; some experts need several."""
    with tuning.use(Tuning(slot_rows=((100.0, rows),))):
        assert configure_fp8(T, 4, 2, 256, 128).rows == rows
        check(scheme, T, 256, 128)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_interpreted_with_wide_slots(scheme: Scheme):
    """A prefill's: several slots an expert, and two warpgroups for `down` too."""
    check(scheme, 70, 128, 384, dataclasses.replace(WIDE, down=Tiles(128, 3, 1, 2)))
    check(scheme, 70, 256, 256, WIDE)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_interpreted_with_slots_of_128_tokens(scheme: Scheme):
    """A long prefill's; tiles of `down` of 256 columns or, where they do not divide, of 128."""
    tiles, slots = Tiles(128, 2, 2, 2), max_slots(130, 2, 4, 128, all_tokens=False)
    check(scheme, 130, 256, 256, Config(128, slots, False, tiles, tiles, 2))
    check(scheme, 130, 384, 128, Config(128, slots, False, tiles, Tiles(128, 2, 2, 1), 2))


@interpreted
@pytest.mark.slow
def test_interpreted_with_long_stages():
    """Two groups of columns in each stage."""
    config = configure_fp8(20, 4, 2, 256, 256)
    check(FP8_CHANNEL, 20, 256, 256, dataclasses.replace(config, up=Tiles(256, 2, 2, 2), down=Tiles(256, 3, 1, 1)))
    check(FP8_BLOCK, 20, 512, 256, dataclasses.replace(config, up=Tiles(256, 3, 2, 2), down=Tiles(256, 2, 2, 2)))


def products(x: np.ndarray, gate_up: Quantised, down: Quantised, ids: np.ndarray) -> tuple[Codes, np.ndarray]:
    """What the two matmuls give the first expert of each token, interpreted; every slot has all tokens."""
    T, H = x.shape
    E, _, inner, _ = gate_up.shape
    config = dataclasses.replace(configure_fp8(T, E, 1, H, inner), grid=2)
    assert config.all_tokens
    cut = E, config.rows, config.slots
    tables = dispatch(jnp.asarray(ids), jnp.ones(T, bool), *cut, all_tokens=True, interpret=detect_races())
    tokens = mosaic.slot_codes(jnp.asarray(x), tables, config, interpret=detect_races())
    h = fp8_matmul.up_matmul(tokens, gate_up, tables, config, interpret=detect_races())
    y = fp8_matmul.down_matmul(h, down, tables, config, interpret=detect_races())
    slot = np.asarray(tables.place)[:T, 0]
    flat = Codes(h.codes.reshape(-1, inner)[slot], h.scale[slot // config.rows, :, slot % config.rows].T)
    return flat, np.asarray(y, np.float32).reshape(-1, H)[slot]


@interpreted
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("H", [2048, pytest.param(7168, marks=pytest.mark.full)])
def test_fp8_long_sums(H: int, scheme: Scheme):
    """Sums of many positive numbers. (The interpreter sums in float32; `tests/gpu/test_moe_fp8.py` has the tensor cores.)"""
    inner = 128
    rng = np.random.default_rng(0)
    gate_up, down = (
        dataclasses.replace(weight, codes=jnp.abs(weight.codes.astype(jnp.float32)).astype(weight.codes.dtype))
        for weight in (sized(scheme, 1, 2, inner, H), sized(scheme, 1, H, inner, seed=1))
    )
    x = rng.uniform(0, 0.1, size=(2, H)).astype(jnp.bfloat16)
    h, y = products(x, gate_up, down, np.zeros((2, 1), np.int32))
    tokens = np.asarray(activations.dequantise(activations.quantise(jnp.asarray(x))))
    gate, up = np.einsum("gih,th->gti", np.asarray(dequantise(gate_up, jnp.float32))[0], tokens)
    exact = activations.quantise(jnp.asarray(gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(h.scale, exact.scale, rtol=1e-4)
    assert np.mean(np.asarray(h.codes).view(np.uint8) != np.asarray(exact.codes).view(np.uint8)) < 0.01
    want = np.asarray(activations.dequantise(h)) @ np.asarray(dequantise(down, jnp.float32))[0].T
    assert ratio(y, want) < 1e-3


@interpreted
def test_rows_do_not_depend_on_their_batch_fp8():
    """Neighbours a million times as large, or NaN, of the same expert and of another one, change no bit of a token."""
    rng = np.random.default_rng(0)
    gate_up, down = sized(FP8_CHANNEL, 2, 2, 128, 256), sized(FP8_CHANNEL, 2, 256, 128, seed=1)
    x = rng.normal(size=(5, 256)).astype(np.float32)
    ids = np.array([[0], [1], [0], [1], [0]], np.int32)
    factors = np.array([1, 1e6, 1e6, np.nan, np.nan])[:, None]
    _, alone = products(x.astype(jnp.bfloat16), gate_up, down, ids)
    _, beside = products((x * factors).astype(jnp.bfloat16), gate_up, down, ids)
    np.testing.assert_array_equal(beside[0], alone[0])
    assert np.isfinite(beside[:3]).all()
    assert np.isnan(beside[3:]).all()


@interpreted
def test_nan_stays_in_its_row_fp8():
    """One number that is none, in one group of one token: all of this token's results are NaN, and no other's."""
    gate_up, down = sized(FP8_BLOCK, 2, 2, 256, 256), sized(FP8_BLOCK, 2, 256, 256, seed=1)
    for bad in (np.nan, np.inf):
        x = np.random.default_rng(0).normal(size=(3, 256)).astype(jnp.bfloat16)
        x[1, 200] = bad
        _, got = products(x, gate_up, down, np.array([[0], [0], [1]], np.int32))
        np.testing.assert_array_equal(np.isnan(got).all(axis=1), [False, True, False])
        assert np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("columns", [1, 64, 127, 128, 129, 300])
def test_groups_of_activations_do_not_know_each_other(columns: int):
    """Nor how many there are, nor how many columns the last one has: to the bit what each is alone, and beside zeros."""
    x = np.random.default_rng(columns).normal(size=(2, 3, columns)) * 10.0 ** np.arange(-3, 3).reshape(2, 3, 1)
    x = x.astype(jnp.bfloat16)
    x[0, 1, -1] = np.nan
    whole = activations.quantise(jnp.asarray(x))
    assert whole.codes.shape == x.shape
    assert whole.scale.shape == (2, -(-columns // GROUP), 3)
    parts = [activations.quantise(jnp.asarray(x[..., at : at + GROUP])) for at in range(0, columns, GROUP)]
    zeros = activations.quantise(jnp.asarray(np.pad(x, ((0, 0), (0, 0), (0, -columns % GROUP)))))
    for codes, scale in (
        (
            np.concatenate([part.codes for part in parts], axis=-1),
            np.concatenate([part.scale for part in parts], axis=1),
        ),
        (zeros.codes[..., :columns], zeros.scale),
    ):
        np.testing.assert_array_equal(np.asarray(whole.codes).view(np.uint8), np.asarray(codes).view(np.uint8))
        np.testing.assert_array_equal(whole.scale, scale)
    back = np.concatenate([activations.dequantise(part) for part in parts], axis=-1)
    np.testing.assert_array_equal(activations.dequantise(whole), back)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("H", "inner"), [(192, 64), (256, 384)])
def test_plain_xla_in_the_arithmetic_of_the_kernels(scheme: Scheme, H: int, inner: int):
    """Activations are rounded before each product with weights in FP8, of routed and shared experts and of MLPs."""
    T, E, k = 6, 4, 2
    rng = np.random.default_rng(0)
    pair = sized(scheme, E, 2, inner, H), sized(scheme, E, H, inner, seed=1)
    dense = sized(scheme, 2, inner, H, seed=2), sized(scheme, H, inner, seed=3)
    x = rng.normal(size=(T, H)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=(T, k)).astype(np.float32)
    call = weights, ids, np.ones(T, bool)
    with use(Backends(moe=W8A8)) as ran:
        together = api.experts(x, ExpertWeights(*pair, dense), *call)
        alone = api.mlp(x, *dense)
    assert ran == {"moe": {W8A8}, "mlp": {W8A8}}
    want = mlp_by_oracle(x, *dense)
    assert ratio(np.asarray(alone), want) < 3e-3  # which rounds the results of experts, and all of them, to bfloat16
    assert ratio(np.asarray(together), by_oracle(x, *pair, weights, ids) + want) < 3e-3
    with use(Backends(moe="reference")):
        assert ratio(np.asarray(api.mlp(x, *dense)), want) > 1e-2
        assert ratio(np.asarray(api.experts(x, ExpertWeights(*pair), *call)), by_oracle(x, *pair, weights, ids)) > 1e-2


def test_other_weights_multiply_activations_as_they_are():
    """Also where FP8 is asked for: codes of four bits, and arrays."""
    codes = drawn(INT4_G32, 2, 64, 64), drawn(INT4_G32, 64, 64, seed=1)
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    for gate_up, down in (codes, [dequantise(weight, jnp.float32) for weight in codes]):
        with use(Backends(moe=W8A8)):
            rounded = api.mlp(x, gate_up, down)
        with use(Backends(moe="reference")):
            np.testing.assert_array_equal(rounded, api.mlp(x, gate_up, down))


def test_activations_are_those_of_deepgemm():
    """Codes and scales against float64, with a last group of 64; zeros have a scale, and NaN stays NaN."""
    x = np.random.default_rng(0).normal(size=(5, 3 * GROUP)).astype(np.float32)
    x *= 10.0 ** np.arange(-3, 2)[:, None]
    x[0, :GROUP] = 0
    x[1, 5] = np.nan
    x[:, -64:] = 0
    ragged = activations.quantise(jnp.asarray(x[:, :-64]))
    got = Codes(jnp.pad(ragged.codes, ((0, 0), (0, 64))), ragged.scale)
    groups = x.astype(np.float64).reshape(5, 3, GROUP)
    largest = np.abs(groups).max(axis=-1)
    np.testing.assert_allclose(got.scale.T, np.maximum(largest, activations.LEAST) / 448, rtol=1e-6)
    values = np.asarray(got.codes, np.float32).reshape(groups.shape)
    exact = groups / np.where(largest, largest, 1)[..., None] * 448
    assert np.isnan(values[1, 0, 5])
    sound = np.isfinite(exact)
    # A code is at most half a step away: a sixteenth of a number, and of the least ones 2^-10.
    assert (np.abs(values - exact)[sound] <= np.maximum(np.abs(exact)[sound] / 16, 2**-10) * 1.001).all()
    assert np.abs(values[sound]).max() == 448
    back = np.asarray(activations.dequantise(got))
    np.testing.assert_array_equal(back.reshape(values.shape), values * np.asarray(got.scale).T[..., None])


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "model", "T"), [
    (FP8_BLOCK, "moonlight", 1), *full((FP8_BLOCK, "moonlight", 32)), (FP8_BLOCK, "deepseek-v3", 2048),
    *full((FP8_CHANNEL, "moonlight", 2048), (FP8_CHANNEL, "deepseek-v3", 8)), (FP8_CHANNEL, "deepseek-v3", 128),
], ids=str)  # fmt: skip
def test_lowers_for_the_gpu(scheme: Scheme, model: str, T: int):
    """No weight is turned into numbers outside of the kernels."""
    H, E, k, inner = SIZES[model]
    S = jax.ShapeDtypeStruct
    pair = [Quantised(**scheme.arrays(shape), scheme=scheme) for shape in ((E, 2, inner, H), (E, H, inner))]
    routes = S((T, k), jnp.float32), S((T, k), jnp.int32), S((T,), jnp.bool_)
    traced = jax.jit(mosaic.experts).trace(S((T, H), jnp.bfloat16), ExpertWeights(*pair), *routes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") >= 3
    assert f"{E}x2x{inner}x{H}xbf16" not in text
    assert "dot_general" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("H", "inner", "T", "scheme"),
    members(
        [
            (*sizes, T, scheme)
            for sizes in ((2048, 2816), (2048, 11264), (7168, 2048), (7168, 18432))
            for T in (1, 128, 2048)
            for scheme in SCHEMES
        ],
        default=[
            (2048, 2816, 1, FP8_BLOCK), (7168, 2048, 128, FP8_BLOCK), (7168, 18432, 2048, FP8_BLOCK),
            (7168, 18432, 1, FP8_CHANNEL), (2048, 2816, 128, FP8_CHANNEL), (2048, 11264, 2048, FP8_CHANNEL),
        ],
    ),
    ids=str,
)  # fmt: skip
def test_mlps_lower_for_the_gpu(scheme: Scheme, H: int, inner: int, T: int):
    """Shared experts and dense layers of Moonlight and DeepSeek-V3."""
    S = jax.ShapeDtypeStruct
    pair = [Quantised(**scheme.arrays(shape), scheme=scheme) for shape in ((2, inner, H), (H, inner))]
    traced = jax.jit(quantised_mlp.mlp).trace(S((T, H), jnp.bfloat16), *pair)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3  # the tokens, gate and up, down
    assert f"2x{inner}x{H}xbf16" not in text
    assert "dot_general" not in text


@pytest.mark.parametrize(("H", "E", "k", "inner"), SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("T", [1, 8, 32, 128, 512, 2048, 8192])
def test_tiles_divide_the_weights_and_fit(T: int, H: int, E: int, k: int, inner: int):
    config = configure_fp8(T, E, k, H, inner)
    wide = config.rows == WIDEST_ROWS
    for t, rows, columns, gated in ((config.up, inner, H, True), (config.down, H, inner, False)):
        weights = t.blocks * (GROUP if wide else t.consumers * 64)  # rows of a stage
        assert rows % (MULTIPLE if gated else weights) == 0
        assert columns % t.depth == 0
        assert t.stages >= 3
        stage = (weights + config.rows) * t.depth + t.depth // GROUP * 4 * padded_rows(config.rows)
        if wide:
            staged = config.rows * (GROUP if gated else weights * 2)
        else:
            staged = config.rows * (GROUP + 64 * 4) + 2048 if gated else t.consumers * config.rows * 64 * 2
        assert t.stages * stage + staged <= 227 * 1024 - 2048


def test_the_largest_code_is_that_of_the_type():
    assert float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max) == activations.LARGEST
