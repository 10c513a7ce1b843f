"""Sums over devices: the reference on CPU devices, and the kernel as far as it can be seen without GPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import tuning
from pallas_kernels.peer_sum import api, mailbox, mosaic, reference

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
    ("name", "devices", "T", "H", "dtype", "kernels"),
    [("total", 2, 1, 2048, "bfloat16", 1), ("total", 2, 512, 2048, "bfloat16", 1), ("total", 4, 128, 7168, "bfloat16", 2),
     ("scatter_sum", 2, 8, 2048, "bfloat16", 1), ("gather", 4, 8, 2048, "bfloat16", 1), ("gather", 2, 1, 384, "int32", 1)],
)  # fmt: skip
def test_lowers_for_cuda(name, devices, T, H, dtype, kernels):
    """Inside a shard_map, as ordinary kernels, which graphs hold, and no collective of XLA's."""
    part = jax.ShapeDtypeStruct((devices * T, H), dtype)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    addresses = jax.ShapeDtypeStruct((devices, 2 * devices + 1), jnp.int32)
    kernel = getattr(mosaic, name)
    call = jax.shard_map(
        kernel if name != "gather" else lambda part, boxes: kernel([part], boxes)[0],
        mesh=mesh,
        in_specs=(ON_EACH, ON_EACH),
        out_specs=ON_EACH,
        check_vma=False,
    )
    text = jax.jit(call).trace(part, addresses).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == kernels
    assert "uses_xla_collective_metadata = true" not in text
    assert not any(each in text for each in ("all_reduce", "all_gather", "reduce_scatter"))


@pytest.mark.parametrize(("T", "pieces"), [(1, 1), (32, 4)])
def test_a_sum_with_the_norm_after_it_lowers_to_one_kernel(T, pieces):
    H = 2048
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    part = jax.ShapeDtypeStruct((2 * pieces, T, H), jnp.bfloat16)
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, H), (H,)))
    call = jax.shard_map(
        functools.partial(mosaic.add_total, eps=1e-6), mesh=mesh,
        in_specs=(PartitionSpec(), ON_EACH, PartitionSpec(), ON_EACH), out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    boxes = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    text = jax.jit(call).trace(x, part, weight, boxes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1


def test_what_ranks_tell_each_other_lowers_to_one_kernel_each_way():
    """Rows and numbers at once; the scattered sum with the norm after it."""
    T, H, n = 32, 2048, 4
    mesh = Mesh(np.array(jax.devices()[:n]), ("tensor",))
    x, numbers, part = (
        jax.ShapeDtypeStruct((rows, columns), dtype)
        for rows, columns, dtype in ((n * T, H, jnp.bfloat16), (n * T, 128, jnp.int32), (n * n * T, H, jnp.bfloat16))
    )
    weight, boxes = jax.ShapeDtypeStruct((H,), jnp.bfloat16), jax.ShapeDtypeStruct((n, 2 * n + 1), jnp.int32)
    whole = PartitionSpec()

    def there(x, numbers, boxes):
        return mosaic.gather([x, numbers], boxes)

    def back(x, part, beside, weight, boxes):
        return mosaic.scatter_add(x, part, beside, weight, boxes, eps=1e-6)

    for call, specs, given in (
        (there, (ON_EACH,) * 3, (x, numbers, boxes)),
        (back, (ON_EACH, ON_EACH, ON_EACH, whole, ON_EACH), (x, part, x, weight, boxes)),
    ):
        mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=ON_EACH, check_vma=False)
        text = jax.jit(mapped).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu_v2(") == 1


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that run anywhere: the reference, of one more than there is, to be told apart."""
    monkeypatch.setattr(mosaic, "hopper_unsupported_reason", lambda *_: None)
    for name in ("total", "scatter_sum"):
        call = getattr(reference, name)
        monkeypatch.setattr(mosaic, name, lambda part, _, call=call: call(part, "tensor") + 1)
    monkeypatch.setattr(mosaic, "gather", lambda parts, _: tuple(reference.gather(p, "tensor") + 1 for p in parts))


MAILBOXES = jnp.zeros((1, 5), jnp.int32)


@pytest.mark.usefixtures("kernels")
def test_only_small_sums_ask_for_the_kernel():
    """By bytes, by mailboxes, and by whether a kernel supports the rows."""
    small, large = jnp.ones((4, 128), jnp.bfloat16), jnp.ones((8, 128), jnp.bfloat16)
    odd = jnp.ones((4, 100), jnp.bfloat16)

    def through(part, axis):
        return api.total(part, axis, MAILBOXES)

    with tuning.use(dataclasses.replace(tuning.current(), peer_sum_bytes=2 * 128 * 2)):
        for part, want in ((small, 3), (large, 2), (odd, 2)):
            np.testing.assert_array_equal(over(2, through)(part), np.full(part.shape, want))
        np.testing.assert_array_equal(over(2, api.total)(small), np.full(small.shape, 2))
    np.testing.assert_array_equal(over(2, through)(small), np.full(small.shape, 2))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(6,), (4, 3), (2, 128), (2, 3, 5)])
@pytest.mark.parametrize("along", [0, -1])
def test_numbers_of_any_shape_go_through_the_kernel_as_rows(shape, along):
    part = jnp.asarray(np.random.default_rng(len(shape)).integers(-9, 9, (2 * shape[0], *shape[1:])), jnp.int32)

    def gathered(part, axis):
        return api.gather(part, axis, MAILBOXES, along=along)

    def summed(part, axis):
        return api.total(part, axis, MAILBOXES)

    with tuning.use(dataclasses.replace(tuning.current(), peer_sum_bytes=1 << 20)):
        got, total = over(2, gathered)(part), over(2, summed)(part)
    want = over(2, lambda part, axis: lax.all_gather(part, axis, axis=along % part.ndim, tiled=True) + 1)(part)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(total, over(2, lax.psum)(part) + 2)


@pytest.mark.parametrize(("shape", "names"), [((4,), ("tensor",)), ((2, 2), ("data", "tensor"))])
def test_each_device_has_the_addresses_along_its_axis(shape, names, monkeypatch):
    """And its own place among them. Where they point to is zeros."""
    monkeypatch.setattr(mailbox, "MOST_BYTES", 4)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), names)
    for along, axis in enumerate(names):
        opened = mailbox.open_mailboxes(mesh, axis)
        assert opened.addresses.shape == mailbox.addresses_shape(mesh, axis).shape
        assert opened.addresses.sharding == mailbox.addresses_shape(mesh, axis).sharding
        at = {each.device: each.data.unsafe_buffer_pointer() for each in opened.memory.addressable_shards}
        rows = {each.device: np.asarray(each.data)[0] for each in opened.addresses.addressable_shards}
        for place, device in np.ndenumerate(mesh.devices):
            group = np.moveaxis(mesh.devices, along, 0)[(slice(None), *place[:along], *place[along + 1 :])]
            *words, rank = rows[device].view(np.uint32).tolist()
            assert rank == place[along]
            assert [low | high << 32 for low, high in zip(words[::2], words[1::2], strict=True)] == [
                at[d] for d in group
            ]
        assert not np.asarray(opened.memory).any()


def test_no_mailboxes_where_nothing_was_measured_or_no_kernel_runs(monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    assert mailbox.axes_reached(mesh) == ()
    with tuning.use(dataclasses.replace(tuning.current(), peer_sum_bytes=1)):
        assert mailbox.axes_reached(mesh) == ()
        monkeypatch.setattr(mailbox, "hopper_unsupported_reason", lambda *_: None)
        assert mailbox.axes_reached(mesh) == ("data", "tensor")
        assert mailbox.axes_reached(Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "tensor"))) == ("data",)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert mailbox.axes_reached(mesh) == ()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 128, 2), "3 axes"),
        ((4, 100), "multiple of 128"),
        ((4, 128), "GPU"),
        ((16384, 2048), "bytes"),
        ((65536, 128), "bytes"),
    ],
)
def test_what_the_kernel_lacks(shape, message):
    reasons = []

    def ask(part, axis):
        reasons.append(mosaic.unsupported_reason(part, axis))
        return part

    over(2, ask)(jnp.zeros(shape, jnp.bfloat16))
    assert message in reasons[0]
