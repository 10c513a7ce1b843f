"""The kernels of experts with codes of four bits on the GPU, against `dequantise` and float32 on the same codes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.moe import api, mosaic, one_token, packed_matmul, reference
from pallas_kernels.moe.activation import Clamp
from pallas_kernels.moe.dispatch import dispatch
from pallas_kernels.moe.packed_codes import SCHEMES, fragment_order
from pallas_kernels.moe.packed_config import configure_packed
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.reference import dequantise
from pallas_kernels.quant.schemes import INT4_G32, MXFP4, NVFP4, Scheme
from pallas_kernels.quant.values import Quantised

pytestmark = pytest.mark.gpu

# Hidden, experts, top-k, inner. K2 with fewer experts; of odd multiples of 64, as gpt-oss has.
SHAPES = {"moonlight": LAYERS["moonlight"][:4], "kimi-k2": (7168, 24, 8, 2048), "odd": (320, 8, 2, 448)}


@functools.lru_cache(maxsize=4)  # those of one test: workers share a GPU
def weight(scheme: Scheme, shape: tuple[int, ...], seed: int) -> Quantised:
    """All codes, and scales such that products have about the size of their inputs."""
    bits, scales, factors = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    codes = jax.random.bits(bits, scheme.codes_shape(shape), jnp.uint8)
    draw = functools.partial(jax.random.uniform, scales, scheme.scale_shape(shape))
    size, factor = shape[-1] ** -0.5 / 4, None
    if scheme is MXFP4:
        exponent = jnp.floor(draw(minval=-2.0, maxval=2.0) + jnp.log2(size)) + 127
        return Quantised(codes, exponent.astype(jnp.uint8), scheme)
    if scheme.factor:
        factor = jax.random.uniform(factors, shape[:-2], minval=0.5, maxval=2.0) * size / 100
        size = 100.0
    return Quantised(codes, (draw(minval=0.5, maxval=2.0) * size).astype(scheme.scale), scheme, factor)


def experts_of(scheme: Scheme, shape: str) -> tuple[Quantised, Quantised]:
    H, E, _, inner = SHAPES[shape]
    return weight(scheme, (E, 2, inner, H), 1), weight(scheme, (E, H, inner), 2)


def numbers(part: Quantised) -> jax.Array:
    """Rounded once, as the tensor cores get them, where a code times its scale is not bfloat16 anyway."""
    dtype = jnp.bfloat16 if part.scheme is INT4_G32 else jnp.float32
    return dequantise(part, dtype).astype(jnp.float32)


def part_of(weight: Quantised, expert: jax.Array) -> Quantised:
    return jax.tree.map(lambda array: array[expert], weight)


def routes(T: int, E: int, k: int) -> np.ndarray:
    rng = np.random.default_rng(T)
    return np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)


def ratio(got: jax.Array, want: jax.Array) -> float:
    """Of the mean error and the mean reference, which is rounded to bfloat16 too: that alone is a ratio of 1.4e-3."""
    want = want.astype(jnp.bfloat16).astype(jnp.float32)
    return float(jnp.abs(got.astype(jnp.float32) - want).mean() / jnp.abs(want).mean())


@pytest.mark.parametrize("T", [5, 32, 2048])
@pytest.mark.parametrize(("scheme", "shape"), [(s, "moonlight") for s in SCHEMES] + [(s, "odd") for s in SCHEMES] + [
    (INT4_G32, "kimi-k2"),
], ids=str)  # fmt: skip
def test_products(scheme: Scheme, shape: str, T: int):
    check_products(scheme, shape, T)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_in_slots_of_24_rows(scheme: Scheme):
    """Three teams for gate and up, two for down."""
    with tuning.use(dataclasses.replace(tuning.current(), packed_slot_rows=((24.0, 24),))):
        check_products(scheme, "moonlight", 128)


def check_products(scheme: Scheme, shape: str, T: int) -> None:
    """Each of the two matmuls by itself, in slots of the first, a middle and the last expert."""
    H, E, k, inner = SHAPES[shape]
    config = configure_packed(T, E, k, H, inner)
    gate_up, down = experts_of(scheme, shape)
    x = jax.random.normal(jax.random.key(T, impl="rbg"), (T, H), jnp.bfloat16)
    cut = E, config.rows, config.slots
    run = jax.jit(lambda ids: dispatch(ids, jnp.ones(T, bool), *cut, all_tokens=config.all_tokens))
    tables = run(routes(T, E, k))
    slots_x = mosaic.slot_rows(x, tables, config)
    h = jax.jit(lambda *a: packed_matmul.up_matmul(*a, config))(fragment_order(slots_x), gate_up, tables)
    y = jax.jit(lambda *a: packed_matmul.down_matmul(*a, config))(h, down, tables)
    back = np.argsort(np.asarray(fragment_order(jnp.arange(float(inner)))))
    used = np.zeros((config.slots, config.rows), bool)
    used.reshape(-1)[np.asarray(tables.place).reshape(-1)] = True
    n = int(tables.num_slots[0])
    for slot in {0, n // 2, n - 1}:
        mine_up, mine_down = (part_of(part, tables.expert[slot]) for part in (gate_up, down))
        mine = np.flatnonzero(used[slot])
        tokens = slots_x[0 if config.all_tokens else slot][mine].astype(jnp.float32)
        inside = h[slot][mine][:, back].astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            gate, up = jnp.einsum("th,gih->gti", tokens, numbers(mine_up))
            want = inside @ numbers(mine_down).T
        assert ratio(inside, jax.nn.silu(gate) * up) < 1e-3
        assert ratio(y[slot][mine], want) < 1e-3


@pytest.mark.parametrize("T", [1, 9, 130, 600])
@pytest.mark.parametrize(("scheme", "H", "inner"), [
    (INT4_G32, 2048, 11264), (MXFP4, 2048, 2816), (NVFP4, 7168, 2048), (NVFP4, 7168, 2304), (INT4_G32, 320, 448),
], ids=str)  # fmt: skip
def test_mlps(scheme: Scheme, H: int, inner: int, T: int):
    """Dense layers' and shared experts; a token that is NaN reaches no other."""
    gate_up, down = weight(scheme, (2, inner, H), 1), weight(scheme, (H, inner), 2)
    x = jax.random.normal(jax.random.key(T, impl="rbg"), (T, H), jnp.bfloat16)
    broken = (np.arange(T) == 1) & (T > 1)
    with use(Backends()) as chosen:
        got = jax.jit(api.mlp)(jnp.where(broken[:, None], jnp.nan, x), gate_up, down)
    assert chosen["mlp"] == {"mosaic"}
    with jax.default_matmul_precision("highest"):
        want = jax.jit(reference.swiglu)(x.astype(jnp.float32), numbers(gate_up), numbers(down))
    assert np.isnan(np.asarray(got, np.float32)[broken]).all()
    assert ratio(got[~broken], want[~broken]) < 5e-3


@jax.jit
def exact(x: jax.Array, parameters: ExpertWeights, weights: jax.Array, ids: jax.Array, live: jax.Array) -> jax.Array:
    """The reference in float32, one expert after another: all together would not fit into memory."""

    def add(e: jax.Array, total: jax.Array) -> jax.Array:
        mine = jnp.where(ids == e, weights, 0.0).sum(axis=1, keepdims=True)
        one = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, e), dataclasses.replace(parameters, shared=None))
        one = dataclasses.replace(one, gate_up=numbers(one.gate_up), down=numbers(one.down))
        return total + reference.experts(x, one, mine, jnp.zeros_like(ids[:, :1]), live)

    out = jax.lax.fori_loop(0, parameters.gate_up.shape[0], add, jnp.zeros(x.shape, jnp.float32))
    if parameters.shared is None:
        return out
    return out + reference.swiglu(x, *(w.astype(jnp.float32) for w in parameters.shared))


@pytest.mark.parametrize("T", [1, 8, 9, 300])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_experts(scheme: Scheme, special: bool, T: int):
    """Whole calls; dead tokens are NaN and give 0, a live one that is NaN reaches no other, unused experts' scales are no
    numbers. Special are gpt-oss's: biases and a clamp; the others have shared experts.
    """
    H, E, k, inner = SHAPES["odd"]
    gate_up, down = experts_of(scheme, "odd")
    S = jax.random.normal
    biases = (
        S(jax.random.key(5, impl="rbg"), (E, 2, inner), jnp.bfloat16),
        S(jax.random.key(6, impl="rbg"), (E, H), jnp.bfloat16),
    )
    shared = (
        S(jax.random.key(7, impl="rbg"), (2, inner, H), jnp.bfloat16) * H**-0.5,
        S(jax.random.key(8, impl="rbg"), (H, inner), jnp.bfloat16) / 20,
    )
    beside = {"biases": biases, "clamp": Clamp(limit=1.0)} if special else {"shared": shared}
    # The last expert is nobody's.
    ids, live = routes(T, E - 1, k), np.arange(T) % 5 != 4
    weights = np.random.default_rng(T).uniform(0.1, 1, (T, k)).astype(np.float32)
    x = np.random.default_rng(T).normal(size=(T, H)).astype(jnp.bfloat16)
    sound = live.copy()
    if T > 2:
        sound[np.flatnonzero(live)[-1]] = False
    dirty = jnp.asarray(np.where(sound[:, None], x, np.nan), jnp.bfloat16)

    def poisoned(part: Quantised) -> Quantised:
        nan = np.full(1, 255, np.uint8) if part.scale.dtype == jnp.uint8 else np.full(1, np.nan, part.scale.dtype)
        return dataclasses.replace(part, scale=part.scale.at[E - 1].set(nan[0]))

    with use(Backends(moe="mosaic")):
        got = jax.jit(api.experts)(
            dirty, ExpertWeights(poisoned(gate_up), poisoned(down), **beside), weights, ids, live
        )
    got = np.asarray(got, np.float32)
    with jax.default_matmul_precision("highest"):
        want = exact(jnp.asarray(x, jnp.float32), ExpertWeights(gate_up, down, **beside), weights, ids, live)
    np.testing.assert_array_equal(got[~live], 0)
    assert np.isnan(got[live & ~sound]).all()
    assert ratio(jnp.asarray(got[sound]), want[sound]) < 5e-3


@pytest.mark.parametrize(("shape", "shared_inner"), [("moonlight", 2 * 1408), ("moonlight", 0), ("kimi-k2", 2048)])
def test_one_token_int4(shape: str, shared_inner: int):
    """By its own kernel, from logits and from a choice, beside bfloat16's shared experts; unused experts have no numbers."""
    H, E, k, _ = SHAPES[shape]
    gate_up, down = experts_of(INT4_G32, shape)
    sizes = [(2, shared_inner, H), (H, shared_inner)] if shared_inner else []
    keys = jax.random.split(jax.random.key(4, impl="rbg"), 5)
    shared = tuple(
        jax.random.normal(key, size, jnp.bfloat16) * size[-1] ** -0.5 for key, size in zip(keys, sizes, strict=False)
    )
    x, residual = (jax.random.normal(key, (1, H), jnp.bfloat16) for key in keys[2:4])
    logits, bias, alive = jax.random.normal(keys[4], (1, E)), jnp.zeros(E), jnp.ones(1, bool)
    routing = Routing(k, 1, 1, True, 2.0)
    weights, ids = reference.route_sigmoid(logits, bias, **dataclasses.asdict(routing))
    chosen = jnp.isin(jnp.arange(E), ids)[:, None, None]
    holes = (
        dataclasses.replace(gate_up, scale=jnp.where(chosen[..., None], gate_up.scale, jnp.nan)),
        dataclasses.replace(down, scale=jnp.where(chosen, down.scale, jnp.nan)),
    )
    parameters = ExpertWeights(*holes, shared or None)
    with use(Backends(moe="mosaic")), tuning.use(tuning.Tuning(one_token_experts=True, one_token_int4=True)):
        assert one_token.supports(x, parameters, k)
        options = dataclasses.asdict(routing)
        run = jax.jit(lambda x, p, *a: api.routed_experts(x, p, *a, residual, **options))
        routed = [run(x, parameters, logits, bias, alive) for _ in range(3)]
        given = jax.jit(api.experts)(x, parameters, weights, ids, alive)
        poisoned = run(x.at[0, H // 2].set(jnp.nan), parameters, logits, bias, alive)
    picked = jnp.asarray(ids)[0]
    with jax.default_matmul_precision("highest"):
        mine = [numbers(part_of(part, picked)) for part in (gate_up, down)]
        exact = ExpertWeights(*mine, tuple(part.astype(jnp.float32) for part in shared) or None)
        want = reference.experts(x.astype(jnp.float32), exact, weights, jnp.arange(k, dtype=jnp.int32)[None], alive)
    assert all((each == routed[0]).all() for each in routed)
    assert ratio(given, want) < 4e-3
    assert ratio(routed[0], want + residual.astype(jnp.float32)) < 4e-3
    assert jnp.isnan(poisoned).all()
