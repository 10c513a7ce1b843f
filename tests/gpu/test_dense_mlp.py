"""The MLP of a dense layer on the GPU, against the reference in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.moe import api, reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("T", [2, 8, 32, 128])
@pytest.mark.parametrize(("H", "inner"), [(4096, 10944), (2048, 11264)])
def test_mlp_of_a_dense_layer(H, inner, T):
    """A token that is NaN reaches no other."""
    keys = jax.random.split(jax.random.key(T), 3)
    shapes = (T, H), (2, inner, H), (H, inner)
    x, gate_up, down = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))
    gate_up, down, broken = gate_up * H**-0.5, down * inner**-0.5, np.arange(T) == 1
    with use(Backends()) as chosen, tuning.use(dataclasses.replace(tuning.current(), mlp_kernel_tokens=128)):
        got = jax.jit(api.mlp)(jnp.where(broken[:, None], jnp.nan, x), gate_up, down)
    assert chosen["dense_mlp"] == {"mosaic"}
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(reference.swiglu)(*(a.astype(jnp.float32) for a in (x, gate_up, down)))
    got, exact = np.asarray(got, np.float32), np.asarray(exact)
    assert np.isnan(got[broken]).all()
    assert np.abs(got - exact)[~broken].mean() <= 5e-3 * np.abs(exact[~broken]).mean()
