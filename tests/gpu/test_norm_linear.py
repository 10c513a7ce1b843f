"""The Mosaic GPU kernel of norm_linear on the GPU, against the reference in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.norm_linear import mosaic, reference
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
        got = run(x, gain, weights, delta=delta)
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
