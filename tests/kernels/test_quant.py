"""Quantised weights as values: what they stand for, and that operations take them as they take arrays."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backend import Backends, UnsupportedError, use
from pallas_kernels.moe.api import experts
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.reference import dequantise, linear
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL, SCHEMES, Scheme
from pallas_kernels.quant.values import Quantised


def drawn(scheme: Scheme, *shape: int, seed: int = 0) -> Quantised:
    """Every code that is a number, and scales of all sizes."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 256, shape, np.uint8)
    codes = np.where(bits & 0x7F == 0x7F, bits - 1, bits).view(scheme.codes)  # without the two NaN
    scale = rng.uniform(0.001, 0.1, scheme.scale_shape(shape)).astype(scheme.scale)
    return Quantised(jnp.asarray(codes), jnp.asarray(scale), scheme)


def e4m3(bits: int) -> float:
    """The OCP FP8 specification, table 1: bias 7, no infinities."""
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if bits >> 7 else size


def by_hand(weight: Quantised) -> np.ndarray:
    """Element by element, in float64."""
    bits, scale = np.asarray(weight.codes).view(np.uint8), np.asarray(weight.scale, np.float64)
    out = np.empty(weight.shape)
    for at in itertools.product(*map(range, weight.shape)):
        *stack, row, column = at
        place = {
            "fp8_block": (*stack, row // 128, column // 128),
            "fp8_channel": (*stack, row),
        }[weight.scheme.name]
        out[at] = e4m3(int(bits[at])) * scale[place]
    return out


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
@pytest.mark.parametrize("shape", [(130, 260), (2, 3, 64, 192)], ids=str)
def test_partial_blocks(scheme: Scheme, shape: tuple[int, ...]):
    """A weight is its codes times their scales, also where a matrix ends inside a block or is smaller than one."""
    weight = drawn(scheme, *shape)
    want = by_hand(weight)
    np.testing.assert_array_equal(dequantise(weight, jnp.float32), want.astype(np.float32))
    rounded_once = want.astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(dequantise(weight, jnp.bfloat16), rounded_once)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
def test_operations_take_them(scheme: Scheme):
    """As they take the array that the value stands for, bit for bit; and no array is turned into one on the way."""
    rng = np.random.default_rng(1)
    E, H, inner, S = 4, 160, 136, 272
    given = ExpertWeights(
        drawn(scheme, E, 2, inner, H), drawn(scheme, E, H, inner), (drawn(scheme, 2, S, H), drawn(scheme, H, S))
    )
    arrays = jax.tree.map(lambda w: dequantise(w, jnp.float32), given, is_leaf=lambda node: isinstance(node, Quantised))
    x = rng.normal(size=(5, H)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[:2] for _ in x]).astype(np.int32)
    call = ids.astype(np.float32) + 1, ids, np.arange(5) != 2
    run = jax.jit(experts)
    np.testing.assert_array_equal(run(x, given, *call), run(x, arrays, *call))
    np.testing.assert_array_equal(linear(x, given.gate_up), linear(x, arrays.gate_up))
    assert linear(x, given.gate_up).shape == (5, E, 2, inner)


def test_unquantised_weights_are_left_alone():
    weight = jnp.ones((3, 4), jnp.bfloat16)
    assert dequantise(weight, jnp.float32) is weight


def test_nan_stays_in_its_row_fp8():
    """A scale that is NaN reaches the outputs of its own block; a dead token's NaN reaches no other token."""
    weight = drawn(FP8_CHANNEL, 6, 8)
    weight = Quantised(weight.codes, weight.scale.at[2].set(jnp.nan), FP8_CHANNEL)
    assert np.isnan(linear(jnp.ones((1, 8)), weight))[0].tolist() == [False, False, True, False, False, False]
    parameters = ExpertWeights(drawn(FP8_BLOCK, 2, 2, 16, 8), drawn(FP8_BLOCK, 2, 8, 16))
    x, ids = jnp.ones((3, 8)).at[1].set(jnp.nan), jnp.zeros((3, 1), jnp.int32)
    out = experts(x, parameters, jnp.ones((3, 1)), ids, jnp.array([True, False, True]))
    assert jnp.isfinite(out[jnp.array([0, 2])]).all()


def test_kernels_for_arrays_name_the_scheme():
    parameters = ExpertWeights(drawn(FP8_BLOCK, 2, 2, 64, 64), drawn(FP8_BLOCK, 2, 64, 64))
    call = jnp.ones((1, 64)), parameters, jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.int32), jnp.ones(1, bool)
    with use(Backends(moe="mosaic")), pytest.raises(UnsupportedError, match="no weights in fp8_block"):
        experts(*call)
    with use(Backends(moe="auto")):
        assert experts(*call).shape == (1, 64)
