"""The kernels of experts and MLPs in FP8 on the GPU, against `dequantise` and float32 on the same codes of activations."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.harness.models import mesh_of_one, random_config
from jaxspec.config import Settings
from jaxspec.engine.buckets import bucket_table
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import quantised, random_params
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams
from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.moe import api, fp8_matmul, mosaic, one_token, reference
from pallas_kernels.moe.dispatch import dispatch
from pallas_kernels.moe.fp8_config import SCHEMES, configure_fp8
from pallas_kernels.moe.reference import swiglu
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.slots import SlotTables
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant import activations
from pallas_kernels.quant.activations import Codes
from pallas_kernels.quant.reference import dequantise
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL, Scheme
from pallas_kernels.quant.values import Quantised
from pallas_kernels.tuning import Tuning

pytestmark = pytest.mark.gpu

# Hidden, experts, top-k, inner. DeepSeek-V3 with fewer experts.
SHAPES = {"moonlight": LAYERS["moonlight"][:4], "deepseek-v3": (7168, 24, 8, 2048), "odd": (384, 8, 2, 640)}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def weight(scheme: Scheme, shape: tuple[int, ...], seed: int, positive: bool = False) -> Quantised:
    """All codes that are numbers, and scales such that products have about the size of their inputs."""
    bits, scales = jax.random.split(jax.random.key(seed, impl="rbg"))
    codes = jax.random.bits(bits, shape, jnp.uint8)
    codes = jnp.where(codes & 0x7F == 0x7F, codes - 1, codes) & (0x7F if positive else 0xFF)
    size = shape[-1] ** -0.5 / (5000 if positive else 120)
    scale = jax.random.uniform(scales, scheme.scale_shape(shape), minval=0.5 * size, maxval=2 * size)
    return Quantised(jax.lax.bitcast_convert_type(codes, scheme.codes), scale, scheme)


def experts_of(scheme: Scheme, shape: str) -> tuple[Quantised, Quantised]:
    H, E, _, inner = SHAPES[shape]
    return weight(scheme, (E, 2, inner, H), 1), weight(scheme, (E, H, inner), 2)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed, impl="rbg"), shape, jnp.bfloat16)


def routes(T: int, E: int, k: int) -> np.ndarray:
    rng = np.random.default_rng(T)
    return np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)


def ratio(got: jax.Array, want: jax.Array) -> float:
    """Of the mean error and the mean reference."""
    return float(jnp.abs(got.astype(jnp.float32) - want).mean() / jnp.abs(want).mean())


def in_bf16(array: jax.Array) -> jax.Array:
    """Rounded as results are: that alone is a ratio of 1.4e-3."""
    return array.astype(jnp.bfloat16).astype(jnp.float32)


@jax.jit
def joined(tokens: jax.Array, gate_up: Quantised, e: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        one = dequantise(jax.tree.map(lambda a: a[e], gate_up), jnp.float32)
        gate, up = jnp.einsum("th,gih->gti", tokens, one)
    return jax.nn.silu(gate) * up


@jax.jit
def projected(tokens: jax.Array, down: Quantised, e: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return tokens @ dequantise(jax.tree.map(lambda a: a[e], down), jnp.float32).T


def matmuls(
    x: jax.Array, ids: np.ndarray, gate_up: Quantised, down: Quantised
) -> tuple[SlotTables, Codes, Codes, jax.Array]:
    """Tables, the slots' tokens, and what the two kernels make of them."""
    (T, k), (E, _, inner, H) = ids.shape, gate_up.shape
    config = configure_fp8(T, E, k, H, inner)
    tables = jax.jit(
        lambda ids: dispatch(ids, jnp.ones(T, bool), E, config.rows, config.slots, all_tokens=config.all_tokens)
    )(ids)
    tokens = jax.jit(lambda x, tables: mosaic.slot_codes(x, tables, config))(x, tables)
    h = jax.jit(lambda *a: fp8_matmul.up_matmul(*a, config))(tokens, gate_up, tables)
    return tables, tokens, h, jax.jit(lambda *a: fp8_matmul.down_matmul(*a, config))(h, down, tables)


def of_slot(codes: Codes, slot: int, rows: np.ndarray) -> jax.Array:
    """What the codes of a slot's rows stand for."""
    return activations.dequantise(Codes(codes.codes[slot][rows], codes.scale[slot][:, rows]))


def check_matmuls(x: jax.Array, ids: np.ndarray, gate_up: Quantised, down: Quantised) -> None:
    """Each of the two by itself, in slots of the first, a middle and the last expert."""
    tables, tokens, h, y = matmuls(x, ids, gate_up, down)
    slots, rows = h.codes.shape[:2]
    place = np.asarray(tables.place)[: len(x), : ids.shape[1]].reshape(-1)
    used = np.zeros((slots, rows), bool)
    used.reshape(-1)[place] = True
    n = int(tables.num_slots[0])
    for slot in sorted({0, n // 2, n - 1}):
        mine, e = np.flatnonzero(used[slot]), tables.expert[slot]
        inside = of_slot(h, slot, mine)
        exact = joined(of_slot(tokens, 0 if len(tokens.codes) == 1 else slot, mine), gate_up, e)
        want = activations.quantise(exact)
        np.testing.assert_allclose(h.scale[slot][:, mine], want.scale, rtol=2e-3)
        # As far as codes next to each other are apart, both are as near to the exact value.
        assert ratio(inside, exact) < 1.03 * ratio(activations.dequantise(want), exact)
        assert ratio(inside, activations.dequantise(want)) < 4e-3
        assert ratio(y[slot][mine], in_bf16(projected(inside, down, e))) < 1e-3


@pytest.mark.parametrize("T", [5, 32, 2048])
@pytest.mark.parametrize(("scheme", "shape"), [
    (FP8_BLOCK, "moonlight"), (FP8_CHANNEL, "moonlight"), (FP8_BLOCK, "odd"), (FP8_BLOCK, "deepseek-v3"),
], ids=str)  # fmt: skip
def test_products(scheme: Scheme, shape: str, T: int):
    H, E, k, _ = SHAPES[shape]
    check_matmuls(normal(T, T, H), routes(T, E, k), *experts_of(scheme, shape))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_in_slots_of_24_rows(scheme: Scheme):
    H, E, k, _ = SHAPES["moonlight"]
    with tuning.use(dataclasses.replace(tuning.current(), slot_rows=((24.0, 24),))):
        check_matmuls(normal(128, 128, H), routes(128, E, k), *experts_of(scheme, "moonlight"))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_fp8_long_sums(scheme: Scheme):
    """Positive numbers only: 14 bits, which the tensor cores have, would lose every number after the first thousands.

    The tensor cores take sums of 128 products, and cut the later ones of them to what the sum so far has bits for: about a
    thousandth of positive numbers, however many sums of 128 there are. An H100 lost 0.11 %.
    """
    H, inner, T = 7168, 2048, 32
    gate_up, down = weight(scheme, (2, 2, inner, H), 1, True), weight(scheme, (2, H, inner), 2, True)
    x = jnp.abs(normal(0, T, H)) / 10
    tables, tokens, h, y = matmuls(x, np.arange(T, dtype=np.int32)[:, None] % 2, gate_up, down)
    mine, e = np.arange(16), tables.expert[0]
    inside = of_slot(h, 0, mine)
    up = joined(of_slot(tokens, 0, mine), gate_up, e)
    # silu(gate) * up of large numbers is a product of two sums.
    for got, want, sums in ((inside, up, 2), (y[0][mine].astype(jnp.float32), projected(inside, down, e), 1)):
        assert abs(float((got - want).mean() / want.mean())) < sums * 2e-3


def test_rows_do_not_depend_on_their_batch_fp8():
    """Neighbours a million times as large, or NaN, change no bit of a token: in the same slot and with the same codes."""
    H, E, k, _ = SHAPES["moonlight"]
    pair = experts_of(FP8_CHANNEL, "moonlight")
    for T in (4, 32):
        ids, x = np.tile(routes(1, E, k), (T, 1)), normal(T, T, H)
        results = []
        for factor in (1.0, 1e6, np.nan):
            beside = jnp.where(jnp.arange(T)[:, None] == 1, x, x * factor)
            out = jax.jit(mosaic.experts)(
                beside, ExpertWeights(*pair), jnp.ones((T, k), jnp.float32), jnp.asarray(ids), jnp.ones(T, bool)
            )
            results.append(np.asarray(out[1], np.float32))
        assert np.isfinite(results[0]).all()
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("T", [5, 40, 2048])
def test_nan_stays_in_its_row_fp8(T: int):
    """One number that is none, in one group of one token."""
    H, E, k, _ = SHAPES["moonlight"]
    pair = experts_of(FP8_BLOCK, "moonlight")
    for bad in (np.nan, np.inf):
        x = normal(T, T, H).at[3, 700].set(bad)
        ids = jnp.asarray(np.tile(routes(1, E, k), (T, 1)))
        out = jax.jit(mosaic.experts)(x, ExpertWeights(*pair), jnp.ones((T, k), jnp.float32), ids, jnp.ones(T, bool))
        np.testing.assert_array_equal(np.isfinite(np.asarray(out, np.float32)).all(axis=1), np.arange(T) != 3)
        assert np.isnan(np.asarray(out[3], np.float32)).all()


def test_compiled_references_round_tokens_too():
    """XLA leaves out a conversion and its way back where nothing keeps them apart."""
    x = normal(1, 5, 2048).astype(jnp.float32)
    rounded = activations.dequantise(activations.quantise(x))
    assert ratio(rounded, x) > 0.01
    assert ratio(jax.jit(lambda x: activations.dequantise(activations.quantise(x)))(x), rounded) < 1e-6


@pytest.mark.parametrize(("shape", "shared_inner"), [("moonlight", 2 * 1408), ("moonlight", 0), ("deepseek-v3", 2048)])
def test_one_token_fp8(shape: str, shared_inner: int):
    """By its own kernel, from logits and from a choice: as the reference on the same codes of the token, which is not
    the other kernels' to the bit; the experts that it did not choose have no numbers."""
    H, E, k, _ = SHAPES[shape]
    gate_up, down = experts_of(FP8_BLOCK, shape)
    sizes = [(2, shared_inner, H), (H, shared_inner)] if shared_inner else []
    shared = tuple(weight(FP8_BLOCK, size, 3 + i) for i, size in enumerate(sizes)) or None
    x, residual, alive = normal(1, 1, H), normal(2, 1, H), jnp.ones(1, bool)
    routing = Routing(k, 1, 1, True, 2.0)
    logits, bias = normal(3, 1, E).astype(jnp.float32), jnp.zeros(E)
    weights, ids = reference.route_sigmoid(logits, bias, **dataclasses.asdict(routing))
    whole = ExpertWeights(gate_up, down, shared)
    chosen = jnp.isin(jnp.arange(E), ids)[:, None, None]
    holes = (
        dataclasses.replace(gate_up, scale=jnp.where(chosen[..., None], gate_up.scale, jnp.nan)),
        dataclasses.replace(down, scale=jnp.where(chosen, down.scale, jnp.nan)),
    )
    parameters = dataclasses.replace(whole, gate_up=holes[0], down=holes[1])
    with use(Backends(moe="mosaic")), tuning.use(Tuning(one_token_experts=True, one_token_fp8=True)):
        assert one_token.supports(x, parameters, k)
        options = dataclasses.asdict(routing)
        run = jax.jit(lambda x, p, *a: api.routed_experts(x, p, *a, residual, **options))
        routed = [run(x, parameters, logits, bias, alive) for _ in range(3)]
        given = jax.jit(api.experts)(x, parameters, weights, ids, alive)
        poisoned = run(x.at[0, H // 2].set(jnp.nan), parameters, logits, bias, alive)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(reference.experts, w8a8=True))(
            x.astype(jnp.float32), whole, weights, ids, alive
        )
    assert all((each == routed[0]).all() for each in routed)
    assert ratio(given, in_bf16(want)) < 4e-3
    assert ratio(routed[0], in_bf16(want + residual.astype(jnp.float32))) < 4e-3
    assert jnp.isnan(poisoned).all()


def lost(part: Quantised, expert: int) -> Quantised:
    """With codes and scales that are no numbers, in one expert."""
    bits = jax.lax.bitcast_convert_type(part.codes, jnp.uint8).at[expert].set(0x7F)
    codes = jax.lax.bitcast_convert_type(bits, part.codes.dtype)
    return dataclasses.replace(part, codes=codes, scale=part.scale.at[expert].set(jnp.nan))


@pytest.mark.parametrize("T", [1, 9, 130, 600])
@pytest.mark.parametrize(("scheme", "H", "inner"), [
    (FP8_BLOCK, 2048, 11264), (FP8_CHANNEL, 2048, 2816), (FP8_BLOCK, 7168, 2048),
], ids=str)  # fmt: skip
def test_mlps(scheme: Scheme, H: int, inner: int, T: int):
    """Dense layers' and shared experts; a token that is NaN reaches no other."""
    gate_up, down = weight(scheme, (2, inner, H), 1), weight(scheme, (H, inner), 2)
    x = normal(T, T, H)
    dirty = x.at[1].set(jnp.nan) if T > 1 else x
    with use(Backends()) as chosen:
        got = jax.jit(api.mlp)(dirty, gate_up, down)
    assert chosen["mlp"] == {"mosaic"}
    one = (jax.tree.map(lambda array: array[None], part) for part in (gate_up, down))
    h = joined(activations.dequantise(activations.quantise(x)), next(one), jnp.int32(0))
    want = projected(activations.dequantise(activations.quantise(h)), next(one), jnp.int32(0))
    sound = (np.arange(T) != 1) | (T == 1)
    assert np.isnan(np.asarray(got, np.float32)[~sound]).all()
    assert ratio(got[sound], want[sound]) < 6e-3


@pytest.mark.parametrize(
    ("T", "quantised"), [(1, False), (8, False), (9, False), (300, False), (1, True), (8, True), (9, True)]
)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_experts(scheme: Scheme, T: int, quantised: bool):
    """Whole calls beside shared experts in bfloat16 or FP8; dead tokens are NaN and give 0, a live one that is NaN reaches no
    other, an expert that is nobody's is NaN.
    """
    H, E, k, inner = SHAPES["odd"]
    gate_up, down = experts_of(scheme, "odd")
    if quantised:
        shared = weight(scheme, (2, 2 * inner, H), 7), weight(scheme, (H, 2 * inner), 8)
    else:
        shared = normal(7, 2, inner, H) * H**-0.5, normal(8, H, inner) / 20
    ids, live = routes(T, E - 1, k), np.arange(T) % 5 != 4
    weights = np.random.default_rng(T).uniform(0.1, 1, (T, k)).astype(np.float32)
    sound = live.copy()
    if T > 2:
        sound[np.flatnonzero(live)[-1]] = False
    x = normal(T, T, H)
    dirty = jnp.where(sound[:, None], x, jnp.nan)
    parameters = ExpertWeights(lost(gate_up, E - 1), lost(down, E - 1), shared)
    with use(Backends(moe="mosaic")):
        got = np.asarray(jax.jit(api.experts)(dirty, parameters, weights, ids, live), np.float32)
    want = np.zeros((T, H), np.float32)
    tokens = activations.dequantise(activations.quantise(x))

    def of(gate_up: Quantised, down: Quantised, e: int) -> np.ndarray:
        h = joined(tokens, gate_up, jnp.int32(e))
        return np.asarray(in_bf16(projected(activations.dequantise(activations.quantise(h)), down, jnp.int32(e))))

    for e in range(E - 1):
        want += np.where(ids == e, weights, 0).sum(axis=1)[:, None] * of(gate_up, down, e)
    if quantised:
        want += of(*(jax.tree.map(lambda a: a[None], each) for each in shared), 0)
    else:
        with jax.default_matmul_precision("highest"):
            want += np.asarray(swiglu(x.astype(jnp.float32), *(w.astype(jnp.float32) for w in shared)))
    np.testing.assert_array_equal(got[~live], 0)
    assert np.isnan(got[live & ~sound]).all()
    # One token's hidden values that lie next to a code's edge change by a code: 6e-3 of one, 2e-3 of hundreds.
    assert ratio(jnp.asarray(got[sound]), jnp.asarray(want[sound])) < (1e-2 if T < 8 else 5e-3)


def scored(model: CausalLM, params: dict) -> tuple[np.ndarray, dict[str, set[str]]]:
    """Log-probabilities of prompts by a whole engine, which decodes beside them, and the kernels that ran."""
    settings = Settings(
        max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64, num_pages=40, dtype="bfloat16", on_gpu=True
    )
    # One row that decodes, and what holds every plan; prompts are scored in full ones.
    smallest, *_, largest = (bucket for bucket in bucket_table(settings) if bucket.variant == "full")
    runner = Runner(model, params, settings, mesh_of_one(), buckets=(smallest, largest))
    runner.warm_up()
    engine = Engine(runner, vocab_size=model.config.vocab_size, eos_token_ids=())
    rng = np.random.default_rng(0)
    for i, length in enumerate((40, 3, 100)):
        ids = rng.integers(0, model.config.vocab_size, length).tolist()
        engine.add(Request(f"{i}", ids, SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=0)))
    found: dict[str, list[float]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.request_id, []).extend(score.logprob for score in output.prompt_logprobs or ())
    return np.concatenate([found[name] for name in sorted(found)]), runner.kernels


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_engine_steps(scheme: Scheme):
    """Prompts and decoding rows through a dense and a mixture layer with shared experts, all in FP8, against bfloat16 with
    the same values.
    """
    hf = random_config("moonlight", 2) | {"vocab_size": 1024, "num_nextn_predict_layers": 0, "n_routed_experts": 16}
    config = read_config(hf)
    owners = ("layers", 0, "mlp"), ("layers", 1, "mlp"), ("layers", 1, "mlp", "shared")
    names = [(*at, name) for at in owners for name in ("gate_up", "down")]
    model = quantised(CausalLM(config, jnp.bfloat16), dict.fromkeys(names, scheme))
    params = random_params(model, mesh_of_one(), seed=3)
    plain = jax.tree.map(lambda array: array, params)
    for *at, name in names:
        owner = functools.reduce(operator.getitem, at, plain)
        owner[name] = dequantise(Quantised(**owner[name], scheme=scheme), jnp.bfloat16)
    got, kernels = scored(model, params)
    assert kernels["moe"] == kernels["mlp"] == {"mosaic"}
    want, _ = scored(CausalLM(config, jnp.bfloat16), plain)
    assert np.isfinite(got).all()
    assert 0 < np.abs(got - want).mean() < 0.1
