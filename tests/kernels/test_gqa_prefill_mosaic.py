"""The Mosaic GPU kernel of gqa_prefill without a GPU: interpreted with race detection, and lowered for cuda.

Interpreted, attention keeps softmax weights in shared memory; on the GPU they stay in registers (tests/gpu).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, UnsupportedError, use
from pallas_kernels.gqa_prefill import mosaic, reference
from pallas_kernels.gqa_prefill.api import gqa_prefill
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import flat_chunks, paged_pool
from tests.matrices import full

slow = pytest.mark.slow


def check_interpreted(starts, chunks, K, G, D, padding=3, *, window=None, sinks=False):
    rng = np.random.default_rng(0)
    rows, positions, ends = flat_chunks(starts, chunks, padding)
    pool, tables = paged_pool(rng, ends, 2 * K * D)
    k, v = (jnp.asarray(part.reshape(-1, 64, K, D), jnp.bfloat16) for part in np.split(pool, 2, axis=-1))
    # Large scores, so that a wrong mask shows.
    q = 3 * rng.standard_normal((len(rows), K, G, D))
    q[rows == len(ends)] = np.nan
    floats, ints = (jnp.asarray(q, jnp.bfloat16), k, v), (tables, rows, positions, ends)
    extra = (jnp.asarray(2 * rng.standard_normal((K, G)), jnp.float32),) if sinks else ()
    options = {"scale": D**-0.5, "window": window}
    run = functools.partial(mosaic.gqa_prefill, **options, interpret=detect_races())
    got = np.asarray(jax.jit(run)(*floats, *ints, *extra), np.float32)
    assert_no_races(got)
    exact = [x.astype(jnp.float32) for x in floats]
    want = np.asarray(jax.jit(functools.partial(reference.gqa_prefill, **options))(*exact, *ints, *extra))
    tokens = sum(chunks)
    np.testing.assert_array_equal(got[tokens:], 0)
    assert np.isfinite(got).all()
    for own in np.split(np.arange(tokens), np.cumsum(chunks)[:-1]):
        error = np.linalg.norm(got[own] - want[own]) / max(np.linalg.norm(want[own]), 1e-9)
        assert error <= 1e-2, f"relative error {error:.2e} in a chunk of {len(own)} tokens"


@slow
@interpreted
def test_interpreted_without_races():
    """Two requests with a tile each, the second's context ending inside a page, and one request without tokens."""
    check_interpreted((70, 0, 130), (60, 0, 13), K=1, G=2, D=64)


@slow
@interpreted
@pytest.mark.parametrize(
    ("starts", "chunks", "K", "G", "D"),
    [
        ((0, 64, 100), (1, 63, 64), 2, 2, 128),
        ((300, 0, 64), (65, 0, 130), 1, 4, 64),  # a request over two tiles, more blocks than stages
        ((0,), (256,), 2, 1, 64),
        ((127, 128, 1), (1, 129, 65), 1, 1, 128),
        ((100, 0), (70, 30), 1, 2, 256),
    ],
)
def test_interpreted_ragged(starts, chunks, K, G, D):
    check_interpreted(starts, chunks, K, G, D)


@slow
@interpreted
@pytest.mark.parametrize(
    ("D", "window", "sinks"), [(64, 128, True), (64, 20, False), (64, None, True), (128, 1, True), (256, 70, True)]
)
def test_interpreted_sliding_windows(D, window, sinks):
    """Whole blocks of keys before the window; a chunk longer than it; one that begins at 0."""
    check_interpreted((400, 30, 0), (140, 3, 9), K=1, G=2, D=D, window=window, sinks=sinks)


@pytest.mark.parametrize(
    ("tokens", "K", "G", "D", "window"),
    [
        (2048, 8, 4, 128, None),
        (2048, 8, 8, 64, 128),
        pytest.param(2048, 2, 8, 256, None, marks=slow),
        *full((2048, 8, 12, 128, None), (2048, 8, 6, 128, None), (40, 8, 8, 64, None), (256, 1, 1, 128, None)),
    ],
)
def test_lowers_for_cuda(tokens, K, G, D, window):
    """A window with sinks."""
    S, E = jax.ShapeDtypeStruct, 8
    floats = [(tokens, K, G, D), (1000, 64, K, D), (1000, 64, K, D)]
    args = [S(shape, jnp.bfloat16) for shape in floats]
    args += [S(shape, jnp.int32) for shape in ((E, 64), (tokens,), (tokens,), (E,))]
    args += [S((K, G), jnp.float32)] if window else []
    run = jax.jit(functools.partial(mosaic.gqa_prefill, scale=D**-0.5, window=window))
    text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1


def test_a_backend_that_cannot_run_says_why():
    q, cache = jnp.zeros((3, 2, 4, 64), jnp.bfloat16), jnp.zeros((2, 64, 2, 64), jnp.bfloat16)
    rows, ends = jnp.zeros((3,), jnp.int32), jnp.array([3])
    where = jnp.zeros((1, 1), jnp.int32), rows, rows, ends
    with use(Backends(attention="mosaic")), pytest.raises(UnsupportedError, match=r"needs an NVIDIA GPU.*'reference'"):
        gqa_prefill(q, cache, cache, *where, scale=1.0)
    for attention in ("auto", "triton"):
        with use(Backends(attention=attention)) as chosen:
            jax.eval_shape(functools.partial(gqa_prefill, scale=1.0), q, cache, cache, *where)
        assert chosen == {"gqa_prefill": {"reference"}}
    assert mosaic.unsupported_reason(q[..., :16], cache, cache) == "it supports heads of 64, 128 or 256, not 16"
    assert mosaic.unsupported_reason(q, cache[:, :16], cache) == "it supports pages of 64 tokens, not 16"
