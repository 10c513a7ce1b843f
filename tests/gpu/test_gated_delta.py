"""The Mosaic GPU kernel of gated_delta on the GPU, by its definition. Slots and tokens that it may not read are NaN."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.backend import Backends, use
from pallas_kernels.gated_delta.api import replay_and_read
from pallas_kernels.gated_delta.shapes import HEADS
from tests.kernels.gated_delta_cases import by_definition, random_call

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "n", "replayed"), [(1, 1, 0), (5, 1, 1), (5, 4, 4), (33, 2, 8)])
@pytest.mark.parametrize("heads", HEADS.values(), ids=list(HEADS))
def test_windows(heads, rows, n, replayed):
    """Three times on, because the third run is that of a recorded graph."""
    heads = heads._replace(K=2)
    call = random_call(heads, rows, n, replayed=replayed)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(states, *rest):
        with use(Backends(attention="mosaic")):
            read, states = replay_and_read(states, *rest, replayed=replayed)
        return read, states

    states, want = call.states + 0, call
    for _ in range(3):
        read, states = run(states, *call[1:])
        exact = by_definition(want, replayed)
        want = want._replace(states=exact[1])
    np.testing.assert_allclose(read, exact[0], atol=2e-5)
    np.testing.assert_allclose(states, exact[1], atol=2e-5)
