"""The routing kernels without a GPU: interpreted against the reference, and lowered."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.moe import api, mosaic, reference, router
from pallas_kernels.moe.config import configure
from pallas_kernels.moe.dispatch_fused import route_and_dispatch
from pallas_kernels.moe.dispatch_meet import chunks_of, route_and_place
from pallas_kernels.moe.dispatch_small import Copied, Plan
from pallas_kernels.moe.reference import slot_tables
from pallas_kernels.moe.routing import route, route_padded, unsupported_reason
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.slots import max_slots
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.tuning import Tuning
from tests.kernels.moe_cases import (
    ROUTINGS,
    assert_same_plan,
    by_reference,
    planned_in_one_launch_and_in_two,
    routers,
)
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.matrices import full, members


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@interpreted
@pytest.mark.parametrize(
    ("shape", "sigmoid", "T"),
    [
        ("odd", True, 11), ("moonlight", False, 9),
        *slow(("moonlight", True, 9), ("moonlight", True, 1), ("deepseek-v3", True, 17), ("deepseek-v3", False, 8)),
        *slow(("deepseek-v2", True, 8), ("deepseek-v2", False, 9), ("odd", False, 70)),
    ],
)  # fmt: skip
def test_interpreted(shape, sigmoid, T):
    _, routing = ROUTINGS[shape]
    logits, bias = routers(shape, T, sigmoid=sigmoid)
    weights, ids = route(logits, bias, routing=routing, interpret=detect_races())
    want_weights, want_ids = by_reference(logits, bias, routing)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-6)
    assert_no_races(ids)


@interpreted
@pytest.mark.parametrize(
    ("shape", "sigmoid", "T"),
    [
        ("odd", True, 5), ("moonlight", False, 8),
        *slow(("moonlight", True, 1), ("deepseek-v3", True, 8), ("deepseek-v2", False, 3)),
    ],
)  # fmt: skip
def test_tables_of_the_same_launch(shape, sigmoid, T):
    """Few tokens: the tables are the reference's for its own choice of experts, without dead tokens."""
    E, routing = ROUTINGS[shape]
    logits, bias = routers(shape, T, sigmoid=sigmoid)
    live = jnp.arange(T) % 3 != 1
    slots = max_slots(T, routing.top_k, E, 8, all_tokens=True)
    weights, got = route_and_dispatch(logits, bias, live, 8, slots, routing=routing, interpret=detect_races())
    want_weights, ids = by_reference(logits, bias, routing)
    want = slot_tables(ids, live, E, 8, all_tokens=True)
    n = int(want.num_slots[0])
    assert got.num_slots.tolist() == [n]
    np.testing.assert_array_equal(got.expert[:n], want.expert[:n])
    np.testing.assert_array_equal(got.place[:T, : routing.top_k], want.place)
    np.testing.assert_allclose(weights[:T, : routing.top_k], want_weights, rtol=1e-6)
    assert_no_races(got)


@interpreted
@pytest.mark.parametrize(
    ("shape", "sigmoid", "T", "H"),
    [
        ("odd", True, 9, 128), ("moonlight", False, 17, 0),
        *slow(("moonlight", True, 32, 256), ("deepseek-v3", True, 12, 128), ("deepseek-v2", False, 20, 0)),
        pytest.param("odd", True, 128, 0, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_tables_of_blocks_that_wait(shape, sigmoid, T, H):
    """More tokens: one launch gives what two do, with tokens copied (of H columns) and without. Some are dead."""
    _, routing = ROUTINGS[shape]
    logits, bias = routers(shape, T, sigmoid=sigmoid)
    check_one_launch(logits, bias, T, H, routing)


@interpreted
@pytest.mark.slow
def test_tables_of_blocks_that_wait_for_more_experts_of_a_token():
    """Ten ids, padded to 16: a block that routes fills two chunks. Logits in parts; the copied columns in another order."""
    parts = np.random.default_rng(0).normal(size=(9, 64, 64)).astype(np.float32)
    check_one_launch(parts, None, 20, 1024, Routing(10, 1, 1, False, 1.0), ordered=True)


def check_one_launch(logits, bias, T: int, H: int, routing: Routing, *, ordered: bool = False) -> None:
    live = jnp.arange(T) % 3 != 1
    x = jnp.asarray(np.random.default_rng(T).normal(size=(T, H or 128)), jnp.bfloat16)
    one, two = planned_in_one_launch_and_in_two(
        logits, bias, live, x, routing=routing, copies=H > 0, ordered=ordered, interpret=detect_races()
    )
    assert_same_plan(one, two, live, routing.top_k)
    assert_no_races((one, two), kernels=4)


@pytest.mark.parametrize(
    ("shape", "T", "copies"), [("moonlight", 32, True), *slow(("moonlight", 128, False), ("deepseek-v3", 128, True))]
)
def test_blocks_that_wait_lower_for_the_gpu(shape, T, copies):
    """In one kernel, and the counter is used in place."""
    E, routing = ROUTINGS[shape]
    H = LAYERS[shape].hidden
    slots = max_slots(T, routing.top_k, E, 8, all_tokens=False)
    plan = Plan(chunks_of(T, 8), E, 8, 8, slots, copied=Copied(H, jnp.dtype(jnp.bfloat16)) if copies else None)
    arrays = abstract(
        ((T, E), jnp.float32), ((E,), jnp.float32), ((T,), jnp.bool_), ((T, H), jnp.bfloat16), ((1,), jnp.int32)
    )
    step = jax.jit(lambda *a: route_and_place(*a, plan, routing=routing))
    text = step.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "output_operand_alias<" in text


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "copying", "one_launch", "rows"),
    [(3, 0, 8, 16), (20, 0, 8, 16), (20, 20, 8, 16), (40, 40, 8, 24), (20, 0, 20, 16), (40, 40, 40, 24)],
)
def test_routed_experts(T, copying, one_launch, rows):
    """Slots with all tokens, and others: as routing and then experts."""
    E, H, inner, routing = 8, 128, 128, ROUTINGS["odd"][1]
    rng = np.random.default_rng(T)
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.bfloat16)
    gate_up = jnp.asarray(rng.normal(size=(E, 2, inner, H)) / H**0.5, jnp.bfloat16)
    down = jnp.asarray(rng.normal(size=(E, H, inner)) / inner**0.5, jnp.bfloat16)
    logits, bias = rng.normal(size=(T, E)).astype(np.float32), rng.normal(size=E).astype(np.float32)
    live = jnp.arange(T) % 5 != 4
    call = x, ExpertWeights(gate_up, down), logits, bias, live
    jax.clear_caches()
    with tuning.use(Tuning(slot_rows=((12.0, rows),), copying_tokens=copying, route_plan_tokens=one_launch)):
        config = dataclasses.replace(configure(T, E, routing.top_k, H, inner), grid=2)
        zero = jnp.zeros(1, jnp.int32)
        got = mosaic.routed_experts(*call, zero, routing=routing, config=config, interpret=detect_races())
    weights, ids = by_reference(logits, bias, routing)
    exact = (a.astype(jnp.float32) for a in (gate_up, down))
    want = reference.experts(x.astype(jnp.float32), ExpertWeights(*exact), weights, ids, live)
    got, want = np.asarray(got, np.float32), np.asarray(want)
    np.testing.assert_array_equal(got[~live], 0)
    assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)
    assert_no_races(got)


@interpreted
@pytest.mark.parametrize(("T", "H"), [(4, 256), (72, 256), (16, 1280)])
def test_the_router_on_tensor_cores(T, H):
    """The parts' sum has the precision of float32, and routing takes the parts as it takes their sum."""
    E, routing = 64, ROUTINGS["moonlight"][1]
    rng = np.random.default_rng(T)
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.bfloat16).at[T // 2, 0].set(jnp.nan)
    weight = jnp.asarray(rng.normal(size=(E, H)), jnp.float32)
    parts, zero = router.logit_parts(x, weight, interpret=detect_races())
    assert_no_races(parts)
    assert zero.tolist() == [0]
    assert parts.shape == (H // 128, -(-T // 64) * 64, E)
    got = np.asarray(parts, np.float64).sum(axis=0)[:T]
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(np.nan_to_num(got), np.nan_to_num(want), atol=1e-4)
    bias, live = jnp.linspace(-0.1, 0.1, E), jnp.arange(T) % 3 != 1
    # Of 8 parts and more a row of registers sums every eighth.
    rows = [sum(parts[row + 8 :: 8], start=parts[row]) for row in range(min(len(parts), 8))]
    summed = functools.reduce(jnp.add, rows)[:T]
    if T <= 8:
        run = functools.partial(route_and_dispatch, rows=8, slots=max_slots(T, 6, E, 8, all_tokens=True))
    else:
        run = route_padded
    of_parts, of_sum = (run(a, bias, live, routing=routing, interpret=detect_races()) for a in (parts, summed))
    for a, b in zip(jax.tree.leaves(of_parts), jax.tree.leaves(of_sum), strict=True):
        # Rows past the last token are undefined.
        np.testing.assert_array_equal(*(each[:T] if each.ndim > 1 else each for each in (a, b)))


def test_the_router_lowers_for_cuda():
    x, weight, bias, live = abstract(
        ((32, 7168), jnp.bfloat16), ((256, 7168), jnp.float32), ((256,), jnp.float32), ((32,), jnp.bool_)
    )

    def step(x, weight, bias, live):
        return route_padded(router.logit_parts(x, weight)[0], bias, live, routing=ROUTINGS["deepseek-v3"][1])

    text = jax.jit(step).trace(x, weight, bias, live).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    assert "multiples of 8 tokens" in str(router.unsupported_reason(jnp.zeros((33, 128)), jnp.zeros((64, 128))))
    assert "multiples of 64 experts" in str(router.unsupported_reason(jnp.zeros((2, 128)), jnp.zeros((160, 128))))


def abstract(*arrays):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]


@pytest.mark.parametrize(
    ("shape", "sigmoid", "T"),
    members(
        itertools.product(ROUTINGS, (True, False), (3, 40)),
        default=[
            ("deepseek-v3", True, 3),
            ("deepseek-v3", True, 40),
            ("moonlight", False, 3),
            ("moonlight", False, 40),
        ],
    ),
)
def test_lowers_for_the_gpu(shape, sigmoid, T):
    E, routing = ROUTINGS[shape]
    logits, live, bias = abstract(((T, E), jnp.float32), ((T,), jnp.bool_), ((E,), jnp.float32))

    def step(logits, bias, live):
        bias = bias if sigmoid else None
        if T > 8:
            return route(logits, bias, routing=routing)
        return route_and_dispatch(
            logits, bias, live, 8, max_slots(T, routing.top_k, E, 8, all_tokens=True), routing=routing
        )

    text = jax.jit(step).trace(logits, bias, live).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "copying", "one_launch", "kernels"),
    [
        (1, 0, 8, 3), *full((8, 128, 8, 3), (32, 0, 8, 5)), (32, 128, 8, 4), *full((128, 128, 8, 4)), (2048, 4096, 4096, 6),
        (32, 128, 128, 3), (32, 0, 128, 4), (128, 128, 128, 3), *full((128, 128, 32, 4), (8, 128, 128, 3)),
    ],
)  # fmt: skip
def test_a_layer_lowers_for_the_gpu(T, copying, one_launch, kernels):
    """From logits to the experts' matmuls: one kernel for few tokens, three with the gather for more, four for a prefill.

    With tokens copied by the kernel that makes the tables one less, where that is one; and one less where it routes too.
    """
    E, routing = ROUTINGS["moonlight"]
    H, _, _, inner, _ = LAYERS["moonlight"]
    args = abstract(
        ((T, H), jnp.bfloat16), ((E, 2, inner, H), jnp.bfloat16), ((E, H, inner), jnp.bfloat16), ((T, E), jnp.float32),
        ((E,), jnp.float32), ((T,), jnp.bool_), ((1,), jnp.int32),
    )  # fmt: skip
    layer = jax.jit(lambda x, *a: mosaic.routed_experts(x, ExpertWeights(*a[:2]), *a[2:], routing=routing))
    jax.clear_caches()
    with tuning.use(Tuning(copying_tokens=copying, route_plan_tokens=one_launch)):
        text = layer.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels


@pytest.mark.slow
def test_unsupported_routings_run_on_the_reference():
    logits, bias = routers("odd", 4, sigmoid=True)
    _, routing = ROUTINGS["odd"]
    assert "up to 512 experts" in str(unsupported_reason(jnp.zeros((1, 1024)), routing))
    assert "float32" in str(unsupported_reason(jnp.zeros((1, 64), jnp.bfloat16), routing))
    for backend in ("auto", "mosaic", "reference"):
        with use(Backends(moe=backend)):
            weights, ids = api.route_sigmoid(logits, bias, **dataclasses.asdict(routing))
        want_weights, want_ids = by_reference(logits, bias, routing)
        np.testing.assert_array_equal(ids, want_ids)
        np.testing.assert_allclose(weights, want_weights, rtol=1e-6)
