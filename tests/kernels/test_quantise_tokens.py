"""The Mosaic GPU kernel that quantises tokens: interpreted, and lowered for CUDA; on a GPU see `tests/gpu/test_moe_fp8.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quant import activations
from pallas_kernels.quant.tokens import quantise_tokens
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted


def tokens(T, H):
    """Some of other magnitudes, one group of zeros, and a NaN in the last token."""
    rng = np.random.default_rng(T)
    x = rng.standard_normal((T, H)) * 10.0 ** rng.integers(-6, 3, size=(T, 1))
    x[0, :128] = 0
    x[-1, 130] = np.nan
    return jnp.asarray(x, jnp.bfloat16)


def check(got, want):
    np.testing.assert_array_equal(np.asarray(got.codes, np.float32), np.asarray(want.codes, np.float32))
    finite = ~np.isnan(want.scale)
    np.testing.assert_array_equal(np.where(finite, got.scale, 0), np.where(finite, want.scale, 0))


@interpreted
@pytest.mark.parametrize(("T", "H"), [(1, 512), (3, 1024)])
def test_interpreted_without_races(T, H):
    x = tokens(T, H)
    got = quantise_tokens(x, interpret=detect_races())
    assert_no_races(got)
    check(got, activations.quantise(x))


@pytest.mark.parametrize("H", [2048, 7168])
def test_lowers_for_cuda(H):
    traced = jax.jit(quantise_tokens).trace(jax.ShapeDtypeStruct((32, H), jnp.bfloat16))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2(") == 1


def test_other_sizes_are_plain_xla():
    x = tokens(2, 640)
    check(quantise_tokens(x), activations.quantise(x))
