"""Layers that families share, where another test would not see them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.layers import MLP, RMSNorm
from jaxspec.models.params import Declare
from pallas_kernels import tuning
from pallas_kernels.tuning import Tuning


@pytest.mark.torch
def test_centred_norms_are_rounded_once():
    """In bfloat16, as in the class; 1 + weight in bfloat16 would move a third of all results."""
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    H, rng = 256, np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((512, H)), dtype=torch.bfloat16)
    theirs, ours = Qwen3_5RMSNorm(H).bfloat16(), RMSNorm(H, 1e-6, Declare(jnp.bfloat16, centred_norms=True))
    weight = torch.tensor(0.3 * rng.standard_normal(H), dtype=torch.bfloat16)
    theirs.weight.data = weight
    ours.weight.set_value(jnp.asarray(weight.float().numpy()).astype(jnp.bfloat16))
    got = ours(jnp.asarray(x.float().numpy()).astype(jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    # Their square roots differ in the last bit of float32, which moves a few results.
    assert np.mean(np.asarray(got, np.float32) != theirs(x).detach().float().numpy()) < 1e-3


@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("centred", [False, True])
def test_an_mlp_that_makes_the_next_norm_too(centred: bool, parts: int):
    """Where sums and norms are kernels of their own: the stream is the same, and its norm what the next block would make."""
    T, H, inner, rng = 16, 64, 96, np.random.default_rng(1)
    declare = Declare(jnp.float32, centred_norms=centred)
    block, norm, following = MLP(H, inner, declare), RMSNorm(H, 1e-6, declare), RMSNorm(H, 1e-6, declare)
    for variable in (block.gate_up, block.down, norm.weight, following.weight):
        variable.set_value(jnp.asarray(0.3 * rng.standard_normal(variable.get_value().shape), jnp.float32))
    shape = (parts, T, H) if parts else (T, H)
    x, attended = (jnp.asarray(rng.standard_normal(size), jnp.float32) for size in ((T, H), shape))
    with tuning.use(Tuning()):
        want = block.add_to(x, attended, norm, jnp.ones(T, bool), following)
    with tuning.use(Tuning(row_kernel_tokens=T)):
        got = block.add_to(x, attended, norm, jnp.ones(T, bool), following)
    assert want.normed is None
    assert got.normed is not None
    np.testing.assert_allclose(got.x, want.x, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got.normed, want.norm(following), rtol=1e-5, atol=1e-6)
