"""A single token's experts in INT4, without a GPU: interpreted, lowered, and when their kernel is chosen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.moe import one_token, one_token_int4, reference
from pallas_kernels.moe.one_token_config import ROWS
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.reference import dequantise
from pallas_kernels.quant.schemes import INT4_G32, NVFP4
from pallas_kernels.quant.values import Quantised
from pallas_kernels.tuning import Tuning
from tests.kernels.moe_cases import ROUTINGS, routers
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.test_moe_packed import sized, without

ON = Tuning(one_token_experts=True, one_token_int4=True)
SHAPES = {
    "moonlight": LAYERS["moonlight"],
    "kimi-k2": (7168, 384, 8, 2048, 2048),
    "no shared experts": LAYERS["moonlight"]._replace(shared=0),
}


def layer(H: int, E: int, inner: int, S: int) -> ExpertWeights:
    rng = np.random.default_rng(S)
    shapes = [(2, S, H), (H, S)] if S else []
    shared = tuple(jnp.asarray(rng.normal(size=s) / s[-1] ** 0.5, jnp.bfloat16) for s in shapes)
    return ExpertWeights(sized(INT4_G32, E, 2, inner, H), sized(INT4_G32, E, H, inner, seed=1), shared or None)


def exact(parameters: ExpertWeights) -> ExpertWeights:
    """In float32, numbers of codes rounded as in the kernels."""
    pair = [dequantise(each, jnp.bfloat16).astype(jnp.float32) for each in (parameters.gate_up, parameters.down)]
    return ExpertWeights(*pair, jax.tree.map(lambda a: a.astype(jnp.float32), parameters.shared))


def error(got: jax.Array, want: jax.Array) -> float:
    return float(jnp.abs(got.astype(jnp.float32) - want).mean() / jnp.abs(want).mean())


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("H", "k", "inner", "S"), [(256, 2, 128, 192), (512, 3, 256, 128), (256, 1, 384, 0)])
def test_interpreted_without_races(H, k, inner, S):
    """As the reference on what the codes stand for, with NaN in the scales of unused experts; a NaN of the token shows, and a
    dead token leaves the residual."""
    E, rng = 4, np.random.default_rng(k)
    parameters = layer(H, E, inner, S)
    x, residual = (jnp.asarray(rng.normal(size=(1, H)), jnp.bfloat16) for _ in range(2))
    ids, weights = rng.permutation(E)[:k].astype(np.int32)[None], rng.uniform(0.1, 1, (1, k)).astype(np.float32)
    unused = ~np.isin(np.arange(E), ids)
    holes = [without(weight, unused) for weight in (parameters.gate_up, parameters.down)]

    def run(x, live):
        got = one_token.experts(
            x, ExpertWeights(*holes, parameters.shared), weights, ids, jnp.array([live]), residual,
            k=k, blocks=2, interpret=detect_races(),
        )  # fmt: skip
        assert_no_races(got, kernels=2)
        return got

    want = reference.experts(x.astype(jnp.float32), exact(parameters), weights, ids, jnp.array([True]))
    assert error(run(x, True), want + residual.astype(jnp.float32)) < 4e-3
    np.testing.assert_array_equal(run(jnp.full_like(x, jnp.nan), False), residual)
    assert jnp.isnan(run(x.at[0, H - 1].set(jnp.nan), True)).all()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("sigmoid", [True, False])
def test_routing_and_experts_give_what_the_reference_does(sigmoid):
    """From the logits on."""
    E, routing = ROUTINGS["odd"]
    parameters = layer(256, E, 128, 64)
    logits, bias = (a if a is None else jnp.asarray(a) for a in routers("odd", 1, sigmoid=sigmoid))
    x, alive = jnp.linspace(-1, 1, 256, dtype=jnp.bfloat16)[None], jnp.array([True])
    got = one_token.routed_experts(
        x, parameters, logits, bias, alive, routing=routing, blocks=2, interpret=detect_races()
    )
    assert_no_races(got, kernels=2)
    options = dataclasses.asdict(routing)
    of_reference = (
        reference.route_softmax(logits, **options) if bias is None else reference.route_sigmoid(logits, bias, **options)
    )
    want = reference.experts(x.astype(jnp.float32), exact(parameters), *of_reference, alive)
    assert error(got, want) < 5e-3


def declared(scheme, H: int, E: int, inner: int, S: int) -> ExpertWeights:
    pair = [Quantised(**scheme.arrays(shape), scheme=scheme) for shape in ((E, 2, inner, H), (E, H, inner))]
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return ExpertWeights(*pair, (shape((2, S, H)), shape((H, S))) if S else None)


@pytest.mark.slow
@pytest.mark.parametrize("model", SHAPES)
def test_lowers_for_the_gpu(model):
    """One launch and no kernel of XLA's, from the router's logits to the residual stream after the layer."""
    H, E, k, inner, S = SHAPES[model]

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    run = functools.partial(one_token.routed_experts, routing=Routing(k, 1, 1, True, 2.0))
    traced = jax.jit(run).trace(
        shape(1, H), declared(INT4_G32, H, E, inner, S), shape(1, E, dtype=jnp.float32), shape(E, dtype=jnp.float32),
        shape(1, dtype=jnp.bool_), shape(1, H), shape(1, dtype=jnp.int32),
    )  # fmt: skip
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    assert not any(name in text for name in ("dot_general", "stablehlo.gather", "stablehlo.add", "stablehlo.slice"))


@pytest.mark.parametrize("model", SHAPES)
def test_rings_fit(model):
    """Into a block's 227 KiB, beside its barriers; stages end where rows and experts do."""
    H, E, k, inner, S = SHAPES[model]
    z = one_token_int4.Sizes(E, k, H, inner, S, 132)
    cuts = {z.up: (H, ROWS), z.down: (inner, ROWS / 2)}
    if S:
        cuts |= {z.shared_up: (H, 4 * ROWS), z.shared_down: (S, 2 * ROWS)}
    assert all(length % each.depth == 0 and each.stages >= 2 for each, (length, _) in cuts.items())
    rings = sum(each.stages * each.depth * row_bytes for each, (_, row_bytes) in cuts.items())
    scales = z.up.stages * z.up.depth * ROWS // 8 + z.down.stages * z.down.depth
    assert rings + scales <= 222 * 1024


def test_which_calls_it_supports():
    def supports(T, H, E, _, inner, S, scheme=INT4_G32, **more):
        x = jax.ShapeDtypeStruct((T, H), jnp.bfloat16)
        return one_token.supports(x, dataclasses.replace(declared(scheme, H, E, inner, S), **more), 6)

    assert not supports(1, *SHAPES["moonlight"])
    with tuning.use(ON):
        assert all(supports(1, *sizes) for sizes in SHAPES.values())
        assert not supports(2, *SHAPES["moonlight"])
        assert not supports(1, *SHAPES["moonlight"], NVFP4)
        assert not supports(1, *SHAPES["moonlight"], first=jnp.int32(0))
        assert not supports(1, 2048, 64, 6, 1344, 0)  # scales of 42 groups are not copied
