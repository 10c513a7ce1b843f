"""The Mosaic GPU kernels of routing and experts on the GPU, against the reference in float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.moe import api, mosaic, one_token, reference, router
from pallas_kernels.moe.activation import Clamp
from pallas_kernels.moe.config import configure
from pallas_kernels.moe.dispatch import dispatch
from pallas_kernels.moe.dispatch_fused import route_and_dispatch
from pallas_kernels.moe.gather import gather_slots
from pallas_kernels.moe.reference import slot_tables
from pallas_kernels.moe.routing import route, route_padded
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.slots import max_slots
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.norm_linear.reference import rms_norm
from tests.gpu.moe_layers import SHAPES, drawn, layer, shared_experts
from tests.kernels.moe_cases import (
    ROUTINGS,
    assert_same_plan,
    by_reference,
    planned_in_one_launch_and_in_two,
    routers,
)

pytestmark = pytest.mark.gpu


@jax.jit
def want(x, parameters, weights, ids, live):
    """The reference in float32, one expert after another: all together would not fit into memory."""
    shared, routed = parameters.shared, dataclasses.replace(parameters, shared=None)

    def add(e, total):
        one = jnp.zeros_like(ids)
        mine = jnp.where(ids == e, weights, 0.0).sum(axis=1, keepdims=True)
        expert = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, e).astype(jnp.float32), routed)
        return total + reference.experts(x, expert, mine, one[:, :1], live)

    total = jax.lax.fori_loop(0, routed.down.shape[0], add, jnp.zeros(x.shape, jnp.float32))
    return total if shared is None else total + reference.swiglu(x, *(w.astype(jnp.float32) for w in shared))


def compare(shape: str, T: int, ids: np.ndarray, live: np.ndarray, shared_inner: int = 0) -> None:
    """Live tokens are right, dead ones, whose x is NaN, give exactly 0, and one live NaN reaches no other token."""
    H, _, k, _ = SHAPES[shape]
    gate_up, down = layer(shape)
    shared = shared_experts(shape, shared_inner) if shared_inner else None
    rng = np.random.default_rng(T)
    x = np.asarray(rng.normal(size=(T, H)), np.float32)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    weights = rng.uniform(0.1, 1, size=(T, k)).astype(np.float32)
    sound = live.copy()
    dirty = np.where(live[:, None], x, np.nan)
    if live.sum() > 1:
        poisoned = np.flatnonzero(live)[T // 7]
        dirty[poisoned] = np.nan
        sound[poisoned] = False
    with use(Backends(moe="mosaic")):
        run = jax.jit(api.experts)
        parameters = ExpertWeights(gate_up, down, shared)
        got = np.asarray(run(jnp.asarray(dirty, jnp.bfloat16), parameters, weights, ids, live), np.float32)
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(want(x, parameters, weights, ids, live))
    np.testing.assert_array_equal(got[~live], 0)
    assert np.isnan(got[live & ~sound]).all()
    if sound.any():
        error = np.linalg.norm(got[sound] - expected[sound]) / np.linalg.norm(expected[sound])
        assert error <= 1e-2, f"relative error {error:.2e}"


@pytest.mark.parametrize("T", [1, 3, 8, 9, 32, 128, 192, 256, 300, 700, 2048])
@pytest.mark.parametrize("shape", SHAPES)
def test_balanced_routing(shape, T):
    _, E, k, _ = SHAPES[shape]
    rng = np.random.default_rng(T)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    compare(shape, T, ids, np.ones(T, bool))


@pytest.mark.parametrize(("rows", "T", "shared_inner"), [(24, 128, 0), (24, 128, 2 * 1408), (24, 256, 0), (40, 256, 0)])
def test_slots_of_other_rows(rows, T, shared_inner):
    """No power of two; tables from one kernel and from two."""
    _, E, k, _ = SHAPES["moonlight"]
    rng = np.random.default_rng(T)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    jax.clear_caches()
    with tuning.use(dataclasses.replace(tuning.current(), slot_rows=((24.0, rows),))):
        compare("moonlight", T, ids, np.arange(T) % 5 != 4, shared_inner)
    jax.clear_caches()


@pytest.mark.parametrize("T", [3, 8, 9, 128, 300, 2048])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_tokens_reach_the_same_experts_and_some_are_dead(shape, T):
    _, E, k, _ = SHAPES[shape]
    ids = np.tile(np.arange(E - k, E, dtype=np.int32), (T, 1))
    compare(shape, T, ids, np.arange(T) % 5 != 4)


@pytest.mark.parametrize("T", [1, 3, 8, 9, 20, 32, 64, 65, 128, 129, 300])
@pytest.mark.parametrize(("shape", "shared_inner"), [("moonlight", 2 * 1408), ("odd", 448), ("odd", 3 * 448)])
def test_with_shared_experts(shape, shared_inner, T):
    """In the experts' kernels or, with too many tokens, in XLA."""
    _, E, k, _ = SHAPES[shape]
    rng = np.random.default_rng(T)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    compare(shape, T, ids, np.arange(T) % 5 != 4, shared_inner)


@pytest.mark.parametrize("T", [1, 3, 8, 9, 32, 128, 300, 2048])
def test_biases_and_a_clamp(T):
    """gpt-oss-20b, whose sizes are odd multiples of 64, with numbers so large that the clamp acts."""
    H, E, k, inner, _ = LAYERS["gpt-oss-20b"]
    rng = np.random.default_rng(T)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    check_clamped(T, H, E, inner, ids, rng.uniform(0.1, 1, (T, k)).astype(np.float32), "mosaic")


def check_clamped(T, H, E, inner, ids, weights, backend):
    keys = jax.random.split(jax.random.key(T), 5)
    shapes = (E, 2, inner, H), (E, H, inner), (E, 2, inner), (E, H), (T, H)
    scales = H**-0.5, inner**-0.5, 1.0, 1.0, 4.0
    gate_up, down, gate_up_bias, down_bias, x = map(drawn, keys, shapes, scales)
    parameters = ExpertWeights(gate_up, down, biases=(gate_up_bias, down_bias), clamp=Clamp())
    live = np.arange(T) % 5 != 4
    with use(Backends(moe=backend)):
        got = np.asarray(jax.jit(api.experts)(x, parameters, weights, ids, live), np.float32)
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(want(x.astype(jnp.float32), parameters, weights, ids, live))
    np.testing.assert_array_equal(got[~live], 0)
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error <= 1e-2, f"relative error {error:.2e}"


def test_with_shared_experts_of_another_size():
    compare("odd", 9, np.tile(np.arange(2, dtype=np.int32), (9, 1)), np.ones(9, bool), 192)


@pytest.mark.parametrize("shared_inner", [0, 448])
@pytest.mark.parametrize("T", [1, 8, 40])
def test_no_token_is_live(T, shared_inner):
    _, _, k, _ = SHAPES["odd"]
    compare("odd", T, np.zeros((T, k), np.int32), np.zeros(T, bool), shared_inner)


@pytest.mark.parametrize(("E", "k"), [(64, 6), (256, 8), (8, 2), (160, 6)])
@pytest.mark.parametrize("T", [1, 8, 9, 128, 2048, 8192])
def test_dispatch_gives_the_slot_tables_of_the_reference(T, E, k):
    """The slots, their experts, and the token of each row that is used."""
    rng = np.random.default_rng(T)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    live = np.arange(T) % 5 != 4
    H, _, _, inner, _ = LAYERS["moonlight"]
    config = configure(T, E, k, H, inner)
    run = jax.jit(lambda *a: dispatch(*a, E, config.rows, config.slots, all_tokens=config.all_tokens))
    got = run(ids, live)
    want = jax.jit(lambda *a: slot_tables(*a, E, config.rows, all_tokens=config.all_tokens))(ids, live)
    n = int(want.num_slots[0])
    assert got.num_slots.tolist() == [n]
    np.testing.assert_array_equal(got.expert[:n], want.expert[:n])
    np.testing.assert_array_equal(got.place, want.place)
    if not config.all_tokens:
        np.testing.assert_array_equal(got.used[:n], want.used[:n])
        used = np.asarray(want.place)[live]
        np.testing.assert_array_equal(np.asarray(got.token)[used], np.asarray(want.token)[used])


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("shape", "shared_inner"), [("moonlight", 0), ("moonlight", 2 * 1408), ("odd", 0), ("odd", 192), ("odd", 3 * 448)]
)
def test_one_token(shape, shared_inner, live):
    """With the kernel for one token; experts that were not chosen are NaN; a dead token leaves the residual unchanged."""
    H, E, _, _ = SHAPES[shape]
    gate_up, down = layer(shape)
    shared = shared_experts(shape, shared_inner) if shared_inner else None
    _, routing = ROUTINGS[shape]
    logits, bias = routers(shape, 1, sigmoid=True)
    weights, ids = by_reference(logits, bias, routing)
    unused = ~np.isin(np.arange(E), ids)[:, None, None]
    holes = jnp.where(unused[..., None], jnp.nan, gate_up), jnp.where(unused, jnp.nan, down)
    x, residual = jax.random.normal(jax.random.key(2), (2, 1, H), jnp.bfloat16)
    alive = jnp.array([live])
    with use(Backends(moe="mosaic")), tuning.use(tuning.Tuning(one_token_experts=True)):
        options = dataclasses.asdict(routing)
        parameters = ExpertWeights(*holes, shared)
        run = jax.jit(lambda x, *a: api.routed_experts(x, parameters, *a, residual, **options))
        after_routing = jax.jit(lambda x, *a: api.experts(x, parameters, *a))
        results = run(x, logits, bias, alive), residual + after_routing(x, weights, ids, alive)
        poisoned = run(x.at[0, H // 2].set(jnp.nan), logits, bias, alive)
    with jax.default_matmul_precision("highest"):
        exact = want(x.astype(jnp.float32), ExpertWeights(gate_up, down, shared), weights, ids, alive)
    expected = np.asarray(residual.astype(jnp.float32) + exact * live)
    for got in results:
        error = np.linalg.norm(np.asarray(got, np.float32) - expected) / np.linalg.norm(expected)
        assert error <= (1e-2 if live else 0), f"relative error {error:.2e}"
    if live:
        assert jnp.isnan(poisoned).all()
    else:
        np.testing.assert_array_equal(poisoned, residual)


@pytest.mark.parametrize(("shape", "shared_inner"), [("moonlight", 2 * 1408), ("odd", 0)])
@pytest.mark.parametrize("devices", [2, 4])
def test_one_token_of_several_devices(shape, shared_inner, devices):
    """What each makes of its experts, and of its part of the shared ones, is the whole."""
    H, E, _, _ = SHAPES[shape]
    gate_up, down = layer(shape)
    shared = shared_experts(shape, shared_inner) if shared_inner else None
    _, routing = ROUTINGS[shape]
    logits, bias = routers(shape, 1, sigmoid=True)
    x, live, total = jax.random.normal(jax.random.key(2), (1, H), jnp.bfloat16), jnp.ones(1, bool), 0.0
    with use(Backends(moe="mosaic")), tuning.use(tuning.Tuning(one_token_experts=True)):
        for device in range(devices):
            mine = slice(device * E // devices, (device + 1) * E // devices)
            part = slice(device * shared_inner // devices, (device + 1) * shared_inner // devices)
            parameters = ExpertWeights(
                gate_up[mine], down[mine], None if shared is None else (shared[0][:, part], shared[1][:, part]),
                first=jnp.int32(mine.start),
            )  # fmt: skip
            assert one_token.supports(x, parameters, routing.top_k)
            got = jax.jit(lambda x, p: api.routed_experts(x, p, logits, bias, live, **dataclasses.asdict(routing)))
            total += np.asarray(got(x, parameters), np.float32)
    with jax.default_matmul_precision("highest"):
        exact = np.asarray(
            want(
                x.astype(jnp.float32), ExpertWeights(gate_up, down, shared), *by_reference(logits, bias, routing), live
            )
        )
    error = np.linalg.norm(total - exact) / np.linalg.norm(exact)
    assert error <= 1e-2, f"relative error {error:.2e}"


def test_one_token_after_another():
    """In one graph, where calls may share the memory of the up projection: without waiting a block would read stale values."""
    H, E, k, _ = SHAPES["moonlight"]
    parameters = ExpertWeights(*layer("moonlight"), shared_experts("moonlight", 2 * 1408))
    xs = jax.random.normal(jax.random.key(3), (24, 1, H), jnp.bfloat16)
    rng = np.random.default_rng(3)
    ids = jnp.asarray(np.stack([rng.permutation(E)[:k] for _ in xs]), jnp.int32)[:, None]
    weights = jax.random.uniform(jax.random.key(4), (24, 1, k), minval=0.1)
    live = jnp.ones(1, bool)
    with use(Backends(moe="mosaic")), tuning.use(tuning.Tuning(one_token_experts=True)):

        @jax.jit
        def run(parameters):
            return jnp.stack([api.experts(x, parameters, w, i, live) for x, w, i in zip(xs, weights, ids, strict=True)])

        results = [np.asarray(run(parameters), np.float32) for _ in range(8)]
    with jax.default_matmul_precision("highest"):
        calls = zip(xs.astype(jnp.float32), weights, ids, strict=True)
        exact = np.stack([want(x, parameters, w, i, live) for x, w, i in calls])
    for got in results:
        errors = np.linalg.norm(got - exact, axis=(1, 2)) / np.linalg.norm(exact, axis=(1, 2))
        assert errors.max() < 1e-2, f"relative errors {errors}"
        np.testing.assert_array_equal(got, results[0])


@pytest.mark.parametrize("rows", [8, 24, 32])
def test_gathers_the_rows_of_slots(rows):
    """The rows of the slots that exist; a row without a token may hold any number."""
    T, H, slots, used = 9, 256, 5, 3
    x = jax.random.normal(jax.random.key(0), (T, H), jnp.bfloat16)
    token = np.random.default_rng(0).integers(-2, T + 2, size=slots * rows).astype(np.int32)
    got = gather_slots(x, token, np.array([used], np.int32), rows=rows)
    want = x[np.clip(token, 0, T - 1)].reshape(slots, rows, H)
    np.testing.assert_array_equal(got[:used], want[:used])


@pytest.mark.parametrize("T", [5, 33])
def test_slots_that_do_not_exist_are_not_read(T):
    """Experts without tokens have NaN weights, and so do all rows that padding could point to."""
    H, E, k, _ = SHAPES["odd"]
    gate_up, down = layer("odd")
    hole = (jnp.arange(E) >= k)[:, None, None]
    gate_up, down = jnp.where(hole[..., None], jnp.nan, gate_up), jnp.where(hole, jnp.nan, down)
    x, ids = jnp.ones((T, H), jnp.bfloat16), jnp.tile(jnp.arange(k), (T, 1))
    got = jax.jit(mosaic.experts)(x, ExpertWeights(gate_up, down), jnp.ones((T, k)), ids, jnp.ones(T, bool))
    assert jnp.isfinite(got.astype(jnp.float32)).all()


@pytest.mark.parametrize("T", [1, 3, 8, 9, 128, 300, 2048])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("shape", ROUTINGS)
def test_routed_as_the_reference(shape, sigmoid, T):
    """The same experts, except where XLA's rounding of scores decides, at most one row in a thousand."""
    _, routing = ROUTINGS[shape]
    logits, bias = routers(shape, T, sigmoid=sigmoid)
    weights, ids = route(logits, bias, routing=routing)
    want_weights, want_ids = by_reference(logits, bias, routing)
    same = np.asarray(ids == want_ids).all(axis=1)
    assert (~same).sum() <= T // 1000
    np.testing.assert_allclose(np.asarray(weights)[same], np.asarray(want_weights)[same], rtol=2e-6)


@pytest.mark.parametrize("T", [2, 32, 136])
@pytest.mark.parametrize(("shape", "H"), [("moonlight", 2048), ("deepseek-v3", 7168)])
def test_router_on_tensor_cores(shape, H, T):
    """With the precision of float32, and the same experts from parts of the logits as from their sum."""
    E, routing = ROUTINGS[shape]
    x = jax.random.normal(jax.random.key(0), (T, H), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (E, H), jnp.float32)
    bias, live = jnp.linspace(-0.1, 0.1, E), jnp.ones(T, bool)
    run = jax.jit(router.logit_parts)
    for _ in range(3):  # the third run is a recorded graph's
        parts, zero = run(x, weight)
    assert zero.tolist() == [0]
    exact = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    error = np.abs(np.asarray(parts, np.float64).sum(axis=0)[:T] - exact[0] @ exact[1].T)
    assert (error <= 1e-6 * np.abs(exact[0]) @ np.abs(exact[1]).T).all()
    # A row of the kernel's registers sums every eighth part.
    summed = sum(sum(parts[row + 8 :: 8], start=parts[row]) for row in range(8))[:T]
    of_parts = jax.jit(lambda *a: route_padded(*a, routing=routing))(parts, bias, live)
    weights, ids = route(summed, bias, routing=routing)
    k = routing.top_k
    np.testing.assert_array_equal(of_parts[1][:T, :k], ids)
    np.testing.assert_allclose(of_parts[0][:T, :k], weights, rtol=1e-6)


@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("shape", ROUTINGS)
def test_tables_of_the_routing_launch(shape, sigmoid, T):
    """The reference's tables for the same ids, and the same weights."""
    E, routing = ROUTINGS[shape]
    logits, bias = routers(shape, T, sigmoid=sigmoid)
    live = jnp.arange(T) % 3 != 1
    slots = max_slots(T, routing.top_k, E, 8, all_tokens=True)
    run = jax.jit(lambda *a: route_and_dispatch(*a, 8, slots, routing=routing))
    weights, got = run(logits, bias, live)
    want_weights, ids = route(logits, bias, routing=routing)
    want = slot_tables(ids, live, E, 8, all_tokens=True)
    n = int(want.num_slots[0])
    assert got.num_slots.tolist() == [n]
    np.testing.assert_array_equal(got.expert[:n], want.expert[:n])
    np.testing.assert_array_equal(got.place[:T, : routing.top_k], want.place)
    np.testing.assert_array_equal(weights[:T, : routing.top_k], want_weights)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("T", [9, 32, 40, 128])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("shape", ROUTINGS)
def test_tables_of_blocks_that_wait(shape, sigmoid, T, copies):
    """Bit for bit what routing and tables in two launches give."""
    _, routing = ROUTINGS[shape]
    logits, bias = routers(shape, T, sigmoid=sigmoid)
    live = jnp.arange(T) % 3 != 1
    x = jax.random.normal(jax.random.key(T), (T, 2048), jnp.bfloat16)
    run = jax.jit(functools.partial(planned_in_one_launch_and_in_two, routing=routing, copies=copies))
    for _ in range(3):  # the third run is a recorded graph's
        assert_same_plan(*run(logits, bias, live, x), live, routing.top_k)


@pytest.mark.parametrize("T", [16, 32, 128])
def test_blocks_that_wait_in_one_layer_after_another(T):
    """In one graph, each with the counter of its router: without waiting a block would read stale ids."""
    H, E, _, _ = SHAPES["moonlight"]
    _, routing = ROUTINGS["moonlight"]
    parameters, live = ExpertWeights(*layer("moonlight")), jnp.arange(T) % 5 != 4
    weights = jax.random.normal(jax.random.key(1), (12, E, H), jnp.float32) * H**-0.5
    stream = jax.random.normal(jax.random.key(2), (T, H), jnp.bfloat16)
    gain, bias = jnp.ones(H, jnp.bfloat16), jnp.linspace(-0.1, 0.1, E)

    def run(parameters, weights, stream):
        normed = rms_norm(stream, gain, 1e-5)
        for weight in weights:
            logits, zero = api.logit_parts(normed, weight)
            stream, normed = api.add_routed_experts(
                stream, normed, parameters, logits, bias, live, (gain, 1e-5), zero, **dataclasses.asdict(routing)
            )
        return stream

    results = []
    for most in (8, 128):
        jax.clear_caches()
        on = dataclasses.replace(
            tuning.current(), row_kernel_tokens=512, copying_tokens=128, route_plan_tokens=most, norm_linear_tokens=1
        )
        with use(Backends(moe="mosaic")), tuning.use(on):
            step = jax.jit(run)
            results += [np.asarray(step(parameters, weights, stream), np.float32) for _ in range(4)]
    assert np.isfinite(results[0]).all()
    for got in results[1:]:
        np.testing.assert_array_equal(got, results[0])


@pytest.mark.parametrize("T", [1, 8, 9, 40, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_routing_and_experts_together(shape, T):
    """As routing and then experts; 300 tokens are a prefill."""
    H, E, k, _ = SHAPES[shape]
    routing = ROUTINGS[shape][1] if shape in ROUTINGS else Routing(k, 1, 1, True, 1.0)
    parameters = ExpertWeights(*layer(shape))
    logits = jax.random.normal(jax.random.key(T), (T, E), jnp.float32)
    bias = jnp.linspace(-0.1, 0.1, E)
    x = jax.random.normal(jax.random.key(1), (T, H), jnp.bfloat16)
    live = jnp.arange(T) % 5 != 4
    residual, gain = jax.random.normal(jax.random.key(2), (T, H), jnp.bfloat16), jnp.full(H, 1.5, jnp.bfloat16)
    options = dataclasses.asdict(routing)
    joined = functools.partial(api.add_routed_experts, following=(gain, 1e-5), **options)
    off = dataclasses.replace(tuning.current(), copying_tokens=0, row_kernel_tokens=0)
    with use(Backends(moe="mosaic")):
        jax.clear_caches()
        with tuning.use(dataclasses.replace(off, row_kernel_tokens=512, copying_tokens=128)):
            run_joined = jax.jit(joined)
            for _ in range(3):  # the third run is a recorded graph's
                added, normed = run_joined(residual, x, parameters, logits, bias, live)
        jax.clear_caches()
        with tuning.use(off):
            run = jax.jit(lambda *a: api.routed_experts(*a, **options))
            got = np.asarray(run(x, parameters, logits, bias, live), np.float32)
    weights, ids = by_reference(logits, bias, routing)
    expected = np.asarray(mosaic.experts(x, parameters, weights, ids, live), np.float32)
    np.testing.assert_array_equal(got[~np.asarray(live)], 0)
    np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(added.astype(jnp.float32), residual + got, rtol=1e-2, atol=1e-2)
    # 320 columns are no multiple of a warpgroup.
    assert (normed is None) == (T == 1 or shape == "odd")
    if normed is not None:
        want_norm = rms_norm(added, gain, 1e-5).astype(jnp.float32)
        np.testing.assert_allclose(normed.astype(jnp.float32), want_norm, rtol=1.6e-2)
