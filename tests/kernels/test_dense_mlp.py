"""The MLP of a dense layer on the experts' kernels: interpreted, lowered, and what it does not support."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import dense_mlp, reference
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

# Hidden and inner size of GLM-4.5-Air's dense layers, whose inner size is no multiple of 128, and of Moonlight's.
SIZES = [(4096, 10944), (2048, 11264)]


def sized(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / shape[-1] ** 0.5


@interpreted
@pytest.mark.parametrize("T", [3, 24, pytest.param(72, marks=pytest.mark.slow)])
def test_interpreted(T: int):
    """A token that is NaN reaches no other."""
    H, inner = 256, 192
    gate_up, down, x = sized(2, inner, H), sized(H, inner, seed=1), sized(T, H, seed=2) * H**0.5
    broken = np.arange(T) == 1
    config = dataclasses.replace(dense_mlp.configure_mlp(T, H, inner), grid=2)
    dirty = jnp.where(broken[:, None], jnp.nan, x)
    got = dense_mlp.mlp(dirty, gate_up, down, config=config, interpret=detect_races())
    assert_no_races(got, kernels=2)
    assert got.shape == x.shape
    want = np.asarray(reference.swiglu(*(a.astype(jnp.float32) for a in (x, gate_up, down))))
    sound = np.asarray(got, np.float32)
    assert np.isnan(sound[broken]).all()
    assert np.abs(sound - want)[~broken].mean() <= 5e-3 * np.abs(want[~broken]).mean()


def shapes(T: int, H: int, inner: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, H), (2, inner, H), (H, inner))]


@pytest.mark.parametrize("T", [4, pytest.param(32, marks=pytest.mark.slow), 128])
def test_lowers_for_the_gpu(T: int):
    for H, inner in SIZES:
        text = jax.jit(dense_mlp.mlp).trace(*shapes(T, H, inner)).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 2
        assert "dot_general" not in text


@pytest.mark.parametrize(
    ("T", "H", "inner", "reason"),
    [
        (12, 4096, 10944, "from 8 on in multiples of 8, not 12"),
        (136, 4096, 10944, "up to 128 tokens"),
        (8, 4096, 10950, "sizes that are multiples of 64, not 4096 and 10950"),
        (8, 4096, 10944, "an NVIDIA GPU"),
    ],
)
def test_says_what_it_does_not_support(T: int, H: int, inner: int, reason: str):
    assert reason in dense_mlp.unsupported_reason(*shapes(T, H, inner))


@pytest.mark.parametrize("T", [2, 8, 64, 128])
def test_tiles_divide_mlps(T: int):
    for H, inner in SIZES:
        assert dense_mlp.worthwhile(H, inner)
        config = dense_mlp.configure_mlp(T, H, inner)
        for t, rows, columns in ((config.up, inner, H), (config.down, H, inner)):
            assert rows % (t.consumers * dense_mlp.M) == columns % t.depth == 0
            assert t.consumers == 1
            assert t.stages >= 3
    assert not dense_mlp.worthwhile(2048, 512)
