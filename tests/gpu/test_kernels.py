"""Every kernel on the GPU against float64 NumPy, at the head sizes of real models and over pages of 64 tokens.

Inputs are rounded to the tested dtype first, so that only the kernel's own arithmetic counts. All that no context owns is
NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.api import write_latent
from pallas_kernels.mla_decode import shapes
from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.mla_prefill.api import mla_prefill
from pallas_kernels.moe.api import experts, route_sigmoid
from pallas_kernels.moe.weights import ExpertWeights

pytestmark = pytest.mark.gpu

L, R, D, V, H = shapes.LATENT, shapes.ROPE, shapes.NOPE, shapes.VALUE, shapes.HEADS["moonlight"]
PAGE, PAGES, MAX_PAGES = 64, 80, 20

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def rounded(dtype: str, *arrays: np.ndarray) -> list[np.ndarray]:
    """float64 arrays whose values the dtype holds exactly."""
    return [np.asarray(jnp.asarray(a, dtype), np.float64) for a in arrays]


def assert_close(got: jax.Array, want: np.ndarray, dtype: str) -> None:
    """Relative error in the Frobenius norm. NaN fails."""
    got64 = np.asarray(got, np.float64)
    error = np.linalg.norm(got64 - want) / np.linalg.norm(want)
    limit = 1e-2 if dtype == "bfloat16" else 1e-5
    assert error <= limit, f"relative error {error:.2e}"


def call(function, dtype: str, arrays, *rest, **options):
    """Runs jitted; float32 with exact matmuls, as the engine does."""
    precision = "highest" if dtype == "float32" else None
    with jax.default_matmul_precision(precision):
        jitted = jax.jit(lambda floats, ints: function(*floats, *ints, **options))
        return jitted([jnp.asarray(a, dtype) for a in arrays], list(rest))


def paged(rng: np.random.Generator, lengths, dtype: str) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Contexts [length, L + R] scattered over random pages: contexts, pool, tables."""
    contexts = rounded(dtype, *(rng.normal(size=(n, L + R)) for n in lengths))
    pool = np.full((PAGES, PAGE, L + R), np.nan)
    tables = rng.integers(0, PAGES, size=(len(lengths), MAX_PAGES)).astype(np.int32)
    free = list(rng.permutation(PAGES))
    for row, context in enumerate(contexts):
        for column in range(-(-len(context) // PAGE)):
            tables[row, column] = page = free.pop()
            part = context[column * PAGE : (column + 1) * PAGE]
            pool[page, : len(part)] = part
    return contexts, pool, tables


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@DTYPES
@pytest.mark.parametrize("n", [1, 4])
def test_mla_decode(dtype, n):
    rng = np.random.default_rng(n)
    lengths = (4, 64, 65, 700, 1280)
    contexts, pool, tables = paged(rng, lengths, dtype)
    (q,) = rounded(dtype, rng.normal(size=(len(lengths), n, H, L + R)))
    bounds = (np.array(lengths)[:, None] - (n - 1) + np.arange(n)).astype(np.int32)
    got = call(mla_decode, dtype, [q, pool], tables, bounds, scale=shapes.SCALE, value_dim=L)
    want = np.zeros((len(lengths), n, H, L))
    for b, context in enumerate(contexts):
        for r in range(n):
            keys = context[: bounds[b, r]]
            want[b, r] = softmax(shapes.SCALE * q[b, r] @ keys.T) @ keys[:, :L]
    assert_close(got, want, dtype)


@DTYPES
def test_mla_prefill(dtype):
    rng = np.random.default_rng(0)
    starts, chunks = np.array([0, 500, 63]), np.array([130, 70, 1])
    ends = starts + chunks
    contexts, pool, tables = paged(rng, ends, dtype)
    P, E, padding = int(chunks.sum()), len(chunks), 7
    rows = np.concatenate([np.repeat(np.arange(E), chunks), [E] * padding]).astype(np.int32)
    spans = [np.arange(s, e) for s, e in zip(starts, ends, strict=True)]
    positions = np.concatenate([*spans, np.zeros(padding)]).astype(np.int32)
    q_nope, q_rope, w_uk, w_uv = rounded(
        dtype,
        rng.normal(size=(P + padding, H, D)),
        rng.normal(size=(P + padding, H, R)),
        rng.normal(size=(H, D, L)) / L**0.5,
        rng.normal(size=(H, V, L)) / L**0.5,
    )
    got = call(
        mla_prefill,
        dtype,
        [q_nope, q_rope, w_uk, w_uv, pool],
        tables,
        rows,
        positions,
        ends.astype(np.int32),
        scale=shapes.SCALE,
    )
    np.testing.assert_array_equal(np.asarray(got[P:], np.float32), 0)
    want = np.zeros((P, H, V))
    for e, context in enumerate(contexts):
        mine = np.flatnonzero(rows == e)
        latent, k_rope = context[:, :L], context[:, L:]
        scores = np.einsum("phd,hdl,sl->phs", q_nope[mine], w_uk, latent, optimize=True)
        scores += np.einsum("phr,sr->phs", q_rope[mine], k_rope)
        visible = np.arange(len(context)) <= positions[mine, None]
        weights = softmax(np.where(visible[:, None], shapes.SCALE * scores, -np.inf))
        want[mine] = np.einsum("phs,sl,hvl->phv", weights, latent, w_uv, optimize=True)
    assert_close(got[:P], want, dtype)


@DTYPES
def test_write_latent(dtype):
    rng = np.random.default_rng(1)
    T = 9
    kv_a, weight = rounded(dtype, rng.normal(size=(T, L + R)), rng.uniform(0.5, 1.5, size=L))
    angles = rng.normal(size=(T, R // 2))
    places = rng.permutation(PAGES * PAGE)[:T]
    pages, offsets = (places // PAGE).astype(np.int32), (places % PAGE).astype(np.int32)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    cache = np.full((PAGES, PAGE, L + R), np.nan)
    got = call(
        lambda cache, kv_a, weight, *rest: write_latent(cache, kv_a, weight, *rest, eps=1e-6),
        dtype, [cache, kv_a, weight], cos, sin, pages, offsets,
    )  # fmt: skip
    c, k = kv_a[:, :L], kv_a[:, L:]
    c = weight * c / np.sqrt((c**2).mean(axis=1, keepdims=True) + 1e-6)
    z = (k[:, : R // 2] + 1j * k[:, R // 2 :]) * np.exp(1j * angles)
    assert_close(got[pages, offsets], np.concatenate([c, z.real, z.imag], axis=1), dtype)
    untouched = np.ones((PAGES, PAGE), bool)
    untouched[pages, offsets] = False
    assert np.isnan(np.asarray(got, np.float32)[untouched]).all()


@DTYPES
@pytest.mark.parametrize("T", [1, 300])
def test_experts(dtype, T):
    rng = np.random.default_rng(T)
    E, hidden, inner, k = 8, 1024, 704, 3
    x, gate_up, down = rounded(
        dtype,
        rng.normal(size=(T, hidden)),
        rng.normal(size=(E, 2, inner, hidden)) / hidden**0.5,
        rng.normal(size=(E, hidden, inner)) / inner**0.5,
    )
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=(T, k)).astype(np.float32)
    live = np.arange(T) % 5 != 4
    dirty = np.where(live[:, None], x, np.nan)

    def of_arrays(x, gate_up, down, *routing):
        return experts(x, ExpertWeights(gate_up, down), *routing)

    got = call(of_arrays, dtype, [dirty, gate_up, down], weights, ids, live)
    want = np.zeros((T, hidden))
    for e in range(E):
        gate, up = x @ gate_up[e, 0].T, x @ gate_up[e, 1].T
        out = (gate / (1 + np.exp(-gate)) * up) @ down[e].T
        want += np.where(ids == e, weights, 0).sum(axis=1)[:, None] * out
    assert_close(got[live], want[live], dtype)


def test_routing_chooses_the_same_experts():
    rng = np.random.default_rng(2)
    logits, bias = rng.normal(size=(512, 64)).astype(np.float32), 0.1 * rng.normal(size=64).astype(np.float32)
    route = jax.jit(lambda a, b: route_sigmoid(a, b, top_k=6, num_groups=1, top_groups=1, normalize=True, scale=2.446))
    weights, ids = route(logits, bias)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    want = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :6]
    np.testing.assert_array_equal(ids, want)
    chosen = np.take_along_axis(scores, want, axis=1)
    np.testing.assert_allclose(weights, 2.446 * chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-5)
