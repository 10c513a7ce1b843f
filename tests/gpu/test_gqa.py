"""The kernels of grouped-query attention on the GPU, against the references in float32. All that no context owns is NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, use
from pallas_kernels.gqa_decode import reference as decode_reference
from pallas_kernels.gqa_decode import triton
from pallas_kernels.gqa_decode.api import gqa_decode
from pallas_kernels.gqa_decode.shapes import HEADS
from pallas_kernels.gqa_prefill import reference as prefill_reference
from pallas_kernels.gqa_prefill.api import gqa_prefill
from tests.kernels.paged_cases import flat_chunks, paged_pool, relative_error, window_bounds

pytestmark = pytest.mark.gpu

RAGGED = (1, 63, 64, 65, 128, 130, 700, 1024, 4096, 5000)


@pytest.fixture(params=["mosaic", "triton"])
def backend(request) -> str:
    return request.param


def caches(rng, lengths, K, D, dtype=jnp.bfloat16):
    """Keys, values and page tables."""
    pool, tables = paged_pool(rng, lengths, 2 * K * D)
    k, v = (jnp.asarray(part.reshape(-1, 64, K, D), dtype) for part in np.split(pool, 2, axis=-1))
    return k, v, tables


def exactly(reference, floats, ints, extra, **options):
    """With a window too, over whole contexts: only the mask knows of it."""
    with jax.default_matmul_precision("highest"):
        run = jax.jit(functools.partial(reference, **options))
        return np.asarray(run(*(x.astype(jnp.float32) for x in floats), *ints, *extra))


def sinks_of(rng, K, G, *, wanted):
    """None, or a score for each head as large as those of keys."""
    return (jnp.asarray(2 * rng.standard_normal((K, G)), jnp.float32),) if wanted else ()


def check_decode(backend, lengths, n, K, G, D, dtype=jnp.bfloat16, *, window=None, sinks=False):
    rng = np.random.default_rng(n * K * G + len(lengths))
    k, v, tables = caches(rng, lengths, K, D, dtype)
    # Large scores, so that a wrong mask shows.
    q = jnp.asarray(3 * rng.standard_normal((len(lengths), n, K, G, D), np.float32), dtype)
    bounds, extra = window_bounds(lengths, n), sinks_of(rng, K, G, wanted=sinks)
    options = {"scale": D**-0.5, "window": window}

    @jax.jit
    def run(*arrays):
        with use(Backends(attention=backend)):
            return gqa_decode(*arrays, **options)

    want = exactly(decode_reference.gqa_decode, (q, k, v), (tables, bounds), extra, **options)
    for _ in range(3):  # the third run is a recorded graph's
        got = run(q, k, v, tables, bounds, *extra)
    errors = [relative_error(*pair) for pair in zip(np.asarray(got, np.float32), want, strict=True)]
    assert max(errors) < 1e-2, f"relative errors {errors} of the requests"


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("G", [1, 4, 8])
@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_decode_of_ragged_lengths(backend, K, G, D):
    check_decode(backend, RAGGED, 4, K, G, D)


@pytest.mark.parametrize("n", range(1, 9))
def test_decode_windows(backend, n):
    check_decode(backend, RAGGED[:7], n, 8, 4, 128)


def test_decode_of_several_blocks_of_rows(backend):
    check_decode(backend, RAGGED, 5, 2, 32, 128)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("lengths", [(1,), (64,), (65,), (131072,), (64,) * 128, (1,) * 300, tuple(range(1, 1300, 10))])
def test_decode_of_adversarial_lengths(backend, lengths, D):
    check_decode(backend, lengths, 4, 2, 4, D)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("heads", HEADS.values(), ids=list(HEADS))
def test_decode_of_published_heads(backend, heads, n):
    if backend == "triton" and heads.columns not in triton.HEAD_DIMS:
        pytest.skip("Triton's kernel has no tiles of these columns")
    sizes = heads.keys, heads.group, heads.columns
    check_decode(backend, RAGGED, n, *sizes, window=heads.window, sinks=heads.sinks)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    ("window", "sinks"), [(1, True), (20, False), (64, True), (128, True), (200, False), (None, True)]
)
def test_decode_of_sliding_windows_and_sinks(window, sinks, D):
    """Windows that begin at pages' borders and inside them, longer and shorter than contexts."""
    check_decode("mosaic", (*RAGGED[:8], 131072), 4, 2, 8, D, window=window, sinks=sinks)


def test_decode_in_float16():
    check_decode("triton", RAGGED, 2, 8, 4, 128, jnp.float16)


def check_prefill(starts, chunks, padding, K, G, D, *, window=None, sinks=False):
    rng = np.random.default_rng(K * G)
    rows, positions, ends = flat_chunks(starts, chunks, padding)
    k, v, tables = caches(rng, ends, K, D)
    q = 3 * rng.standard_normal((len(rows), K, G, D), np.float32)
    q[rows == len(ends)] = np.nan
    q = jnp.asarray(q, jnp.bfloat16)
    extra, options = sinks_of(rng, K, G, wanted=sinks), {"scale": D**-0.5, "window": window}

    @jax.jit
    def run(*arrays):
        with use(Backends(attention="mosaic")):
            return gqa_prefill(*arrays, **options)

    where = (tables, rows, positions, ends)
    for _ in range(3):
        got = np.asarray(run(q, k, v, *where, *extra), np.float32)
    want = exactly(prefill_reference.gqa_prefill, (q, k, v), where, extra, **options)
    tokens = sum(chunks)
    np.testing.assert_array_equal(got[tokens:], 0)
    for own in np.split(np.arange(tokens), np.cumsum(chunks)[:-1]):
        if len(own):
            error = relative_error(got[own], want[own])
            assert error < 1e-2, f"relative error {error:.2e} in a chunk of {len(own)} tokens"


CHUNKS = [
    ((8192, 100, 0, 4095), (1, 63, 130, 40), 22),
    ((0,), (256,), 0),
    ((0, 8192, 100, 0, 2500, 64, 1), (1000, 1, 513, 0, 300, 64, 65), 105),
    ((6144,), (2048,), 0),
    ((8192, 5), (33, 61), 5),
]


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("K", "G"), [(1, 1), (8, 1), (2, 4), (8, 4), (4, 8)])
@pytest.mark.parametrize(("starts", "chunks", "padding"), CHUNKS)
def test_prefill(starts, chunks, padding, K, G, D):
    check_prefill(starts, chunks, padding, K, G, D)


@pytest.mark.parametrize("heads", HEADS.values(), ids=list(HEADS))
@pytest.mark.parametrize(("starts", "chunks", "padding"), [CHUNKS[0], CHUNKS[2]])
def test_prefill_of_published_heads(starts, chunks, padding, heads):
    sizes = heads.keys, heads.group, heads.columns
    check_prefill(starts, chunks, padding, *sizes, window=heads.window, sinks=heads.sinks)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("window", "sinks"), [(1, True), (20, False), (128, True), (700, False), (None, True)])
def test_prefill_of_sliding_windows_and_sinks(window, sinks, D):
    """Whole blocks of keys before the window; chunks longer than it, and one that begins at 0."""
    check_prefill(*CHUNKS[2], 2, 8, D, window=window, sinks=sinks)


@pytest.mark.parametrize("D", [64, 128])
def test_prefill_at_the_end_of_a_long_context(D):
    check_prefill((131072 - 200,), (200,), 56, 2, 4, D)
