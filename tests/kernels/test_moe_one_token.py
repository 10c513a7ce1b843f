"""The experts' kernel for a single token, without a GPU: interpreted, lowered, and when it is chosen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.moe import api, mosaic, one_token, one_token_fp8, reference
from pallas_kernels.moe.one_token_config import ROWS, VALUES_BYTES, Sizes, values_of
from pallas_kernels.moe.routing import route_padded
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.reference import dequantise
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL
from pallas_kernels.quant.values import Quantised
from pallas_kernels.tuning import Tuning
from tests.kernels.moe_cases import ROUTINGS, routers
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import relative_error
from tests.kernels.quant_cases import drawn
from tests.matrices import members

ON = Tuning(one_token_experts=True)


def layer(H: int, E: int, inner: int, S: int):
    """gate_up, down, and those of shared experts if there are any."""
    rng = np.random.default_rng(H + S)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, jnp.bfloat16)

    return draw(E, 2, inner, H), draw(E, H, inner), (draw(2, S, H), draw(H, S)) if S else None


@interpreted
@pytest.mark.parametrize(
    ("H", "E", "k", "inner", "S", "adds"),
    [(128, 6, 3, 128, 192, True), (192, 4, 1, 64, 0, False)],
)
def test_interpreted_without_races(H, E, k, inner, S, adds):
    """As the reference in float32, with NaN in unused experts; a NaN of the token shows, and a dead token gives 0."""
    rng = np.random.default_rng(k)
    gate_up, down, shared = layer(H, E, inner, S)
    x, residual = (jnp.asarray(rng.normal(size=(1, H)), jnp.bfloat16) for _ in range(2))
    ids = rng.permutation(E)[:k].astype(np.int32)[None]
    weights = rng.uniform(0.1, 1, size=(1, k)).astype(np.float32)
    # Padded as the routing kernel's results are: wider, and with more rows.
    padded_ids = np.pad(ids, ((0, 7), (0, 8 - k)), constant_values=E)
    padded_weights = np.pad(weights, ((0, 7), (0, 64 - k)), constant_values=np.nan)
    unused = ~np.isin(np.arange(E), ids)[:, None, None]
    holes = jnp.where(unused[..., None], jnp.nan, gate_up), jnp.where(unused, jnp.nan, down)

    def run(x, live):
        got = one_token.experts(
            x, ExpertWeights(*holes, shared), padded_weights, padded_ids, jnp.array([live]), residual if adds else None,
            k=k, blocks=3, interpret=detect_races(),
        )  # fmt: skip
        assert_no_races(got, kernels=2)
        return np.asarray(got, np.float32)

    exact = jax.tree.map(lambda a: a.astype(jnp.float32), (x, gate_up, down, shared, residual))
    want = reference.experts(exact[0], ExpertWeights(*exact[1:4]), weights, ids, jnp.array([True]))
    added = exact[4] if adds else 0.0
    assert relative_error(run(x, True), want + added) < 8e-3
    dead = np.broadcast_to(added, (1, H))
    np.testing.assert_array_equal(run(jnp.full_like(x, jnp.nan), False), dead)
    assert np.isnan(run(x.at[0, H - 1].set(jnp.nan), True)).all()


def scaled(*shape: int) -> Quantised:
    """In FP8 blocks, of which products have about the size of their inputs."""
    weight = drawn(FP8_BLOCK, *shape, seed=sum(shape))
    size = shape[-1] ** -0.5 / float(jnp.abs(dequantise(weight, jnp.float32)).mean())
    return dataclasses.replace(weight, scale=weight.scale * size)


def fp8_layer(H: int, E: int, inner: int, S: int, make=scaled, **more) -> ExpertWeights:
    return ExpertWeights(make(E, 2, inner, H), make(E, H, inner), (make(2, S, H), make(H, S)) if S else None, **more)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("H", "k", "inner", "S", "first"), [
    (512, 3, 256, 128, None), (1024, 2, 128, 0, None), (512, 3, 128, 256, 3), (512, 3, 128, 0, 6),
])  # fmt: skip
def test_fp8_is_the_reference_on_what_the_codes_stand_for(H, k, inner, S, first):
    """The token rounded as by the other kernels; NaN in the scales of unused experts; some experts elsewhere, or all."""
    E, rng, ids = 4, np.random.default_rng(k), np.array([[1, 0, 3]], np.int32)[:, :k] + (3 if first == 3 else 0)
    whole = fp8_layer(H, E, inner, S, first=None if first is None else jnp.array(first, jnp.int32))
    unused = jnp.asarray(~np.isin((first or 0) + np.arange(E), ids))

    def without(weight):
        return dataclasses.replace(
            weight, scale=jnp.where(unused.reshape(-1, *[1] * (weight.scale.ndim - 1)), jnp.nan, weight.scale)
        )

    holes = dataclasses.replace(whole, gate_up=without(whole.gate_up), down=without(whole.down))
    x, residual = (jnp.asarray(rng.normal(size=(1, H)), jnp.bfloat16) for _ in range(2))
    weights = rng.uniform(0.1, 1, size=(1, k)).astype(np.float32)

    def run(x, live):
        got = one_token.experts(
            x, holes, weights, ids, jnp.array([live]), residual, k=k, blocks=3, interpret=detect_races()
        )
        assert_no_races(got, kernels=2)
        return np.asarray(got, np.float32)

    want = reference.experts(x.astype(jnp.float32), whole, weights, ids, jnp.array([True]), w8a8=True)
    assert np.any(np.asarray(want)) == (S > 0 or first != 6)
    got = run(x, True) - np.asarray(residual, np.float32)
    assert np.abs(got - want).mean() <= 8e-3 * max(0.5, np.abs(want).mean())
    np.testing.assert_array_equal(run(jnp.full_like(x, jnp.nan), False), residual.astype(jnp.float32))
    if first != 6:
        assert np.isnan(run(x.at[0, H - 1].set(jnp.nan), True)).all()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["moonlight", "deepseek-v3"])
def test_fp8_lowers_for_the_gpu(model):
    """One launch and no kernel of XLA's, as in bfloat16."""
    H, E, k, inner, S = SHAPES[model]

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    parameters = fp8_layer(H, E, inner, S, make=lambda *dims: Quantised(**FP8_BLOCK.arrays(dims), scheme=FP8_BLOCK))
    run = functools.partial(one_token.routed_experts, routing=Routing(k, 1, 1, True, 2.0))
    traced = jax.jit(run).trace(
        shape(1, H), parameters, shape(1, E, dtype=jnp.float32), shape(E, dtype=jnp.float32), shape(1, dtype=jnp.bool_),
        shape(1, H), shape(1, dtype=jnp.int32),
    )  # fmt: skip
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    assert not any(name in text for name in ("dot_general", "stablehlo.gather", "stablehlo.add", "stablehlo.slice"))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("first", "S"), [(0, 192), (3, 64), (3, 0), (6, 64), (6, 0)])
def test_of_experts_here_and_elsewhere_only_those_here_are_read(first, S):
    """One of three, two, or none of the token's experts; with shared ones and without."""
    H, E, inner, ids = 128, 3, 64, np.array([[4, 1, 5]], np.int32)
    gate_up, down, shared = layer(H, E, inner, S)
    x = jnp.linspace(-1, 1, H, dtype=jnp.bfloat16)[None]
    weights = np.array([[0.5, 0.25, 0.75]], np.float32)
    unused = ~np.isin(first + np.arange(E), ids)[:, None, None]
    holes = jnp.where(unused[..., None], jnp.nan, gate_up), jnp.where(unused, jnp.nan, down)
    begins, live = jnp.array(first, jnp.int32), jnp.array([True])
    got = one_token.experts(
        x, ExpertWeights(*holes, shared, first=begins), weights, ids, live, k=3, blocks=2, interpret=detect_races()
    )
    assert_no_races(got, kernels=2)
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), (x, gate_up, down, shared))
    want = reference.experts(exact[0], ExpertWeights(*exact[1:], first=begins), weights, ids, live)
    assert np.any(np.asarray(want)) == (first < 6 or S > 0)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=8e-3 * max(1e-3, float(jnp.abs(want).max())))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_routing_and_experts_give_what_the_reference_does(sigmoid, live):
    """From the logits on."""
    E, routing = ROUTINGS["odd"]
    H, inner = 128, 64
    gate_up, down, shared = layer(H, E, inner, inner)
    logits, bias = (a if a is None else jnp.asarray(a) for a in routers("odd", 1, sigmoid=sigmoid))
    x, alive = jnp.linspace(-1, 1, H, dtype=jnp.bfloat16)[None], jnp.array([live])
    args = x, ExpertWeights(gate_up, down, shared)
    got = one_token.routed_experts(*args, logits, bias, alive, x, routing=routing, blocks=2, interpret=detect_races())
    assert_no_races(got, kernels=2)
    options = dataclasses.asdict(routing)
    of_reference = (
        reference.route_softmax(logits, **options) if bias is None else reference.route_sigmoid(logits, bias, **options)
    )
    want = x + reference.experts(*args, *of_reference, alive)
    assert relative_error(got, want) < 8e-3


SHAPES = LAYERS | {"no shared experts": LAYERS["demo"]._replace(shared=0)}
DEFAULT = ("demo", "deepseek-v3", "no shared experts")


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("model", members(SHAPES, DEFAULT))
def test_lowers_for_the_gpu(model, elsewhere):
    """One launch and no kernel of XLA's, from the router's logits to the residual stream after the layer.

    With experts elsewhere two: a device must know before it begins which of them are here.
    """
    H, E, k, inner, S = SHAPES[model]

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    f32 = functools.partial(shape, dtype=jnp.float32)
    routing = Routing(k, 1, 1, True, 2.0)

    def block(x, gate_up, down, logits, bias, live, zero, shared, first):
        parameters = ExpertWeights(gate_up, down, shared, first=first)
        if first is None:
            return one_token.routed_experts(x, parameters, logits, bias, live, x, zero, routing=routing)
        weights, ids, zero = route_padded(logits, bias, live, routing=routing)
        return one_token.experts(x, parameters, weights, ids, live, x, zero, k=k)

    shared = (shape(2, S, H), shape(H, S)) if S else None
    traced = jax.jit(block).trace(
        shape(1, H), shape(E, 2, inner, H), shape(E, H, inner), f32(1, E), f32(E), shape(1, dtype=jnp.bool_),
        shape(1, dtype=jnp.int32), shared, shape(dtype=jnp.int32) if elsewhere else None,
    )  # fmt: skip
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1 + elsewhere
    assert not any(name in text for name in ("dot_general", "stablehlo.gather", "stablehlo.add", "stablehlo.slice"))


@given(
    sizes=st.tuples(*[st.integers(1, 256).map(lambda n: 64 * n)] * 2), pieces=st.integers(0, 4), odd=st.integers(0, 8)
)
def test_any_sizes_are_cut_evenly_and_fit(sizes, pieces, odd):
    """Stages end where rows and experts do, and both rings fit into a block's 227 KiB beside its barriers."""
    H, inner = sizes
    S = pieces * inner + 64 * odd
    z = Sizes(E=64, k=6, H=H, inner=inner, S=S, grid=132, fp8=False)
    assert H % z.up_cut.depth == inner % z.down_cut.depth == S % z.down_cut.depth == 0
    assert z.up_cut.stages >= 2
    assert z.down_cut.stages >= 2
    used = 2 * ROWS * (2 * z.up_cut.stages * z.up_cut.depth + z.down_cut.stages * z.down_cut.depth)
    assert used <= 208 * 1024


@given(sizes=st.tuples(*[st.integers(1, 16).map(lambda n: 512 * n)] * 2), pieces=st.integers(0, 4), k=st.integers(1, 8))
def test_any_sizes_in_fp8_are_cut_evenly_and_fit(sizes, pieces, k):
    """Also the scales of a stage, which TMA copies four at a time, and the token's values beside the rings."""
    H, inner = sizes
    z = Sizes(E=64, k=k, H=H, inner=inner, S=pieces * 128, grid=132, fp8=True)
    assert H % z.up_cut.depth == inner % z.down_cut.depth == z.S % z.down_cut.depth == z.up_cut.parts % 4 == 0
    assert z.up_cut.stages >= 2
    assert z.down_cut.stages >= 2
    used = ROWS * (2 * z.up_cut.stages * z.up_cut.depth + z.down_cut.stages * z.down_cut.depth)
    parameters = fp8_layer(H, 2, inner, z.S, make=lambda *shape: Quantised(**FP8_BLOCK.arrays(shape), scheme=FP8_BLOCK))
    fits = 4 * max(H, z.S + k * inner) <= VALUES_BYTES
    assert one_token_fp8.supports(parameters, k) == fits
    assert not fits or used + 4 * values_of(H, z.products) <= 222 * 1024


def test_which_calls_it_supports():
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)

    def supports(T, H, E, _, inner, S):
        shared = (shape((2, S, H)), shape((H, S))) if S else None
        return one_token.supports(
            shape((T, H)), ExpertWeights(shape((E, 2, inner, H)), shape((E, H, inner)), shared), 6
        )

    assert not supports(1, *SHAPES["moonlight"])  # not chosen where it has not been measured
    with tuning.use(ON):
        assert all(supports(1, *sizes) for sizes in SHAPES.values())
        assert not supports(2, *SHAPES["moonlight"])
        assert not supports(1, 2048, 64, 6, 1408, 96)  # a shared expert whose size is no multiple of 64


def test_which_calls_in_fp8_it_supports():
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)

    def supports(T, H, _, k, inner, S, scheme=FP8_BLOCK):
        parameters = fp8_layer(H, 2, inner, S, make=lambda *dims: Quantised(**scheme.arrays(dims), scheme=scheme))
        return one_token.supports(shape((T, H)), parameters, k)

    with tuning.use(ON):
        assert not supports(1, *SHAPES["moonlight"])  # a choice of its own
    with tuning.use(dataclasses.replace(ON, one_token_fp8=True)):
        assert supports(1, *SHAPES["moonlight"])
        assert supports(1, *SHAPES["deepseek-v3"])
        assert not supports(2, *SHAPES["moonlight"])
        assert not supports(1, *SHAPES["moonlight"], FP8_CHANNEL)
        assert not supports(1, 7168, 64, 8, 3072, 3072)  # its values do not fit beside the rings


@pytest.mark.parametrize("adds", [True, False])
def test_the_api_uses_it(adds, monkeypatch):
    """Where tuning says so and the experts' kernels can run: from the logits on, with experts elsewhere after the routing
    kernel, and given a choice."""
    calls, routed = [], []
    monkeypatch.setattr(mosaic, "unsupported_reason", lambda *_, **__: None)
    monkeypatch.setattr(api.routing, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(api.routing, "route_padded", lambda logits, *_, **__: (logits, logits.astype(jnp.int32), None))
    monkeypatch.setattr(one_token, "experts", lambda *args, k: calls.append((args, k)) or args[0])
    monkeypatch.setattr(one_token, "routed_experts", lambda *args, routing: routed.append((args, routing)) or args[0])
    H, E, inner = 128, 8, 64
    parameters = ExpertWeights(*layer(H, E, inner, inner))
    x, logits, live = jnp.ones((1, H), jnp.bfloat16), jnp.ones((1, E)), jnp.ones(1, bool)
    residual = x if adds else None
    routing, zero = ROUTINGS["odd"][1], jnp.zeros(1, jnp.int32)
    options = dataclasses.asdict(routing)
    split = dataclasses.replace(parameters, first=jnp.array(0))
    with use(Backends()), tuning.use(ON):
        api.routed_experts(x, parameters, logits, None, live, residual, zero, **options)
        api.routed_experts(x, split, logits, None, live, residual, **options)
        api.experts(x, parameters, logits[:, :2], logits[:, :2].astype(jnp.int32), live, residual)
    ((args, chosen),) = routed
    assert args[1] is parameters
    assert args[2] is logits
    assert args[5:] == (residual, zero)
    assert chosen == routing
    assert [k for _, k in calls] == [2, 2]
    assert [args[1] for args, _ in calls] == [split, parameters]
    assert all(args[5] is residual for args, _ in calls)
