"""The Mosaic GPU kernel of gqa_decode, interpreted on the CPU with race detection, and lowered for cuda."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, UnsupportedError, use
from pallas_kernels.gqa_decode import mosaic, reference
from pallas_kernels.gqa_decode.api import gqa_decode
from pallas_kernels.sliding_window import window_pages
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import paged_pool, relative_error, window_bounds
from tests.kernels.schedule_cases import check_attention, chosen
from tests.kernels.schedule_cases import gqa_decode as gqa_decode_of_both
from tests.matrices import full

slow = pytest.mark.slow


def check_interpreted(lengths, n, K, G, D, sms, *, window=None, sinks=False):
    rng = np.random.default_rng(0)
    pool, tables = paged_pool(rng, lengths, 2 * K * D)
    k, v = (jnp.asarray(part.reshape(-1, 64, K, D), jnp.bfloat16) for part in np.split(pool, 2, axis=-1))
    # Large scores, so that a wrong mask shows.
    q = jnp.asarray(3 * rng.standard_normal((len(lengths), n, K, G, D)), jnp.bfloat16)
    bounds = window_bounds(lengths, n)
    if window:
        tables, bounds = window_pages(jnp.asarray(tables), jnp.asarray(bounds), page_size=64, window=window)
    extra = (jnp.asarray(2 * rng.standard_normal((K, G)), jnp.float32),) if sinks else ()
    options = {"scale": D**-0.5, "window": window}
    got = mosaic.gqa_decode(q, k, v, tables, bounds, *extra, **options, sms=sms, interpret=detect_races())

    exact = [a.astype(jnp.float32) for a in (q, k, v)]
    want = reference.gqa_decode(*exact, jnp.asarray(tables), jnp.asarray(bounds), *extra, **options)
    assert got.shape == want.shape
    assert relative_error(got, want) < 1e-2
    assert_no_races(got)


@interpreted
def test_interpreted_without_races():
    """One request in several items, the other in one; a window over two pages."""
    check_interpreted((150, 66), n=4, K=1, G=4, D=64, sms=2)


@slow
@interpreted
@pytest.mark.parametrize("sms", [1, 2, 8])
def test_sink_independent_of_splits(sms):
    """A sink counts once, in one item or in several."""
    check_interpreted((150, 333), n=2, K=2, G=3, D=64, sms=sms, sinks=True)


@slow
@interpreted
@pytest.mark.parametrize(
    ("n", "G", "D", "window", "sinks"),
    [
        (4, 8, 64, 128, True),
        (1, 2, 64, 20, False),
        (1, 6, 64, 70, True),
        (3, 2, 128, 1, True),
        (8, 16, 64, 200, True),
        (2, 2, 256, 70, False),
    ],
)
def test_interpreted_sliding_windows(n, G, D, window, sinks):
    """Contexts shorter and longer than the window, which begins inside pages."""
    check_interpreted((300, 65, 129, 8), n, K=1, G=G, D=D, sms=2, window=window, sinks=sinks)


@slow
@interpreted
@pytest.mark.parametrize(
    ("lengths", "n", "K", "G", "D", "sms"),
    [
        ((70, 200, 64, 333, 1), 4, 2, 4, 128, 8),  # some requests split, some not, a window longer than its context
        ((130, 128, 513), 1, 4, 1, 64, 1),  # more blocks than fit at once
        ((65, 300), 3, 1, 32, 128, 3),  # two blocks of query rows, the second half empty
        ((65, 129, 1), 8, 2, 8, 64, 4),  # a full block of rows
        ((700,), 2, 2, 2, 128, 1),  # many times the stages in one item
        ((130, 400), 3, 1, 4, 256, 2),  # a single stage
        ((65, 300), 4, 1, 12, 128, 2),  # rows of a group that fill no whole block
        ((130,), 4, 2, 6, 128, 2),
        ((150, 66, 333), 1, 2, 6, 64, 2),  # a single token: key heads are packed, no rows between them
        ((65, 300, 1), 1, 3, 12, 128, 3),
        ((130, 67), 1, 1, 4, 128, 1),  # fewer rows in all than a tile has
        ((130,), 1, 2, 12, 256, 1),  # not packed
    ],
)
def test_interpreted_ragged(lengths, n, K, G, D, sms):
    check_interpreted(lengths, n, K, G, D, sms)


@slow
@interpreted
@pytest.mark.parametrize("n", range(1, 9))
def test_interpreted_windows(n):
    check_interpreted((64, 67, 200), n, K=2, G=2, D=64, sms=3)


def lowered(batch, n, K, G, D, window=None):
    call = functools.partial(mosaic.gqa_decode, scale=D**-0.5, sms=132, window=window)
    cache = jax.ShapeDtypeStruct((1000, 64, K, D), jnp.bfloat16)
    shapes = (
        jax.ShapeDtypeStruct((batch, n, K, G, D), jnp.bfloat16),
        cache,
        cache,
        jax.ShapeDtypeStruct((batch, 64), jnp.int32),
        jax.ShapeDtypeStruct((batch, n), jnp.int32),
        *([jax.ShapeDtypeStruct((K, G), jnp.float32)] if window else []),
    )
    return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("batch", "n", "K", "G", "D", "window"),
    [
        (1, 1, 8, 4, 128, None),  # Llama 3, one request
        (8, 4, 8, 8, 64, 128),  # gpt-oss
        pytest.param(8, 4, 2, 8, 256, None, marks=slow),  # Qwen3.5
        *full(
            (8, 4, 8, 6, 128, None),  # MiniMax-M2
            (8, 4, 8, 12, 128, None),  # GLM-4.5
            (32, 4, 8, 8, 64, None),
            (8, 5, 4, 8, 128, None),
            (200, 1, 1, 1, 64, None),
            (2, 8, 2, 16, 128, None),
        ),
    ],
)
def test_lowers_for_cuda(batch, n, K, G, D, window):
    """A window with sinks."""
    text = lowered(batch, n, K, G, D, window)
    assert text.count("@mosaic_gpu_v2(") == 2
    assert "output_operand_alias" in text  # the merge writes into the first kernel's output


def test_lowers_with_the_schedule_in_a_kernel():
    text = chosen(lowered, 8, 4, 8, 8, 64, 128, schedule_kernel=True)
    assert text.count("@mosaic_gpu_v2(") == 3


@interpreted
@pytest.mark.parametrize("window", [None, pytest.param(70, marks=slow)])
def test_the_schedule_in_a_kernel_changes_no_bit(window):
    assert_no_races(check_attention(functools.partial(gqa_decode_of_both, window=window), detect_races()), kernels=5)


def test_a_backend_that_cannot_run_says_why():
    q, cache = jnp.zeros((1, 1, 2, 4, 64), jnp.bfloat16), jnp.zeros((2, 64, 2, 64), jnp.bfloat16)
    where = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32)
    with use(Backends(attention="mosaic")), pytest.raises(UnsupportedError, match=r"needs an NVIDIA GPU.*'reference'"):
        gqa_decode(q, cache, cache, *where, scale=1.0)
    with use(Backends(attention="auto")) as chosen:
        jax.eval_shape(functools.partial(gqa_decode, scale=1.0), q, cache, cache, *where)
    assert chosen == {"gqa_decode": {"reference"}}
    assert mosaic.unsupported_reason(q[..., :16], cache, cache) == "it supports heads of 64, 128 or 256, not 16"
    assert mosaic.unsupported_reason(q, cache[:, :16], cache) == "it supports pages of 64 tokens, not 16"
