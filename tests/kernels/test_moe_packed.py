"""The kernels of experts with codes of four bits without a GPU: interpreted, lowered, and what a thread reads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.moe import mosaic, packed_codes, packed_mlp, quantised_mlp, reference
from pallas_kernels.moe.activation import Clamp
from pallas_kernels.moe.config import Config, Tiles
from pallas_kernels.moe.packed_codes import SCHEMES, UNIT, fragment_order
from pallas_kernels.moe.packed_config import configure_packed, configure_packed_mlp, packed_tiles
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.slots import max_slots
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.reference import dequantise
from pallas_kernels.quant.schemes import INT4_G32, MXFP4, NVFP4, VALUES, Scheme
from pallas_kernels.quant.values import Quantised
from pallas_kernels.tuning import Tuning
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.quant_cases import drawn
from tests.matrices import full

# Hidden, experts, top-k, inner.
SIZES = {"moonlight": LAYERS["moonlight"][:4], "kimi-k2": (7168, 384, 8, 2048), "gpt-oss-20b": (2880, 32, 4, 2880)}


# Hidden and inner size of dense layers and shared experts: Moonlight's, R1's, and what eight devices have of R1's.
MLPS = [(2048, 11264), (2048, 2816), (7168, 18432), (7168, 2048), (7168, 2304), (7168, 256)]


def sized(scheme: Scheme, *shape: int, seed: int = 0) -> Quantised:
    """Of which products have about the size of their inputs."""
    weight = drawn(scheme, *shape, seed=seed)
    size = shape[-1] ** -0.5 / float(jnp.abs(dequantise(weight, jnp.float32)).mean())
    if scheme.factor:
        return dataclasses.replace(weight, factor=weight.factor * size)
    if scheme is MXFP4:
        seeded = np.random.default_rng(seed).integers(-2, 2, weight.scale.shape) + 127 - int(np.log2(shape[-1]) / 2)
        return dataclasses.replace(weight, scale=jnp.asarray(seeded, jnp.uint8))
    return dataclasses.replace(weight, scale=(weight.scale * size).astype(weight.scale.dtype))


def without(weight: Quantised, experts: np.ndarray) -> Quantised:
    """With scales that are no numbers, in these experts."""
    nan = jnp.asarray(255, jnp.uint8) if weight.scale.dtype == jnp.uint8 else jnp.asarray(jnp.nan, weight.scale.dtype)
    lost = jnp.asarray(experts).reshape(-1, *[1] * (weight.scale.ndim - 1))
    return dataclasses.replace(weight, scale=jnp.where(lost, nan, weight.scale))


def check(scheme: Scheme, T: int, H: int, inner: int, config: Config | None = None, clamp: Clamp | None = None) -> None:
    """Live tokens are as in the float32 reference; neither a dead or broken token nor an unused expert reaches others.

    A clamp comes with biases.
    """
    E, k = 4, 2
    rng = np.random.default_rng(T)
    gate_up, down = sized(scheme, E, 2, inner, H), sized(scheme, E, H, inner, seed=1)
    biases = tuple(jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((E, 2, inner), (E, H))) if clamp else None
    x = rng.normal(size=(T, H)).astype(jnp.bfloat16)
    ids = np.stack([rng.permutation(E - 1)[:k] for _ in range(T)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=(T, k)).astype(np.float32)
    live = np.arange(T) % 5 != 4
    sound = live.copy()
    if T > 2:
        sound[np.flatnonzero(live)[-1]] = False
    unused = np.arange(E) == E - 1
    parameters = ExpertWeights(without(gate_up, unused), without(down, unused), None, biases, clamp)
    # Two blocks, so that a block works on several tiles and the interpreter is not one of 132 threads.
    config = dataclasses.replace(config or configure_packed(T, E, k, H, inner), grid=2)
    dirty = jnp.asarray(np.where(sound[:, None], x, np.nan), jnp.bfloat16)
    got = mosaic.experts(dirty, parameters, weights, ids, jnp.asarray(live), config=config, interpret=detect_races())
    assert_no_races(got)
    got = np.asarray(got, np.float32)
    arrays = [dequantise(weight, jnp.bfloat16).astype(jnp.float32) for weight in (gate_up, down)]
    exact = ExpertWeights(*arrays, None, jax.tree.map(lambda a: a.astype(jnp.float32), biases), clamp)
    want = np.asarray(reference.experts(jnp.asarray(x, jnp.float32), exact, weights, ids, live))
    assert np.isnan(got[live & ~sound]).all()
    np.testing.assert_array_equal(got[~live], 0)
    assert np.abs(got[sound] - want[sound]).mean() <= 5e-3 * np.abs(want[sound]).mean()


@interpreted
@pytest.mark.parametrize(("scheme", "T"), [(INT4_G32, 5), (INT4_G32, 20), (NVFP4, 1), (MXFP4, 9)], ids=str)
def test_interpreted(scheme: Scheme, T: int):
    check(scheme, T, 256, 128)


@interpreted
@pytest.mark.parametrize(("rows", "T"), [(8, 17), (24, 60)])
def test_interpreted_with_narrow_slots(rows: int, T: int):
    """Of eight rows, and of a number that is no power of two; some experts need several."""
    with tuning.use(Tuning(packed_slot_rows=((100.0, rows),))):
        assert configure_packed(T, 4, 2, 256, 128).rows == rows
        check(INT4_G32, T, 256, 128)


@pytest.mark.parametrize(("rows", "teams"), [(8, 3), (16, 3), (24, 3), (32, 2)])
def test_three_teams_have_two_stages_each(rows: int, teams: int):
    """Of Moonlight's gate and up: where they have not, there are two teams."""
    tiles = packed_tiles(rows, 2048, 1408, gated=True)
    assert (tiles.depth, tiles.splits) == (256, teams)
    assert tiles.stages >= 6


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("clamp", [None, Clamp(1.702, 1.0)], ids=["plain", "clamp"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_interpreted_with_wide_slots(scheme: Scheme, clamp: Clamp | None):
    """A prefill's: two warpgroups that multiply, several slots an expert; sizes that are odd multiples of 64."""
    slots = max_slots(70, 2, 4, 64, all_tokens=False)
    check(scheme, 70, 192, 128, Config(64, slots, False, Tiles(64, 3, 2, 2), Tiles(128, 2, 1, 1), 2), clamp)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("tiles", [Tiles(256, 2, 2, 2, 2), Tiles(64, 4, 1, 2, 4), Tiles(128, 3, 1, 2, 3)], ids=str)
def test_interpreted_with_teams(tiles: Tiles):
    config = configure_packed(20, 4, 2, 256, 256)
    check(INT4_G32, 20, 256, 256, dataclasses.replace(config, up=tiles, down=tiles))


def mlp_by_oracle(x: jax.Array, gate_up: Quantised, down: Quantised) -> np.ndarray:
    weights = (dequantise(weight, jnp.bfloat16).astype(jnp.float32) for weight in (gate_up, down))
    return np.asarray(reference.swiglu(x.astype(jnp.float32), *weights))


@interpreted
@pytest.mark.parametrize(
    ("scheme", "T"),
    [
        (INT4_G32, 3),
        (NVFP4, 20),
        pytest.param(MXFP4, 1, marks=pytest.mark.slow),
        pytest.param(INT4_G32, 70, marks=pytest.mark.slow),
        pytest.param(NVFP4, 130, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_interpreted_mlps(scheme: Scheme, T: int):
    """Dense layers' and shared experts; a token that is NaN reaches no other."""
    H, inner = 256, 192
    gate_up, down = sized(scheme, 2, inner, H), sized(scheme, H, inner, seed=1)
    x = jax.random.normal(jax.random.key(T), (T, H), jnp.bfloat16)
    broken = (np.arange(T) == 1) & (T > 1)
    config = dataclasses.replace(configure_packed_mlp(T, H, inner), grid=2)
    dirty = jnp.where(broken[:, None], jnp.nan, x)
    (got,) = packed_mlp.mlp_parts(dirty, gate_up, down, config=config, interpret=detect_races())
    assert_no_races(got, kernels=2)
    assert got.shape == (config.slots * config.rows, H)
    sound, want = np.asarray(got, np.float32)[:T], mlp_by_oracle(x, gate_up, down)
    assert np.isnan(sound[broken]).all()
    assert np.abs(sound - want)[~broken].mean() <= 5e-3 * np.abs(want[~broken]).mean()


@interpreted
@pytest.mark.usefixtures("two_blocks")
@pytest.mark.parametrize("of_routed", [INT4_G32, pytest.param(None, marks=pytest.mark.slow)], ids=str)
def test_interpreted_beside_shared_experts(of_routed: Scheme | None):
    """Whatever the routed ones are, and with another width."""
    T, E, k, H, inner = 9, 4, 2, 128, 128
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.bfloat16)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=(T, k)).astype(np.float32)
    pair = [sized(of_routed or INT4_G32, E, 2, inner, H), sized(of_routed or INT4_G32, E, H, inner, seed=1)]
    pair = [dequantise(weight, jnp.bfloat16) if of_routed is None else weight for weight in pair]
    shared = sized(NVFP4, 2, 192, H, seed=2), sized(NVFP4, H, 192, seed=3)
    live = jnp.asarray(np.arange(T) != 4)
    got = mosaic.experts(x, ExpertWeights(*pair, shared), weights, ids, live, interpret=detect_races())
    assert_no_races(got, kernels=4)
    arrays = [dequantise(weight, jnp.bfloat16).astype(jnp.float32) for weight in pair]
    want = np.asarray(reference.experts(x.astype(jnp.float32), ExpertWeights(*arrays), weights, ids, live))
    want = np.where(live[:, None], want + mlp_by_oracle(x, *shared), 0)
    assert np.abs(np.asarray(got, np.float32) - want).mean() <= 5e-3 * np.abs(want).mean()


@pytest.mark.parametrize("pitch", [32, 64, 128])
@pytest.mark.parametrize("ordered", [False, True])
def test_threads_read_what_their_wgmma_multiplies(pitch: int, ordered: bool):
    """A warpgroup's words and scales, put where PTX has the fragments of A, are the tile in the kernels' order."""
    rng = np.random.default_rng(pitch)
    nibbles = rng.integers(0, 16, (UNIT, 2 * pitch), np.uint8)
    rows = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).reshape(UNIT, pitch // 16, 16)
    # The swizzle of TMA: 16 bytes change places by three bits of the address above 128.
    address = np.arange(UNIT * pitch).reshape(rows.shape)
    memory = np.zeros(UNIT * pitch, np.uint8)
    memory[address ^ (address >> 7 & (pitch // 16 - 1)) << 4] = rows
    scale = rng.integers(1, 100, (2 * pitch // 32, UNIT)).astype(np.float32)
    want = VALUES["int4"][nibbles] * np.repeat(scale, 32, axis=0).T
    want = np.asarray(fragment_order(want))
    want = np.asarray(fragment_order(want.T)).T if ordered else want
    thread = np.arange(128)
    for unit in range(2 * pitch // UNIT):
        got = np.full((UNIT, UNIT), np.nan)
        for half in range(2):
            row = packed_codes.row_of(thread, half, ordered=ordered)
            start = packed_codes.code_offset(row, thread, unit, pitch)
            own = scale.reshape(-1)[packed_codes.scale_index(row, thread, unit, 32)]
            words = memory[start[:, None] + np.arange(8)].view(np.uint32)
            for w in range(2):
                for i in range(4):
                    for j in range(2):
                        value = VALUES["int4"][words[:, w] >> (4 * i + 16 * j) & 15] * own
                        # PTX ISA, "Register Fragments for wgmma.m64nNk16", A.
                        step, upper = divmod(4 * w + i, 2)
                        place = thread // 32 * 16 + thread % 32 // 4 + 8 * half
                        got[place, 16 * step + 8 * upper + thread % 4 * 2 + j] = value
        np.testing.assert_array_equal(got, want[:, unit * UNIT : (unit + 1) * UNIT])


def test_threads_that_copy_tokens_order_their_columns():
    """The halves of eight pairs of neighbours are sixteen columns in the kernels' order."""
    row = np.arange(320, dtype=np.uint16)
    places = packed_codes.pairs_of(np.arange(len(row) // 16))[:, None] + np.array(packed_codes.PAIRS)
    pairs = row.view(np.uint32)[places // 4]
    got = np.concatenate([pairs & 0xFFFF, pairs >> 16], axis=1).reshape(-1)
    np.testing.assert_array_equal(got, fragment_order(jnp.asarray(row, jnp.int32)))
    assert (places % 4 == 0).all()


@interpreted
@pytest.mark.slow
def test_interpreted_with_tokens_ordered_as_they_are_copied():
    """By the kernel that makes the tables."""
    with tuning.use(Tuning(copying_tokens=128)):
        check(INT4_G32, 12, 128, 128)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "model", "T"), [
    *full((INT4_G32, "moonlight", 32)), (INT4_G32, "kimi-k2", 1), *full((INT4_G32, "kimi-k2", 2048)),
    (NVFP4, "kimi-k2", 32), *full((MXFP4, "gpt-oss-20b", 1)), (MXFP4, "gpt-oss-20b", 2048),
], ids=str)  # fmt: skip
def test_lowers_for_the_gpu(scheme: Scheme, model: str, T: int):
    """No weight is turned into numbers outside of the kernels."""
    H, E, k, inner = SIZES[model]
    S = jax.ShapeDtypeStruct
    pair = [Quantised(**scheme.arrays(shape), scheme=scheme) for shape in ((E, 2, inner, H), (E, H, inner))]
    special = H == 2880
    biases = (S((E, 2, inner), jnp.bfloat16), S((E, H), jnp.bfloat16)) if special else None
    parameters = ExpertWeights(*pair, biases=biases, clamp=Clamp() if special else None)
    routes = S((T, k), jnp.float32), S((T, k), jnp.int32), S((T,), jnp.bool_)
    traced = jax.jit(mosaic.experts).trace(S((T, H), jnp.bfloat16), parameters, *routes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") >= 3
    assert f"{E}x2x{inner}x{H}xbf16" not in text
    assert "dot_general" not in text


@pytest.mark.slow
@pytest.mark.parametrize("model", ["moonlight", "kimi-k2"])
def test_no_kernel_of_xla_orders_the_tokens_that_are_copied(model: str):
    """Also where a row is no whole number of a warpgroup's sixteens."""
    H, E, k, inner = SIZES[model]
    S, T = jax.ShapeDtypeStruct, 32
    pair = [Quantised(**INT4_G32.arrays(shape), scheme=INT4_G32) for shape in ((E, 2, inner, H), (E, H, inner))]
    routes = S((T, k), jnp.float32), S((T, k), jnp.int32), S((T,), jnp.bool_)
    with tuning.use(Tuning(copying_tokens=128)):
        # A call traced under one tuning must not serve another.
        jax.clear_caches()
        traced = jax.jit(mosaic.experts).trace(S((T, H), jnp.bfloat16), ExpertWeights(*pair), *routes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3
    assert "stablehlo.transpose" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "H", "inner", "T"), [
    *full(*((NVFP4, *MLPS[i], T) for i, T in ((2, 1), (3, 32), (4, 128), (5, 8)))),
    (NVFP4, *MLPS[2], 2048), (INT4_G32, *MLPS[0], 32), (MXFP4, *MLPS[1], 512),
], ids=str)  # fmt: skip
def test_mlps_lower_for_the_gpu(scheme: Scheme, H: int, inner: int, T: int):
    S = jax.ShapeDtypeStruct
    pair = [Quantised(**scheme.arrays(shape), scheme=scheme) for shape in ((2, inner, H), (H, inner))]
    traced = jax.jit(quantised_mlp.mlp).trace(S((T, H), jnp.bfloat16), *pair)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    assert f"2x{inner}x{H}xbf16" not in text
    assert "dot_general" not in text


@pytest.mark.parametrize(("H", "inner"), MLPS)
@pytest.mark.parametrize("T", [1, 32, 128, 2048])
def test_tiles_divide_mlps(T: int, H: int, inner: int):
    """And give every multiprocessor a tile of `down` where halving them can."""
    config = configure_packed_mlp(T, H, inner)
    assert config.slots * config.rows >= T
    for t, rows, columns in ((config.up, inner, H), (config.down, H, inner)):
        assert rows % (t.consumers * UNIT) == 0
        assert columns % t.depth == 0
        assert t.stages >= 3
    assert config.slots * H >= config.grid * config.down.consumers * 2 * UNIT or config.down.blocks == 1


@pytest.mark.parametrize(("H", "E", "k", "inner"), SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("T", [1, 8, 32, 128, 512, 2048, 8192])
def test_tiles_divide_the_weights(T: int, H: int, E: int, k: int, inner: int):
    config = configure_packed(T, E, k, H, inner)
    for t, rows, columns in ((config.up, inner, H), (config.down, H, inner)):
        assert rows % (t.consumers * UNIT) == 0
        assert columns % t.depth == 0
        assert t.stages >= 3
