"""The Mosaic GPU kernel of norm_linear on the GPU, against the reference in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.norm_linear import add_norm, joined_linear, mosaic, reference, split_linear
from pallas_kernels.norm_linear.shapes import READERS
from tests.kernels.paged_cases import relative_error
from tests.kernels.test_norm_linear import inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize(("H", "outs", "experts"), [*READERS.values(), (256, ((8,),), 4)])
def test_sizes(T, H, outs, experts):
    x, gain, weights, delta = inputs(T, H, outs, experts)
    delta = delta if experts else None
    run = jax.jit(functools.partial(mosaic.norm_linear, eps=1e-5))
    for _ in range(3):  # the third run is a recorded graph's
        *got, zero = run(x, gain, weights, delta=delta)
    np.testing.assert_array_equal(zero, [0])
    # The sum is rounded, as in the residual stream.
    total = x if delta is None else x + delta
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), (total, gain, weights))
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(reference.norm_linear, eps=1e-5))(*exact)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape
        # Row by row, so that a wrong one cannot hide among many.
        for t in range(T):
            assert relative_error(np.asarray(g[t], np.float32), w[t]) < 1e-2


@pytest.mark.parametrize("T", [1, 2])
def test_centred_norm(T):
    """Of Qwen3.5's sizes."""
    x, gain, weights, delta = inputs(T, 2048, ((16, 768), (16, 2, 2), (32, 128)), 256)
    run, by_xla = (jax.jit(functools.partial(f.norm_linear, eps=1e-6, centred=True)) for f in (mosaic, reference))
    for _ in range(3):
        *got, _ = run(x, gain, weights, delta=delta)
    want = by_xla(x, gain, weights, delta=delta)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        assert relative_error(np.asarray(g, np.float32), np.asarray(w, np.float32)) < 8e-3


@pytest.mark.parametrize("T", [2, 32, 130])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("H", [128, 2048, 7168])
def test_sum_and_norm(H, centred, T):
    x, gain, _, delta = inputs(T, H, ())
    run = jax.jit(functools.partial(add_norm.add_norm, eps=1e-5, centred=centred))
    for _ in range(3):
        summed, normed = run(x, delta, gain)
    by_xla = functools.partial(reference.norm_linear, weights=(), eps=1e-5, centred=centred)
    want_sum, want_norm, _ = jax.jit(by_xla)(x, gain, delta=delta)
    np.testing.assert_array_equal(summed, want_sum)
    np.testing.assert_allclose(normed.astype(jnp.float32), want_norm.astype(jnp.float32), rtol=1.6e-2)


@pytest.mark.parametrize("T", [2, 4, 32, 72, 128, 256])
@pytest.mark.parametrize(("H", "columns"), [(2048, 2048), (128, 512), (2048, 5120), (3072, 6144)])
def test_parts_of_a_linear_map(H, columns, T):
    x, _, (weight,), delta = inputs(T, columns, ((H,),))
    x = x.reshape(T, -1, 128)
    weight = weight.reshape(H, -1, 128)
    run = jax.jit(split_linear.split_linear)
    for _ in range(3):  # the third run is a recorded graph's
        parts = run(x, weight)
    want = np.asarray(x, np.float64).reshape(T, -1) @ np.asarray(weight, np.float64).reshape(H, -1).T
    got = np.asarray(parts, np.float64).sum(axis=0)
    assert np.abs(got - want).max() <= 2**-15 * np.abs(want).max()
    stream, gain = delta[:, :H], jnp.full(H, 1.5, jnp.bfloat16)
    sums = [
        jax.jit(functools.partial(add_norm.add_norm, eps=1e-5))(stream, d, gain)
        for d in (parts, reference.whole(parts))
    ]
    for of_parts, of_whole in zip(*sums, strict=True):
        np.testing.assert_array_equal(of_parts, of_whole)


@pytest.mark.parametrize("T", [2, 4, 32, 64, 72, 128, 200, 256])
@pytest.mark.parametrize(
    ("H", "outs"),
    [READERS["moonlight, attention"][:2], (768, ((20, 256),)), (3072, ((8, 8, 128),)), (4096, ((8, 14, 128),))],
)
def test_linear_maps_side_by_side(H, outs, T):
    x, _, weights, _ = inputs(T, H, outs)
    run = jax.jit(joined_linear.joined_linear)
    for _ in range(3):  # the third run is a recorded graph's
        got = run(x, weights)
    want = np.asarray(x, np.float64) @ np.concatenate([np.asarray(w, np.float64).reshape(-1, H) for w in weights]).T
    for t in range(T):
        assert relative_error(np.asarray(got[t], np.float32), want[t]) < 5e-3


@pytest.mark.parametrize("T", [136, 2176])
def test_router_of_many_tokens(T):
    x, _, (_, router), _ = inputs(T, 2048, ((8,),), 64)
    got = jax.jit(lambda x, w: reference.project(x, (w,)))(x, router)[0]
    want = np.asarray(x, np.float64) @ np.asarray(router, np.float64).T
    assert got.dtype == jnp.float32
    assert np.abs(np.asarray(got, np.float64) - want).max() <= 2**-16 * np.abs(want).max()
