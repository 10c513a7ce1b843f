"""Sums over devices: the reference on CPU devices, and the kernel as far as it can be seen without GPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import tuning
from pallas_kernels.peer_sum import api, mosaic, reference

ON_EACH = PartitionSpec("tensor")


def over(devices: int, call):
    """Of [devices * T, H] parts, the results of all devices likewise."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    return jax.jit(
        jax.shard_map(
            lambda part: call(part, "tensor"), mesh=mesh, in_specs=ON_EACH, out_specs=ON_EACH, check_vma=False
        )
    )


@pytest.mark.parametrize("devices", [2, 4])
def test_the_reference_adds_in_the_order_of_the_devices(devices):
    """In float32, rounded once, with the same bits on each; NaN stays in its own column."""
    parts = np.random.default_rng(devices).standard_normal((devices, 3, 128)).astype(ml_dtypes.bfloat16)
    parts[-1, 1, 5] = np.nan
    want = np.zeros((3, 128), np.float32)
    for part in parts.astype(np.float32):
        want += part
    got = np.asarray(over(devices, reference.total)(parts.reshape(-1, 128))).reshape(devices, 3, 128)
    for each in got:
        np.testing.assert_array_equal(each.astype(np.float32), want.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("devices", [2, 4])
def test_two_phases_are_the_sum(devices):
    """And the reference's are XLA's collectives, of whole numbers, which any order adds up alike."""
    parts = np.random.default_rng(devices).integers(-8, 8, (devices * 8, 128)).astype(ml_dtypes.bfloat16)
    whole = np.asarray(over(devices, reference.total)(parts))
    in_two = over(devices, lambda part, axis: reference.gather(reference.scatter_sum(part, axis), axis))
    np.testing.assert_array_equal(np.asarray(in_two(parts)), whole)
    for name in ("total", "scatter_sum", "gather"):
        want, got = (np.asarray(over(devices, getattr(way, name))(parts)) for way in (api, reference))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "devices", "T", "H", "kernels"),
    [("total", 2, 1, 2048, 1), ("total", 2, 512, 2048, 1), ("total", 4, 128, 7168, 2), ("scatter_sum", 2, 8, 2048, 1),
     ("gather", 2, 8, 2048, 1)],
)  # fmt: skip
def test_lowers_for_cuda(name, devices, T, H, kernels):
    """Inside a shard_map, as kernels that ask for the other devices' addresses and no collective of XLA's."""
    part = jax.ShapeDtypeStruct((devices * T, H), jnp.bfloat16)
    text = over(devices, getattr(mosaic, name)).trace(part).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == kernels
    assert not any(each in text for each in ("all_reduce", "all_gather", "reduce_scatter"))


def test_only_small_sums_ask_for_the_kernel(monkeypatch):
    """By bytes, and where it runs."""
    monkeypatch.setattr(mosaic, "hopper_unsupported_reason", lambda *_: None)
    monkeypatch.setattr(mosaic, "total", lambda part, axis: reference.total(part, axis) + 1)  # to be told apart
    small, large = jnp.ones((4, 128), jnp.bfloat16), jnp.ones((8, 128), jnp.bfloat16)
    odd = jnp.ones((4, 100), jnp.bfloat16)
    with tuning.use(dataclasses.replace(tuning.current(), peer_sum_bytes=2 * 128 * 2)):
        for part, want in ((small, 3), (large, 2), (odd, 2)):
            np.testing.assert_array_equal(over(2, api.total)(part), np.full(part.shape, want))
    np.testing.assert_array_equal(over(2, api.total)(small), np.full(small.shape, 2))


@pytest.mark.parametrize(
    ("shape", "message"), [((4, 128, 2), "3 axes"), ((4, 100), "multiple of 128"), ((4, 128), "GPU")]
)
def test_what_the_kernel_lacks(shape, message):
    reasons = []

    def ask(part, axis):
        reasons.append(mosaic.unsupported_reason(part, axis))
        return part

    over(2, ask)(jnp.zeros(shape, jnp.bfloat16))
    assert message in reasons[0]
