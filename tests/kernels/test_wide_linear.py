"""The head on the experts' kernel of down: interpreted, lowered, and what it does not support."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe.wide_linear import unsupported_reason, wide_linear
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

# Hidden sizes and vocabularies of Moonlight, GLM-4.5-Air and MiniMax-M2.
HEADS = [(2048, 163840), (4096, 151552), (3072, 200064)]


@interpreted
@pytest.mark.parametrize("T", [1, 24, pytest.param(72, marks=pytest.mark.slow)])
def test_interpreted(T: int):
    """A token that is NaN reaches no other."""
    H, outputs = 256, 384
    weight = jax.random.normal(jax.random.key(0), (outputs, H), jnp.bfloat16) / H**0.5
    x = jax.random.normal(jax.random.key(1), (T, H), jnp.bfloat16)
    broken = (np.arange(T) == 1) & (T > 1)
    got = wide_linear(jnp.where(broken[:, None], jnp.nan, x), weight, blocks=2, interpret=detect_races())
    assert_no_races(got)
    want, sound = (np.asarray(a, np.float32) for a in (x.astype(jnp.float32) @ weight.astype(jnp.float32).T, got))
    assert np.isnan(sound[broken]).all()
    np.testing.assert_allclose(sound[~broken], want[~broken], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("T", [1, 32, pytest.param(128, marks=pytest.mark.slow)])
def test_lowers_for_the_gpu(T: int):
    for H, outputs in HEADS:
        shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, H), (outputs, H)))
        text = jax.jit(wide_linear).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 1
        assert "dot_general" not in text


@pytest.mark.parametrize(
    ("T", "H", "outputs", "reason"),
    [
        (12, 2048, 163840, "from 8 on in multiples of 8, not 12"),
        (136, 2048, 163840, "up to 128 tokens"),
        (8, 2048, 163850, "sizes that are multiples of 64, not 163850 and 2048"),
        (8, 2048, 4096, "at least 16896 outputs, not 4096"),
        (8, 2048, 163840, "an NVIDIA GPU"),
    ],
)
def test_says_what_it_does_not_support(T: int, H: int, outputs: int, reason: str):
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, H), (outputs, H)))
    assert reason in unsupported_reason(*shapes)
