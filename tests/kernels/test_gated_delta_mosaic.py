"""gated_delta: the reference against its definition; the Mosaic GPU kernel interpreted, and lowered for cuda."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, UnsupportedError, use
from pallas_kernels.gated_delta import mosaic
from pallas_kernels.gated_delta.api import replay_and_read
from pallas_kernels.gated_delta.reference import Tokens
from pallas_kernels.gated_delta.shapes import CALLS, HEADS, Heads
from tests.kernels.gated_delta_cases import by_definition, random_call
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

SMALL = Heads(2, 2, 16, 64, 1)
CASES = [(SMALL, 3, 1, 2), (SMALL._replace(fades=16), 2, 2, 2), (Heads(1, 2, 16, 128, 1), 3, 2, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "rows", "n", "replayed"), CASES)
def test_the_reference_is_the_definition(heads, rows, n, replayed):
    call = random_call(heads, rows, n, replayed=replayed)
    for got, want in zip(replay_and_read(*call, replayed=replayed), by_definition(call, replayed), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("heads", "rows", "n", "replayed"), CASES)
def test_interpreted_without_races(heads, rows, n, replayed):
    call = random_call(heads, rows, n, replayed=replayed)
    got = mosaic.replay_and_read(*call, replayed=replayed, interpret=detect_races())
    for ours, want in zip(got, by_definition(call, replayed), strict=True):
        np.testing.assert_allclose(ours, want, atol=1e-5)
    assert_no_races(got)


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS.values(), ids=list(HEADS))
@pytest.mark.parametrize(("rows", "n"), CALLS)
def test_lowers_for_cuda(heads, rows, n):
    f = jax.jit(functools.partial(mosaic.replay_and_read, replayed=n), donate_argnums=0)
    K, R, dk, dv, fades = heads

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    leading = (rows, 2 * n, K)
    tokens = Tokens(
        shape(*leading, dk), shape(*leading, dk), shape(*leading, R, dv), shape(*leading, R, fades), shape(*leading, R)
    )
    places = [shape(rows, dtype=jnp.int32)] * 2
    text = f.trace(shape(rows + 1, 1, K, R, dv, dk), *places, tokens).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    assert "output_operand_alias" in text  # in place


def test_unsupported_sizes_run_on_the_reference():
    heads = Heads(1, 1, 12, 64, 1)
    call = random_call(heads, 1, 1, replayed=1)
    assert "keys of a multiple of 8 up to 128, not 64 and 12" in mosaic.unsupported_reason(call.states)
    with use(Backends(attention="auto")) as chosen:
        replay_and_read(*call, replayed=1)
    assert chosen == {"gated_delta": {"reference"}}
    with use(Backends(attention="mosaic")), pytest.raises(UnsupportedError, match="keys of a multiple of 8"):
        replay_and_read(*call, replayed=1)
