"""Layers that families share, where another test would not see them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.layers import RMSNorm
from jaxspec.models.params import Declare


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
