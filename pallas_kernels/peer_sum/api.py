"""Sums and gathers of the rows that the devices of a mesh axis hold, inside a `jax.shard_map`.

Up to `Tuning.peer_sum_bytes` kernels read the others' rows through their memory, and a step's CUDA graph holds them. XLA's own
collectives cut the graph in two.
"""

import math

import jax
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.backend import choose
from pallas_kernels.peer_sum import mosaic


def total(part: jax.Array, axis: str) -> jax.Array:
    """The sum of every device's part, the same bits on all of them.

    Args:
        part: equal shapes on all devices.
        axis: of the mesh.
    """
    return mosaic.total(part, axis) if _has_kernel(part, axis) else lax.psum(part, axis)


def scatter_sum(part: jax.Array, axis: str) -> jax.Array:
    """Of `total` the rows of this device, of as many equal parts as there are devices.

    Args:
        part: [devices * T, ...], equal shapes on all devices.
        axis: of the mesh.

    Returns:
        [T, ...].
    """
    if _has_kernel(part, axis):
        return mosaic.scatter_sum(part, axis)
    return lax.psum_scatter(part, axis, scatter_dimension=0, tiled=True)


def gather(part: jax.Array, axis: str) -> jax.Array:
    """All devices' rows, one part after the other.

    Args:
        part: [T, ...], equal shapes on all devices.
        axis: of the mesh.

    Returns:
        [devices * T, ...].
    """
    return mosaic.gather(part, axis) if _has_kernel(part, axis) else lax.all_gather(part, axis, axis=0, tiled=True)


def _has_kernel(part: jax.Array, axis: str) -> bool:
    if math.prod(part.shape) * part.dtype.itemsize > tuning.current().peer_sum_bytes:
        return False
    return choose("peer_sum", "auto", {"mosaic": mosaic.unsupported_reason(part, axis)}) == "mosaic"
