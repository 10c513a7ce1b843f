"""Memory of each device of a host into which the others write, and how they find it.

A mailbox begins with zeros and lies where it lies for as long as anything that was given its address may run. Nothing but the
kernels reads or writes it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import tuning
from pallas_kernels.backend import hopper_unsupported_reason

# Whose memory NVLink reaches in one host.
MOST_DEVICES = 8
# Of one device's part in a call.
MOST_BYTES = 8 << 20
# What one call sends lies apart from what the call before sent: a power of two.
SIDES = 2


@dataclass(frozen=True)
class Layout:
    """Where things lie in a mailbox of so many devices, in bytes.

    calls, int32: how many there were. ended, int32: blocks of the running call that have ended. words, int32 [SIDES, devices,
    MOST_BYTES / 4, 2]: what each device has sent, each word with the number of the call that sent it.
    """

    devices: int

    calls = 0
    ended = 4
    words = 256

    @property
    def of_a_sender(self) -> int:
        """Bytes between what one device has sent and the next."""
        return 2 * MOST_BYTES

    @property
    def size(self) -> int:
        return self.words + SIDES * self.devices * self.of_a_sender


@dataclass(frozen=True)
class Mailboxes:
    """Of the devices along one axis of a mesh.

    Attributes:
        memory: keeps it alive. int32 [mesh size, words], a row on each device.
        addresses: int32 [mesh size, 2 * n + 1], a row on each device: the low and high words of the addresses of the n
            mailboxes along the axis, and its own place there. What the kernels take.
    """

    memory: jax.Array
    addresses: jax.Array


def axes_reached(mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh along which devices write to each other: on Hopper, in one process, where it was measured to pay."""
    if mesh.size == 1 or not tuning.current().peer_sum_bytes or jax.process_count() > 1 or hopper_unsupported_reason():
        return ()
    return tuple(axis for axis, size in mesh.shape.items() if 1 < size <= MOST_DEVICES)


def addresses_shape(mesh: Mesh, axis: str) -> jax.ShapeDtypeStruct:
    """Of `Mailboxes.addresses`."""
    return jax.ShapeDtypeStruct((mesh.size, 2 * mesh.shape[axis] + 1), jnp.int32, sharding=_on_each(mesh))


def open_mailboxes(mesh: Mesh, axis: str) -> Mailboxes:
    """New ones, of devices of this process."""
    shape = addresses_shape(mesh, axis)
    sizes = (mesh.size, Layout(mesh.shape[axis]).size // 4)
    memory = jax.jit(lambda: jnp.zeros(sizes, jnp.int32), out_shardings=shape.sharding)()
    memory.block_until_ready()
    at = {shard.device: shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards}
    along, rows = mesh.axis_names.index(axis), []
    for place in np.ndindex(mesh.devices.shape):
        group = mesh.devices[(*place[:along], slice(None), *place[along + 1 :])]
        words = np.array([at[device] for device in group], np.uint64).view(np.uint32)
        rows.append(np.append(words, np.uint32(place[along])).view(np.int32))
    return Mailboxes(memory, jax.device_put(np.stack(rows), shape.sharding))


def _on_each(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
