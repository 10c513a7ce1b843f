"""The kernel that copies rows to slots, interpreted on the CPU with race detection, and lowered for cuda."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, use
from pallas_kernels.row_write import api, mosaic, reference
from pallas_kernels.sampling import parts
from pallas_kernels.sampling.shapes import VOCABULARIES
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

S, K = 5, 3


def bits(array: jax.Array) -> np.ndarray:
    """So that one NaN is not like another."""
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}")


def case(R: int, V: int, dtype, slots: int = S) -> tuple[jax.Array, jax.Array, jax.Array]:
    """An array [slots, K, V] of NaN, at most as many rows, of which every third goes nowhere and is NaN, and their slots."""
    rng = np.random.default_rng(R + V)
    nowhere = np.arange(R) % 3 == 1
    slots_R = rng.permutation(slots)[:R].astype(np.int32)
    slots_R[nowhere] = np.resize([slots, slots + 7, 2**31 - 1], nowhere.sum())
    rows = rng.normal(size=(R, V)).astype(np.float32)
    rows[:, ::7], rows[:, 3::11] = -np.inf, 0.0
    rows[nowhere] = np.nan
    return jnp.full((slots, K, V), jnp.nan, dtype), jnp.asarray(rows, dtype), jnp.asarray(slots_R)


def wanted(array: jax.Array, i: int, rows: jax.Array, slots: jax.Array) -> np.ndarray:
    """Row by row in NumPy, the bits of the result."""
    out = bits(array).copy()
    for row, slot in zip(bits(rows), np.asarray(slots), strict=True):
        if slot < len(out):
            out[slot, i] = row
    return out


@interpreted
@pytest.mark.parametrize(
    ("V", "dtype", "multiprocessors"),
    [
        (1024, jnp.bfloat16, 132),  # one vector
        (1400, jnp.bfloat16, 132),  # a second one that overlaps it
        (3 * 512, jnp.float32, 132),  # three vectors, fewer than are loaded at once
        (13 * 1024 + 8, jnp.bfloat16, 1),  # one block with groups of vectors, single ones and one that overlaps
        (13 * 512 + 4, jnp.float32, 1),
        (9 * 1024 + 256, jnp.bfloat16, 132),  # three blocks, the last with one vector and one that overlaps it
    ],
    ids=str,
)
def test_interpreted_without_races(monkeypatch, V, dtype, multiprocessors):
    """Each bit of the rows that have a slot is there, and no other row, draft or slot is touched."""
    monkeypatch.setattr(parts, "multiprocessors", lambda: multiprocessors)
    mosaic.write_rows.clear_cache()
    args = case(4, V, dtype)
    for i in (0, K - 1):
        array, rows, slots = args
        got = mosaic.write_rows(array, i, rows, slots, interpret=detect_races())
        assert_no_races(got)
        np.testing.assert_array_equal(bits(got), want := wanted(array, i, rows, slots))
        np.testing.assert_array_equal(bits(reference.write_rows(array, i, rows, slots)), want)
    mosaic.write_rows.clear_cache()


@interpreted
def test_rows_that_go_nowhere_write_nothing():
    array, rows, _ = case(3, 1400, jnp.bfloat16)
    got = mosaic.write_rows(array, 1, rows, jnp.full(3, S), interpret=detect_races())
    np.testing.assert_array_equal(bits(got), bits(array))
    assert_no_races(got)


def lowered(R: int, V: int, dtype, k: int = K) -> str:
    """Of k writes one after the other to a donated array."""

    def write(array, rows, slots):
        for i in range(k):
            array = mosaic.write_rows(array, i, rows[i], slots)
        return array

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    args = shape((129, k, V)), [shape((R, V))] * k, jax.ShapeDtypeStruct((R,), jnp.int32)
    traced = jax.jit(write, donate_argnums=0).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("V", [*VOCABULARIES.values(), 200064 // 2, 129280 // 8])
@pytest.mark.parametrize("R", [1, 128])
def test_lowers_for_cuda_in_place(R, V, dtype):
    """Every write is given the array that the one before left, as what it writes into; nothing else makes such an array."""
    text = lowered(R, V, dtype)
    kernels = re.findall(r"custom_call @mosaic_gpu_v2\(.*", text)
    assert len(kernels) == K
    assert all("output_operand_alias" in kernel for kernel in kernels)
    made_by = re.findall(rf"%\w+ = ([\w.]+) .*tensor<129x{K}x{V}x\w+>$", text, re.MULTILINE)
    assert set(made_by) == {"stablehlo.custom_call", "call"}
    assert "tf.aliasing_output = 0" in text


def test_unsupported_calls_run_on_the_reference_and_say_why():
    args = case(4, 1020, jnp.bfloat16)
    with use(Backends()) as chosen:
        got = api.write_rows(args[0], 1, *args[1:])
    assert chosen == {"row_write": {"reference"}}
    np.testing.assert_array_equal(bits(got), wanted(args[0], 1, *args[1:]))

    def reason(V, dtype, of_rows=None):
        shape = jax.ShapeDtypeStruct
        return mosaic.unsupported_reason(shape((S, K, V), dtype), shape((4, V), of_rows or dtype)) or ""

    assert "at least 1024 columns" in reason(1020, jnp.bfloat16)
    assert "multiples of 16 bytes, not 4001 columns" in reason(4001, jnp.float32)
    assert "not float32 to bfloat16" in reason(4096, jnp.bfloat16, jnp.float32)
    assert "it needs an NVIDIA GPU" in reason(4096, jnp.bfloat16)
