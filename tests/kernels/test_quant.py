"""Quantised weights as values: what they stand for, and that operations take them as they take arrays."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.models.layers import MLP
from jaxspec.models.params import TENSOR_AXIS, Declare, quantised, random_params
from pallas_kernels.backend import Backends, UnsupportedError, use
from pallas_kernels.moe.api import experts
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.reference import dequantise, linear
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL, INT4_G32, MXFP4, NVFP4, SCHEMES, Scheme
from pallas_kernels.quant.values import Quantised
from tests.kernels.quant_cases import drawn


def e4m3(bits: int) -> float:
    """The OCP FP8 specification, table 1: bias 7, no infinities."""
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if bits >> 7 else size


def value_of(code: int, scheme: Scheme) -> float:
    """Of four bits: two's complement, or sign, exponent of bias 1 and one bit of mantissa (OCP MX specification, 5.3.3)."""
    if scheme.values == "e4m3":
        return e4m3(code)
    if scheme.values == "int4":
        return code - 16 if code & 8 else code
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


def by_hand(weight: Quantised) -> np.ndarray:
    """Element by element, in float64."""
    scheme, bits = weight.scheme, np.asarray(weight.codes).view(np.uint8)
    if scheme.values != "e4m3":
        bits = np.stack([bits & 15, bits >> 4], axis=-1).reshape(*bits.shape[:-1], -1)
    factor = None if weight.factor is None else np.asarray(weight.factor, np.float64)
    exponents = scheme.scale == np.uint8
    scale = 2.0 ** (np.asarray(weight.scale, np.float64) - 127) if exponents else np.asarray(weight.scale, np.float64)
    out = np.empty(weight.shape)
    for at in itertools.product(*map(range, weight.shape)):
        *stack, row, column = at
        place = {
            "fp8_block": (*stack, row // 128, column // 128),
            "fp8_channel": (*stack, row),
            "int4_g32": (*stack, column // 32, row),
            "nvfp4": (*stack, column // 16, row),
            "mxfp4": (*stack, column // 32, row),
        }[scheme.name]
        out[at] = value_of(int(bits[at]), scheme) * scale[place]
        if factor is not None:
            out[at] = np.float32(out[at]) * factor[tuple(stack)]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
@pytest.mark.parametrize("shape", [(130, 260), (2, 3, 16, 192)], ids=str)
def test_partial_blocks(scheme: Scheme, shape: tuple[int, ...]):
    """A weight is its codes times their scales, also where a matrix ends inside a block or is smaller than one."""
    weight = drawn(scheme, *shape)
    want = by_hand(weight)
    np.testing.assert_array_equal(dequantise(weight, jnp.float32), want.astype(np.float32))
    rounded_once = want.astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(dequantise(weight, jnp.bfloat16), rounded_once)


@pytest.mark.slow
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


@pytest.mark.slow
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
    parameters = ExpertWeights(drawn(FP8_BLOCK, 2, 2, 64, 64), jnp.ones((2, 64, 64)))  # no kernel mixes these
    call = jnp.ones((1, 64)), parameters, jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.int32), jnp.ones(1, bool)
    with use(Backends(moe="mosaic")), pytest.raises(UnsupportedError, match="no weights in fp8_block"):
        experts(*call)
    with use(Backends(moe="auto")):
        assert experts(*call).shape == (1, 64)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
def test_random_weights_are_as_large_as_unquantised_ones(scheme: Scheme):
    """Standard deviation fan_in^-1/2, as benchmarks and tests have it."""
    mlp = quantised(MLP(512, 1024, Declare(jnp.float32)), {("gate_up",): scheme, ("down",): scheme})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
    for name, inputs in (("gate_up", 512), ("down", 1024)):
        weight = Quantised(**random_params(mlp, mesh)[name], scheme=scheme)
        assert jnp.std(dequantise(weight, jnp.float32)) == pytest.approx(inputs**-0.5, rel=0.25)


def error_ratio(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).mean() / np.abs(want).mean())


def rounded(x: np.ndarray) -> np.ndarray:
    """To bfloat16, in float64."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def test_rounding_alone_is_over_1e_3():
    """Why kernels' errors of 1e-3 are against references rounded where the kernels round: nothing else has an error here."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(200_000)
    for width in np.exp2(np.linspace(0, 1, 9)):
        assert error_ratio(rounded(width * normal), width * normal) == pytest.approx(1.41e-3, rel=0.02)
    # The extremes: all results just below a power of two, and just above.
    for low, high in ((2 - 1 / 16, 2), (1, 1 + 1 / 16)):
        results = rng.uniform(low, high, 200_000)
        assert error_ratio(rounded(results), results) == pytest.approx(2**-9 / results.mean(), rel=0.02)

    x = rounded(rng.standard_normal((32, 1024)))
    for scheme, of_weights, of_both in ((INT4_G32, 1.46e-3, 2.1e-3), (NVFP4, 0, 1.41e-3), (MXFP4, 0, 1.41e-3)):
        weight = drawn(scheme, 256, 1024, seed=1)
        weight = dataclasses.replace(weight, factor=None if weight.factor is None else jnp.ones_like(weight.factor))
        exact, in_registers = (
            x @ np.asarray(dequantise(weight, dtype), np.float64).T for dtype in (np.float32, jnp.bfloat16)
        )
        assert error_ratio(in_registers, exact) == pytest.approx(of_weights, rel=0.1)
        assert error_ratio(rounded(in_registers), exact) == pytest.approx(of_both, rel=0.1)
