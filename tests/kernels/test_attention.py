"""The attention references against dense float64 NumPy, over ragged paged contexts with NaN in all that no context owns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gqa_decode import api as gqa_decode_api
from pallas_kernels.gqa_prefill import api as gqa_prefill_api
from pallas_kernels.kv_write.api import write_kv, write_latent
from pallas_kernels.mla_decode import api as mla_decode_api
from pallas_kernels.mla_prefill import api as mla_prefill_api

mla_decode = jax.jit(mla_decode_api.mla_decode, static_argnames=("scale", "value_dim"))
mla_prefill = jax.jit(mla_prefill_api.mla_prefill, static_argnames="scale")
gqa_decode = jax.jit(gqa_decode_api.gqa_decode, static_argnames=("scale", "window"))
gqa_prefill = jax.jit(gqa_prefill_api.gqa_prefill, static_argnames=("scale", "window"))

PAGE, PAGES, MAX_PAGES = 8, 40, 9  # nine pages: not a whole number of blocks
H, L, R, D, V = 4, 16, 8, 12, 20
K, G = 2, 3


def softmax_attention(q, k, v, scale, *, window=None, sink=-np.inf):
    """One query [D] over the last `window` of keys [S, D] and values [S, V], float64."""
    first = max(len(k) - window, 0) if window else 0
    scores = scale * k[first:] @ q
    top = max(scores.max(), sink)
    weights = np.exp(scores - top)
    return weights @ v[first:] / (weights.sum() + np.exp(sink - top))


class Pool:
    """Contiguous contexts scattered over random pages; all that no context owns is NaN."""

    def __init__(self, rng, lengths, widths):
        self.contexts = [[rng.normal(size=(n, *w)) for w in widths] for n in lengths]
        self.arrays = [np.full((PAGES, PAGE, *w), np.nan, np.float32) for w in widths]
        # Entries past a length name any page, here pages full of NaN.
        self.tables = rng.integers(0, PAGES, size=(len(lengths), MAX_PAGES)).astype(np.int32)
        free = list(rng.permutation(PAGES))
        for row, n in enumerate(lengths):
            for column in range(-(-n // PAGE)):
                page = free.pop()
                self.tables[row, column] = page
                for array, context in zip(self.arrays, self.contexts[row], strict=True):
                    part = context[column * PAGE : (column + 1) * PAGE]
                    array[page, : len(part)] = part

    def forget(self, row, end):
        """NaN in the pages that hold only positions of a request before `end`."""
        for column in range(max(end, 0) // PAGE):
            for array in self.arrays:
                array[self.tables[row, column]] = np.nan


# Without; a window inside a page, over several, longer than some contexts; a single key; sinks that win and that lose.
WINDOWS_AND_SINKS = [(None, None), (5, 0.0), (21, 4.0), (1, None), (None, -3.0)]


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("lengths", [(1, 8, 9, 33), (72, 4, 64, 65)])
def test_mla_decode(n, lengths):
    rng = np.random.default_rng(n)
    lengths = [max(length, n) for length in lengths]
    pool = Pool(rng, lengths, [(L + R,)])
    q = rng.normal(size=(len(lengths), n, H, L + R)).astype(np.float32)
    bounds = np.array(lengths)[:, None] - (n - 1) + np.arange(n)
    out = mla_decode(q, pool.arrays[0], pool.tables, bounds.astype(np.int32), scale=0.3, value_dim=L)
    assert out.shape == (len(lengths), n, H, L)
    for b, (context,) in enumerate(pool.contexts):
        for r in range(n):
            keys = context[: bounds[b, r]]
            for h in range(H):
                want = softmax_attention(q[b, r, h], keys, keys[:, :L], 0.3)
                np.testing.assert_allclose(out[b, r, h], want, atol=2e-5)


@pytest.mark.parametrize(
    ("starts", "chunks"), [((0, 0, 5), (7, 1, 9)), ((30, 0, 0), (21, 0, 0)), ((64, 7, 16), (8, 8, 3))]
)
def test_mla_prefill(starts, chunks):
    rng = np.random.default_rng(len(starts) + starts[0])
    ends = np.array(starts) + chunks
    pool = Pool(rng, ends, [(L + R,)])
    P, E = sum(chunks) + 3, len(chunks)  # three padding tokens
    rows = np.concatenate([np.repeat(np.arange(E), chunks), [E] * 3]).astype(np.int32)
    positions = np.concatenate([*(np.arange(s, e) for s, e in zip(starts, ends, strict=True)), [0] * 3]).astype(
        np.int32
    )
    q_nope, q_rope = rng.normal(size=(P, H, D)), rng.normal(size=(P, H, R))
    w_uk, w_uv = rng.normal(size=(H, D, L)) / 4, rng.normal(size=(H, V, L)) / 4

    def f32(*arrays):
        return (jnp.asarray(a, jnp.float32) for a in arrays)

    live_ends = np.where(np.array(chunks) > 0, ends, 0).astype(np.int32)
    out = mla_prefill(
        *f32(q_nope, q_rope, w_uk, w_uv, pool.arrays[0]), pool.tables, rows, positions, live_ends, scale=0.2
    )
    assert out.shape == (P, H, V)
    np.testing.assert_array_equal(out[-3:], 0)
    for p in range(P - 3):
        context = pool.contexts[rows[p]][0][: positions[p] + 1]
        for h in range(H):
            keys = np.concatenate([context[:, :L] @ w_uk[h].T, context[:, L:]], axis=1)
            query = np.concatenate([q_nope[p, h], q_rope[p, h]])
            np.testing.assert_allclose(
                out[p, h], softmax_attention(query, keys, context[:, :L] @ w_uv[h].T, 0.2), atol=5e-5
            )


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("window", "sink"), WINDOWS_AND_SINKS)
def test_gqa_decode(n, window, sink):
    """No page before a window is read: it may hold anything."""
    rng = np.random.default_rng(n)
    lengths = [3, 8, 40, 72]
    pool = Pool(rng, lengths, [(K, D), (K, D)])
    q = rng.normal(size=(len(lengths), n, K, G, D)).astype(np.float32)
    bounds = np.array(lengths)[:, None] - (n - 1) + np.arange(n)
    for b in range(len(lengths) if window else 0):
        pool.forget(b, bounds[b, 0] - window)
    sinks = None if sink is None else (sink + rng.normal(size=(K, G))).astype(np.float32)
    out = gqa_decode(q, *pool.arrays, pool.tables, bounds.astype(np.int32), sinks, scale=0.4, window=window)
    for b, (keys, values) in enumerate(pool.contexts):
        for r in range(n):
            for kv in range(K):
                for g in range(G):
                    s, own = bounds[b, r], {} if sinks is None else {"sink": sinks[kv, g]}
                    want = softmax_attention(q[b, r, kv, g], keys[:s, kv], values[:s, kv], 0.4, window=window, **own)
                    np.testing.assert_allclose(out[b, r, kv, g], want, atol=2e-5)


@pytest.mark.parametrize(("window", "sink"), WINDOWS_AND_SINKS)
def test_gqa_prefill(window, sink):
    rng = np.random.default_rng(0)
    starts, chunks = (0, 9, 40), (5, 8, 1)
    ends = np.array(starts) + chunks
    pool = Pool(rng, ends, [(K, D), (K, D)])
    P, E = sum(chunks) + 2, len(chunks)
    rows = np.concatenate([np.repeat(np.arange(E), chunks), [E] * 2]).astype(np.int32)
    positions = np.concatenate([*(np.arange(s, e) for s, e in zip(starts, ends, strict=True)), [0] * 2]).astype(
        np.int32
    )
    q = rng.normal(size=(P, K, G, D)).astype(np.float32)
    for e in range(E if window else 0):
        pool.forget(e, starts[e] - window + 1)
    sinks = None if sink is None else (sink + rng.normal(size=(K, G))).astype(np.float32)
    where = pool.tables, rows, positions, ends.astype(np.int32)
    out = gqa_prefill(q, *map(jnp.asarray, pool.arrays), *where, sinks, scale=0.4, window=window)
    np.testing.assert_array_equal(out[-2:], 0)
    for p in range(P - 2):
        keys, values = pool.contexts[rows[p]]
        s = positions[p] + 1
        for kv in range(K):
            for g in range(G):
                own = {} if sinks is None else {"sink": sinks[kv, g]}
                want = softmax_attention(q[p, kv, g], keys[:s, kv], values[:s, kv], 0.4, window=window, **own)
                np.testing.assert_allclose(out[p, kv, g], want, atol=2e-5)


def test_a_window_equals_single_queries():
    """n query tokens of one request give what n requests of one query each give."""
    rng = np.random.default_rng(5)
    pool = Pool(rng, [21], [(L + R,)])
    q = rng.normal(size=(1, 4, H, L + R)).astype(np.float32)
    bounds = np.arange(18, 22, dtype=np.int32)
    window = mla_decode(q, pool.arrays[0], pool.tables, bounds[None], scale=0.3, value_dim=L)
    tables = np.repeat(pool.tables, 4, axis=0)
    single = mla_decode(q[0][:, None], pool.arrays[0], tables, bounds[:, None], scale=0.3, value_dim=L)
    np.testing.assert_allclose(window[0], single[:, 0], atol=1e-6)


def test_write_latent_norms_rotates_and_touches_nothing_else():
    rng = np.random.default_rng(0)
    T = 5
    kv_a = rng.normal(size=(T, L + R)).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, size=L).astype(np.float32)
    angles = rng.normal(size=(T, R // 2))
    pages, offsets = np.array([3, 3, 7, 0, 0]), np.array([6, 7, 0, 0, 0])
    cache = jnp.full((PAGES, PAGE, L + R), jnp.nan)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out = np.asarray(write_latent(cache, jnp.asarray(kv_a), jnp.asarray(weight), cos, sin, pages, offsets, eps=1e-6))
    c, k = kv_a[:, :L], kv_a[:, L:]
    c = weight * c / np.sqrt((c**2).mean(axis=1, keepdims=True) + 1e-6)
    z = (k[:, : R // 2] + 1j * k[:, R // 2 :]) * np.exp(1j * angles)
    want = np.concatenate([c, z.real, z.imag], axis=1)
    for t in range(3):
        np.testing.assert_allclose(out[pages[t], offsets[t]], want[t], atol=1e-5)
    untouched = np.ones((PAGES, PAGE), bool)
    untouched[pages, offsets] = False
    assert np.isnan(out[untouched]).all()


def test_write_kv():
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 3, K, D)).astype(np.float32)
    pages, offsets = np.array([2, 2, 5]), np.array([6, 7, 0])
    caches = jnp.zeros((2, PAGES, PAGE, K, D))
    new_k, new_v = write_kv(caches[0], caches[1], k, v, pages, offsets)
    np.testing.assert_array_equal(np.asarray(new_k)[pages, offsets], k)
    np.testing.assert_array_equal(np.asarray(new_v)[pages, offsets], v)
