"""The kernels of grouped-query attention on the GPU, against the references in float32. All that no context owns is NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, use
from pallas_kernels.gqa_decode import reference as decode_reference
from pallas_kernels.gqa_decode.api import gqa_decode
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


def exactly(reference, floats, ints, scale):
    with jax.default_matmul_precision("highest"):
        run = jax.jit(functools.partial(reference, scale=scale))
        return np.asarray(run(*(x.astype(jnp.float32) for x in floats), *ints))


def check_decode(backend, lengths, n, K, G, D, dtype=jnp.bfloat16):
    rng = np.random.default_rng(n * K * G + len(lengths))
    k, v, tables = caches(rng, lengths, K, D, dtype)
    # Large scores, so that a wrong mask shows.
    q = jnp.asarray(3 * rng.standard_normal((len(lengths), n, K, G, D), np.float32), dtype)
    bounds = window_bounds(lengths, n)

    @jax.jit
    def run(*arrays):
        with use(Backends(attention=backend)):
            return gqa_decode(*arrays, scale=D**-0.5)

    want = exactly(decode_reference.gqa_decode, (q, k, v), (tables, bounds), D**-0.5)
    for _ in range(3):  # the third run is a recorded graph's
        got = run(q, k, v, tables, bounds)
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


def test_decode_in_float16():
    check_decode("triton", RAGGED, 2, 8, 4, 128, jnp.float16)


def check_prefill(starts, chunks, padding, K, G, D):
    rng = np.random.default_rng(K * G)
    rows, positions, ends = flat_chunks(starts, chunks, padding)
    k, v, tables = caches(rng, ends, K, D)
    q = 3 * rng.standard_normal((len(rows), K, G, D), np.float32)
    q[rows == len(ends)] = np.nan
    q = jnp.asarray(q, jnp.bfloat16)

    @jax.jit
    def run(*arrays):
        with use(Backends(attention="mosaic")):
            return gqa_prefill(*arrays, scale=D**-0.5)

    where = (tables, rows, positions, ends)
    for _ in range(3):
        got = np.asarray(run(q, k, v, *where), np.float32)
    want = exactly(prefill_reference.gqa_prefill, (q, k, v), where, D**-0.5)
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


@pytest.mark.parametrize("D", [64, 128])
def test_prefill_at_the_end_of_a_long_context(D):
    check_prefill((131072 - 200,), (200,), 56, 2, 4, D)
